// Barriers at which warps arrive as a whole: what their lanes have read and written before is done before what waits.
//
// One lane arrives for all. compute-sanitizer's racecheck takes for done what that lane did, and calls the others' stores
// hazards; for it, and for nothing else, every lane can arrive (CONTRIBUTING.md).
#pragma once
#include "common/barrier.cuh"
#include "common/lanes.cuh"

namespace replay {

#ifdef REPLAY_EVERY_LANE_ARRIVES
constexpr int ARRIVALS_OF_WARP = WARP_SIZE;
#else
constexpr int ARRIVALS_OF_WARP = 1;
#endif

__device__ inline void init_for_warps(uint32_t barrier, int num_warps) {
  ptx::barrier_init(barrier, num_warps * ARRIVALS_OF_WARP);
}

__device__ inline void arrive_as_warp(uint32_t barrier) {
  __syncwarp();
  if (ARRIVALS_OF_WARP == WARP_SIZE || threadIdx.x % WARP_SIZE == 0) ptx::barrier_arrive(barrier);
}

}  // namespace replay
