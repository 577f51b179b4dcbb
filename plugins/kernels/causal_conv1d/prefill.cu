// Convolve a long window: TOKEN_SPLITS blocks share out its tokens, for every BLOCK_THREADS * CHANNELS_PER_THREAD
// channels. Right for windows of any length.
//
// Reads x and, before the window, the ring rows of positions past-D_CONV+1 .. past-1 (none below 0); writes y and the
// window's last min(n, R_conv) ring rows. Tensors: params.h. fp32 sums, rounded once; ring rows are x bit by bit.
#include "causal_conv1d/long_window.cuh"
#include "common/dependent_launch.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    replay_causal_conv1d_prefill(const __grid_constant__ CausalConv1dParams params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  const int channel = (blockIdx.x / TOKEN_SPLITS * BLOCK_THREADS + threadIdx.x) * CHANNELS_PER_THREAD;
  if (channel >= CONV_DIM) return;
  if (are_aligned(params)) {
    convolve_row<true>(params, blockIdx.y, blockIdx.x % TOKEN_SPLITS, channel);
  } else {
    convolve_row<false>(params, blockIdx.y, blockIdx.x % TOKEN_SPLITS, channel);
  }
}
