// 32-bit words that hold operands of products: pairs of bfloat16, tf32 and fp32 as bits.
#pragma once
#include "common/types.cuh"

namespace replay {

// Two bfloat16 of one word, the first in the low half.
__device__ inline float low_bf16(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

// Is any of eight bfloat16 not finite? Zero times a finite number is zero; else it is NaN, which stays.
__device__ inline bool has_non_finite(const uint32_t (&pairs)[4]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(high_bf16(pairs[i]), 0.0f, fmaf(low_bf16(pairs[i]), 0.0f, sum));
  return sum != 0.0f;
}

// Replace what is not finite by zero.
__device__ inline void clear_non_finite(uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((pairs[i] & 0x00007f80u) == 0x00007f80u) pairs[i] &= 0xffff0000u;
    if ((pairs[i] & 0x7f800000u) == 0x7f800000u) pairs[i] &= 0x0000ffffu;
  }
}

// Keeps the halves of a pair whose index, first or first + 1, is below count: what stands in the others may be NaN.
__device__ inline uint32_t pair_mask(int first, int count) {
  return (first < count ? 0x0000ffffu : 0u) | (first + 1 < count ? 0xffff0000u : 0u);
}

__device__ inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

__device__ inline bool is_finite(float value) { return (float_to_bits(value) & 0x7f800000u) != 0x7f800000u; }

// An fp32 number in two parts, of which a tf32 product reads every bit that counts: it takes the upper 19 bits of an
// operand, which hold the first part exactly, and 11 digits of the rest. NaN and infinities stay so, or become NaN.
struct Tf32Parts {
  uint32_t high, low;

  __device__ explicit Tf32Parts(uint32_t fp32_bits)
      : high(fp32_bits & 0xffffe000u), low(float_to_bits(bits_to_float(fp32_bits) - bits_to_float(high))) {}
};

}  // namespace replay
