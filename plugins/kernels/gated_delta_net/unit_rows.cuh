// Keys and queries at length 1 in shared memory, in fp32: from what came, and from what the ring keeps of it.
#pragma once
#include "gated_delta_net/tile.cuh"

namespace replay {

// Floats between rows of u beyond the slice: eight neighbouring lanes then read eight rows without a bank conflict.
constexpr int U_STRIDE = SLICE + 4;

// Copy num_rows rows of K numbers at length `scale`, a warp each; a barrier completes it. source_of(row) is the address
// of a row's first number.
template <typename SourceOf>
__device__ inline void stage_unit_rows(float* shared_target, int num_rows, float scale, SourceOf source_of) {
  constexpr int PER_LANE = (KEY_DIM + WARP_SIZE - 1) / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE;
  // The bound depends on the warp alone: the sums over lanes need all of its lanes.
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / WARP_SIZE; row < num_rows; row += NUM_WARPS) {
    const ACTIVATION_TYPE* source = source_of(row);
    float values[PER_LANE], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * WARP_SIZE;
      values[i] = column < KEY_DIM ? to_float(source[column]) : 0.0f;
      squares += values[i] * values[i];
    }
    const float factor = scale / sqrtf(sum_over_lanes<WARP_SIZE>(squares) + NORM_EPS);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * WARP_SIZE;
      if (column < KEY_DIM) shared_target[row * KEY_DIM + column] = values[i] * factor;
    }
  }
}

}  // namespace replay
