// Sums over the rows after a row, by the lanes of a half warp, a row of a group each.
#pragma once
#include "common/lanes.cuh"

namespace replay {

constexpr int HALF_WARP = 16;  // has one head at a time

struct SuffixSums {
  float from;   // over this row and those after it
  float after;  // over those after it
};

// `beyond` is the sum over the groups after this one.
__device__ inline SuffixSums suffix_sums(float value, float beyond = 0.0f) {
  const int row = threadIdx.x % HALF_WARP;
#pragma unroll
  for (int offset = 1; offset < HALF_WARP; offset *= 2) {
    const float other = __shfl_down_sync(FULL_WARP, value, offset, HALF_WARP);
    if (row + offset < HALF_WARP) value += other;
  }
  const float after = __shfl_down_sync(FULL_WARP, value, 1, HALF_WARP);
  return {value + beyond, (row == HALF_WARP - 1 ? 0.0f : after) + beyond};
}

}  // namespace replay
