// A place in a ring of stages or buffers, with the phase of its barriers.
#pragma once
#include <cstdint>

namespace replay {

// A place in a ring of PERIOD stages or buffers, and the parity of the phase that its barriers are in; in one register.
template <int PERIOD>
struct Turn {
  int place;  // in two rounds

  __device__ explicit Turn(int first = 0) : place(first) {}
  __device__ int index() const { return place < PERIOD ? place : place - PERIOD; }
  __device__ uint32_t parity() const { return place < PERIOD ? 0 : 1; }
  // For who waits until a place is free, as all places are at first: of the phase before.
  __device__ uint32_t parity_before() const { return place < PERIOD ? 1 : 0; }
  // By at most PERIOD.
  __device__ void advance(int steps) {
    place += steps;
    if (place >= 2 * PERIOD) place -= 2 * PERIOD;
  }
};

}  // namespace replay
