// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, each a pipeline (pipeline/run.cuh).
//
// Tensors: params.h, here with x, B and C in 16-byte pieces and the heads of x as neighbours. Numbers are as exact as in
// step.cu, to about 2^-17 of a weight; sums are fp32.
#include "mamba2/pipeline/run.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_mamba2_pipelined_step(const __grid_constant__ Mamba2Params params) {
  extern __shared__ __align__(128) replay::Vector16 shared_memory[];
  replay::run_pipeline(params, replay::NoConvolution{}, shared_memory);
}
