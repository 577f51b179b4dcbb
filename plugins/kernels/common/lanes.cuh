// Groups of neighbouring lanes that share one row, and sums over them.
#pragma once

namespace replay {

constexpr int WARP_SIZE = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

// Sum over the LANES neighbouring lanes; every lane gets the sum. All lanes of the warp must call it. The order of the
// additions is fixed, so results repeat bit by bit.
template <int LANES>
__device__ inline float sum_over_lanes(float value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(FULL_WARP, value, offset);
  return value;
}

}  // namespace replay
