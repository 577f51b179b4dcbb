// In a flush: fold the pending rows into a tile of the checkpoint, by bfloat16 products with fp32 sums.
//
// S_c = decay S_f + sum over pending j of k_j (weight_j u_j)^T. k is bfloat16 already; weight_j u_j is split into
// bfloat16 parts whose sum has as many digits as the state keeps, so the fold is as exact as in fp32.
#pragma once
#include "gated_delta_net/pipeline/fragments.cuh"

namespace replay {

// Each part has 8 bits of the number: three for a state in fp32, two for one that is rounded to 8 bits afterwards.
constexpr int FOLD_PARTS = IS_STATE_FP32 ? 3 : 2;

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

// The pending keys at FOLD_ROWS rows of each part: operand B, whose columns are two neighbouring rows of each part.
struct PendingKeys {
  uint32_t pairs[FOLD_ROWS / 2][2];

  __device__ PendingKeys(ChunkBuffer buffer, int first_row) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    const uint32_t half = g % 2 == 0 ? 0x5410u : 0x7632u;  // the low, or the high, halves of two words
    const unsigned char* rows = buffer.key(2 * q) + (g / 2 * PART_ROWS + first_row) * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const FoldPairs first = *reinterpret_cast<const FoldPairs*>(rows + 8 * k * KEY_ROW_BYTES);
      const FoldPairs second = *reinterpret_cast<const FoldPairs*>(rows + (8 * k + 1) * KEY_ROW_BYTES);
#pragma unroll
      for (int i = 0; i < FOLD_ROWS / 2; ++i) pairs[i][k] = __byte_perm(first.words[i], second.words[i], half);
    }
  }
};

// What the pending rows add to FOLD_ROWS rows: by pairs of neighbouring ones, of each pair of columns in the order of a
// product's sums. It does not rest on the state, and each pair has sums of its own, so that products overlap.
struct FoldSums {
  float values[FOLD_ROWS / 2][COLUMN_PAIRS][4] = {};

  __device__ FoldSums(const WeightedU& u, const PendingKeys& keys) {
    // Small parts first.
#pragma unroll
    for (int part = FOLD_PARTS - 1; part >= 0; --part) {
#pragma unroll
      for (int pair = 0; pair < FOLD_ROWS / 2; ++pair) {
#pragma unroll
        for (int i = 0; i < COLUMN_PAIRS; ++i) {
          ptx::mma_bf16(values[pair][i], u.parts[part][i], keys.pairs[pair][0], keys.pairs[pair][1]);
        }
      }
    }
  }
  // One row of the checkpoint, in place; rounded to the state's type once.
  __device__ void fold(int row, float decay, StateVector& vector) const {
    const int k = row % 2;
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i) {
      const float (&sums)[4] = values[row / 2][i];
      if constexpr (IS_STATE_FP32) {
        vector.words[2 * i] = float_to_bits(decay * bits_to_float(vector.words[2 * i]) + sums[k]);
        vector.words[2 * i + 1] = float_to_bits(decay * bits_to_float(vector.words[2 * i + 1]) + sums[2 + k]);
      } else {
        vector.words[i] = pack_bf16(decay * low_bf16(vector.words[i]) + sums[k],
                                    decay * high_bf16(vector.words[i]) + sums[2 + k]);
      }
    }
  }
};

}  // namespace replay
