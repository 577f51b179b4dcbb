// chunked_prefill.cu with more chunks and solvers, for GPUs that have the shared memory: by the constants it is compiled
// with (plugins/specializations/gated_delta_net_chunks.py), and under a name of its own.
#define replay_gated_delta_net_chunked_prefill replay_gated_delta_net_deep_chunked_prefill
#include "gated_delta_net/chunked_prefill.cu"
