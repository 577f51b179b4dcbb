// Convolve one token of each row, as step.cu does: there is so little to do for it that a thread takes several rows.
#include "causal_conv1d/short_window.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_causal_conv1d_one_token_step(const __grid_constant__ CausalConv1dParams params) {
  replay::run_step<ROWS_PER_BLOCK, 1>(params, 1);
}
