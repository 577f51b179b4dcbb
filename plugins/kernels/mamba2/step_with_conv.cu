// The causal convolution, SiLU, and the pipelined step of what comes out, in one launch; the convolution's results go
// through shared memory alone. The same bits as the two kernels give one after the other.
//
// Tensors: params_with_conv.h, x, B and C in 16-byte pieces, the heads of x neighbours.
#include "mamba2/pipeline/convolution.cuh"
#include "mamba2/pipeline/run.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_mamba2_step_with_conv(const __grid_constant__ Mamba2WithConvParams params) {
  extern __shared__ __align__(128) replay::Vector16 shared_memory[];
  replay::run_pipeline(params.step, replay::Convolution(params), shared_memory);
}
