// Convolve short windows: a thread runs all tokens of its channels of one row. Right for windows of any length.
//
// Reads x and, before the window, the ring rows of positions past-D_CONV+1 .. past-1 (none below 0); writes y and the
// window's last min(n, R_conv) ring rows. Tensors: params.h. fp32 sums, rounded once; ring rows are x bit by bit.
#include "causal_conv1d/short_window.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_causal_conv1d_step(const __grid_constant__ CausalConv1dParams params) {
  replay::run_step<ROWS_PER_BLOCK, 4>(params, params.seq_len);
}
