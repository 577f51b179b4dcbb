// SiLU, with which every convolution of a recurrent layer ends.
#pragma once
#include "common/ptx.cuh"

namespace replay {

// x / (1 + exp(-x)) by the hardware's functions: within some units in the last place of fp32.
__device__ inline float silu(float x) {
  constexpr float LOG2_E = 1.4426950408889634f;
  return x * ptx::reciprocal(1.0f + ptx::exp2(-LOG2_E * x));
}

}  // namespace replay
