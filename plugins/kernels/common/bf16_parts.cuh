// Numbers as sums of bfloat16 parts, each of which has 8 bits of what those before it leave: three are as good as fp32.
// Products take the parts one by one; those of two small parts may be left out.
#pragma once
#include "common/mma.cuh"

namespace replay {

// The parts of two numbers, the greatest first.
template <int PARTS>
__device__ inline void split_pair(float first, float second, uint32_t (&parts)[PARTS]) {
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    parts[i] = pack_bf16(first, second);
    first -= low_bf16(parts[i]);
    second -= high_bf16(parts[i]);
  }
}

}  // namespace replay
