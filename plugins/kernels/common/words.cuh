// 32-bit words that hold operands of products: pairs of bfloat16, tf32 and fp32 as bits.
#pragma once
#include "common/types.cuh"

namespace replay {

// Two bfloat16 of one word, the first in the low half.
__device__ inline float low_bf16(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

// Keeps the halves of a pair whose index, first or first + 1, is below count: what stands in the others may be NaN.
__device__ inline uint32_t pair_mask(int first, int count) {
  return (first < count ? 0x0000ffffu : 0u) | (first + 1 < count ? 0xffff0000u : 0u);
}

__device__ inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// An fp32 number in two parts, of which a tf32 product reads every bit that counts: it takes the upper 19 bits of an
// operand, which hold the first part exactly, and 11 digits of the rest. NaN and infinities stay so, or become NaN.
struct Tf32Parts {
  uint32_t high, low;

  __device__ explicit Tf32Parts(uint32_t fp32_bits)
      : high(fp32_bits & 0xffffe000u), low(float_to_bits(bits_to_float(fp32_bits) - bits_to_float(high))) {}
};

}  // namespace replay
