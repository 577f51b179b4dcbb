// In a flush: fold the pending rows into a tile of the checkpoint, by bfloat16 products with fp32 sums.
//
// S_c = exp(A D(f, c)) S_f + sum over pending j of (weight_j x_j) B_j^T. B is bfloat16 already; weight_j x_j is split
// into bfloat16 parts whose sum has as many digits as the state keeps, so the fold is as exact as in fp32.
#pragma once
#include "mamba2/pipeline/fragments.cuh"

namespace replay {

// Each part has 8 bits of the number: three for a state in fp32, two for one that is rounded to 8 bits afterwards.
constexpr int FOLD_PARTS = IS_STATE_FP32 ? 3 : 2;

struct WeightedX {
  uint32_t parts[ROW_GROUPS][FOLD_PARTS][4];

  __device__ WeightedX(ChunkBuffer buffer, int pending, int channel, const float* weights) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      uint32_t x[4];
      load_x(buffer, group * MMA_TOKENS, pending - group * MMA_TOKENS, channel, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = group * MMA_TOKENS + 2 * q + i / 2 * 8;
        float low = low_bf16(x[i]) * weights[row], high = high_bf16(x[i]) * weights[row + 1];
#pragma unroll
        for (int part = 0; part < FOLD_PARTS; ++part) {
          parts[group][part][i] = pack_bf16(low, high);
          low -= low_bf16(parts[group][part][i]);
          high -= high_bf16(parts[group][part][i]);
        }
      }
    }
  }
};

// The two columns of block i of rows g (upper) and g + 8 (lower) in fp32, in the order of a product's sums.
__device__ inline void unpack_block(const Vector16& upper, const Vector16& lower, int i, float (&values)[4]) {
  if constexpr (IS_STATE_FP32) {
    values[0] = bits_to_float(upper.words[2 * i]);
    values[1] = bits_to_float(upper.words[2 * i + 1]);
    values[2] = bits_to_float(lower.words[2 * i]);
    values[3] = bits_to_float(lower.words[2 * i + 1]);
  } else {
    values[0] = low_bf16(upper.words[i]);
    values[1] = high_bf16(upper.words[i]);
    values[2] = low_bf16(lower.words[i]);
    values[3] = high_bf16(lower.words[i]);
  }
}

// Round to the state's type in memory, once.
__device__ inline void pack_block(const float (&values)[4], int i, Vector16& upper, Vector16& lower) {
  if constexpr (IS_STATE_FP32) {
    upper.words[2 * i] = float_to_bits(values[0]);
    upper.words[2 * i + 1] = float_to_bits(values[1]);
    lower.words[2 * i] = float_to_bits(values[2]);
    lower.words[2 * i + 1] = float_to_bits(values[3]);
  } else {
    upper.words[i] = pack_bf16(values[0], values[1]);
    lower.words[i] = pack_bf16(values[2], values[3]);
  }
}

// Fold vector m of rows g and g + 8 in place. Each block of columns has sums of its own, so that products overlap.
__device__ inline void fold_vector(const WeightedX& x, const PendingB& B, int m, float decay, Vector16& upper,
                                   Vector16& lower) {
  float values[BLOCKS_PER_VECTOR][4];
#pragma unroll
  for (int i = 0; i < BLOCKS_PER_VECTOR; ++i) {
    unpack_block(upper, lower, i, values[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) values[i][k] *= decay;
  }
#pragma unroll
  for (int group = 0; group < ROW_GROUPS; ++group) {
    uint32_t blocks[BLOCKS_PER_VECTOR][2];
    B.load(group, m, blocks);
    // Small parts first.
#pragma unroll
    for (int part = FOLD_PARTS - 1; part >= 0; --part) {
#pragma unroll
      for (int i = 0; i < BLOCKS_PER_VECTOR; ++i) {
        ptx::mma_bf16(values[i], x.parts[group][part], blocks[i][0], blocks[i][1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < BLOCKS_PER_VECTOR; ++i) pack_block(values[i], i, upper, lower);
}

}  // namespace replay
