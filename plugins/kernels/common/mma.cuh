// Tensor core products of one warp, and the 32-bit words that hold their operands.
//
// With g = lane / 4 and q = lane % 4, a product of A [16, K] and B [K, 8] takes from each lane: of A the rows g and
// g + 8, of B the column g; and gives it rows g and g + 8, columns 2q and 2q + 1 of the result, as
// sums = {(g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)}.
#pragma once
#include "common/types.cuh"

namespace replay {

// Two bfloat16 of one word, the first in the low half.
__device__ inline float low_bf16(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }

// Round both to nearest even.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
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

// A fp32 number in two parts, of which a tf32 product reads every bit that counts: it takes the upper 19 bits of an
// operand, which hold the first part exactly, and 11 digits of the rest. NaN and infinities stay so, or become NaN.
struct Tf32Parts {
  uint32_t high, low;

  __device__ explicit Tf32Parts(uint32_t fp32_bits)
      : high(fp32_bits & 0xffffe000u), low(float_to_bits(bits_to_float(fp32_bits) - bits_to_float(high))) {}
};

namespace ptx {

// K = 16. a: rows g, g + 8 at columns 2q, 2q + 1, then both at columns 2q + 8, 2q + 9; b: rows 2q, 2q + 1, then + 8.
__device__ inline void mma_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// K = 8. a: rows g, g + 8 at column q, then both at column q + 4; b: rows q and q + 4.
__device__ inline void mma_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit numbers, each transposed; lane 8 i + j gives the address of row j of matrix i.
__device__ inline void load_transposed(uint32_t (&words)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace ptx
}  // namespace replay
