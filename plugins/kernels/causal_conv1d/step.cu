// Convolve short windows: a thread runs all tokens of its channels, of ROWS_PER_BLOCK rows. Right for windows of any
// length.
//
// Reads x and, before the window, the ring rows of positions past-D_CONV+1 .. past-1 (none below 0); writes y and the
// window's last min(n, R_conv) ring rows. Tensors: params.h. fp32 sums, rounded once; ring rows are x bit by bit.
#include "causal_conv1d/short_window.cuh"
#include "common/dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_causal_conv1d_step(const __grid_constant__ CausalConv1dParams params) {
  using namespace replay;
  const int channel = (blockIdx.x * BLOCK_THREADS + threadIdx.x) * CHANNELS_PER_THREAD;
  const int first_row = blockIdx.y * ROWS_PER_BLOCK;
  if (threadIdx.x == 0) prefetch_lengths(params, first_row);
  if (blockIdx.y == 0 && channel < CONV_DIM) prefetch_taps(params, channel);
  wait_for_previous();
  let_next_start();
  if (channel >= CONV_DIM) return;
  if (!are_aligned(params)) {
#pragma unroll 1
    for (int row = first_row; row < min(first_row + ROWS_PER_BLOCK, params.num_rows); ++row) {
      convolve_rows<false, 1, 1>(params, params.seq_len, row, channel);
    }
  } else if (params.seq_len == 1) {
    convolve_rows<true, ROWS_PER_BLOCK, 1>(params, 1, first_row, channel);
  } else {
    constexpr int ROWS = ROWS_PER_BLOCK < ROWS_AT_ONCE ? ROWS_PER_BLOCK : ROWS_AT_ONCE;
#pragma unroll 1
    for (int row = first_row; row < min(first_row + ROWS_PER_BLOCK, params.num_rows); row += ROWS) {
      convolve_rows<true, ROWS, TOKENS_AT_ONCE>(params, params.seq_len, row, channel);
    }
  }
}
