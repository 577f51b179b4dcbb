// In a flush: fold the pending rows into a tile of the checkpoint, by bfloat16 products with fp32 sums.
//
// S_c = decay S_f + sum over pending j of k_j (weight_j u_j)^T. k is bfloat16 already; weight_j u_j is split into
// bfloat16 parts whose sum has as many digits as the state keeps, so the fold is as exact as in fp32.
#pragma once
#include "gated_delta_net/pipeline/fragments.cuh"

namespace replay {

// Each part has 8 bits of the number: three for a state in fp32, two for one that is rounded to 8 bits afterwards.
constexpr int FOLD_PARTS = IS_STATE_FP32 ? 3 : 2;
constexpr int FOLD_ROWS = 4;  // of each part, taken at once: with more, registers would be too few

// The lane's columns of all pending rows, weighted: operand A, by pairs of columns. u: of the lane's first column. Rows
// that are not pending weigh zero; for them stands the last one that is, since zero times NaN would not be zero.
struct WeightedU {
  uint32_t parts[FOLD_PARTS][COLUMN_PAIRS][4];

  __device__ WeightedU(const unsigned char* u, const float* weights, int pending) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[2][LANE_COLUMNS];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int row = 2 * q + 8 * half + k;
        load_as_float(reinterpret_cast<const float*>(u + min(row, pending - 1) * U_ROW_BYTES), values[k]);
#pragma unroll
        for (int c = 0; c < LANE_COLUMNS; ++c) values[k][c] *= weights[row];
      }
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) {
#pragma unroll
        for (int part = 0; part < FOLD_PARTS; ++part) {
          const uint32_t pair = pack_bf16(values[0][c], values[1][c]);
          parts[part][c / 2][2 * half + c % 2] = pair;
          values[0][c] -= low_bf16(pair);
          values[1][c] -= high_bf16(pair);
        }
      }
    }
  }
};

struct alignas(2 * FOLD_ROWS) FoldPairs {
  uint32_t words[FOLD_ROWS / 2];
};

// The pending keys at FOLD_ROWS rows of each part: operand B, whose columns are two neighbouring rows of each part.
struct PendingKeys {
  uint32_t pairs[FOLD_ROWS / 2][2];

  __device__ PendingKeys(ChunkBuffer buffer, int block) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    const uint32_t half = g % 2 == 0 ? 0x5410u : 0x7632u;  // the low, or the high, halves of two words
    const unsigned char* rows = buffer.key(2 * q) + (g / 2 * PART_ROWS + block * FOLD_ROWS) * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const FoldPairs first = *reinterpret_cast<const FoldPairs*>(rows + 8 * k * KEY_ROW_BYTES);
      const FoldPairs second = *reinterpret_cast<const FoldPairs*>(rows + (8 * k + 1) * KEY_ROW_BYTES);
#pragma unroll
      for (int i = 0; i < FOLD_ROWS / 2; ++i) pairs[i][k] = __byte_perm(first.words[i], second.words[i], half);
    }
  }
};

// Column pair i of two neighbouring rows in fp32, in the order of a product's sums.
__device__ inline void unpack_pair(const StateVector (&rows)[2], int i, float (&values)[4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if constexpr (IS_STATE_FP32) {
      values[k] = bits_to_float(rows[k].words[2 * i]);
      values[2 + k] = bits_to_float(rows[k].words[2 * i + 1]);
    } else {
      values[k] = low_bf16(rows[k].words[i]);
      values[2 + k] = high_bf16(rows[k].words[i]);
    }
  }
}

// Round to the state's type in memory, once.
__device__ inline void pack_pair(const float (&values)[4], int i, StateVector (&rows)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if constexpr (IS_STATE_FP32) {
      rows[k].words[2 * i] = float_to_bits(values[k]);
      rows[k].words[2 * i + 1] = float_to_bits(values[2 + k]);
    } else {
      rows[k].words[i] = pack_bf16(values[k], values[2 + k]);
    }
  }
}

// Fold two neighbouring rows in place. Each pair of columns has sums of its own, so that products overlap.
__device__ inline void fold_rows(const WeightedU& u, const uint32_t (&keys)[2], float decay, StateVector (&rows)[2]) {
  float values[COLUMN_PAIRS][4];
#pragma unroll
  for (int i = 0; i < COLUMN_PAIRS; ++i) {
    unpack_pair(rows, i, values[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) values[i][k] *= decay;
  }
  // Small parts first.
#pragma unroll
  for (int part = FOLD_PARTS - 1; part >= 0; --part) {
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i) ptx::mma_bf16(values[i], u.parts[part][i], keys[0], keys[1]);
  }
#pragma unroll
  for (int i = 0; i < COLUMN_PAIRS; ++i) pack_pair(values[i], i, rows);
}

}  // namespace replay
