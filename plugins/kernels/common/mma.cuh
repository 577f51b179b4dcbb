// Tensor core products of one warp, and what brings their operands into place.
//
// With g = lane / 4 and q = lane % 4, a product of A [16, K] and B [K, 8] takes from each lane: of A the rows g and
// g + 8, of B the column g; and gives it rows g and g + 8, columns 2q and 2q + 1 of the result, as
// sums = {(g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)}.
#pragma once
#include "common/words.cuh"

namespace replay {

// Round both to nearest even.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

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

// Four 8 x 8 matrices of 16-bit numbers; lane 8 i + j gives the address of row j of matrix i and gets columns 2q and
// 2q + 1 of row g of each.
__device__ inline void load_matrices(uint32_t (&words)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, each transposed; lane 8 i + j gives the address of row j of matrix i.
__device__ inline void load_transposed(uint32_t (&words)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_address)
               : "memory");
}

// Transpose an 8 x 8 matrix of 16-bit numbers that lies across the warp: columns 2q, 2q + 1 of row g in each lane.
__device__ inline uint32_t transpose(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace ptx
}  // namespace replay
