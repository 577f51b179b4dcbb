// What each token of a chunk weighs in each later one, exp(A * sum of dt over (j, t]) dt_j (B_j . C_t), plus D at j = t.
// An output warp makes them for its tile of tokens, one tile of sources after the other, and keeps them in registers.
#pragma once
#include "common/bf16_parts.cuh"
#include "mamba2/chunked/decays.cuh"

namespace replay {

// C of 16 tokens as operand A.
struct TokenC {
  uint32_t words[K_STEPS][4];

  // The lane's address of the first 16 columns; the next ones are at the address ^ 32, ^ 64, ^ 96, ...
  __device__ static uint32_t first(const Stage& stage, const LanePlace& place, int token_tile) {
    return stage.address + StageOffsets::C + token_tile * BC_TILE_BYTES + place.rows_first();
  }
  __device__ TokenC(const Stage& stage, const LanePlace& place, int token_tile) {
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) ptx::load_matrices(words[k], first(stage, place, token_tile) ^ (k * 32));
  }
};

// 16 tokens t (rows) by 16 tokens j (columns), in two products: {(g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1)}.
struct Scores {
  float halves[2][4];

  // B_j . C_t. Even and odd steps have sums of their own, so that enough products are under way.
  __device__ Scores(const Stage& stage, const LanePlace& place, const TokenC& C, int source_tile) {
    const uint32_t first = stage.address + StageOffsets::B + source_tile * BC_TILE_BYTES + place.pieces_first();
    float sums[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
      uint32_t B[4];
      ptx::load_matrices(B, first ^ (k * 32));
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_bf16(sums[k % 2][i], C.words[k], B[2 * i], B[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) halves[i][k] = sums[0][i][k] + sums[1][i][k];
    }
  }

  // Weights of an earlier tile in what is left of it at the end of the tile before the tokens' own, where `decay` is
  // left of what it was at its own end.
  __device__ void weigh_earlier(const ChunkDecays& decays, const LanePlace& place, int source_tile, float decay) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* weights = decays.tile_weight + source_tile * MMA_TILE + 8 * i + 2 * place.q;
      const float2 pair = *reinterpret_cast<const float2*>(weights);
      const float first = pair.x * decay, second = pair.y * decay;
#pragma unroll
      for (int k = 0; k < 4; ++k) halves[i][k] *= k % 2 ? second : first;
    }
  }

  // Weights of the tokens' own tile.
  __device__ void weigh_own(const ChunkDecays& decays, const LanePlace& place, int tile, const float (&decay_to)[2],
                            float D) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int source = 8 * i + 2 * place.q;
      const float2 from = *reinterpret_cast<const float2*>(decays.decay_to + tile * MMA_TILE + source);
      const float2 dt = *reinterpret_cast<const float2*>(decays.dt + tile * MMA_TILE + source);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int token = place.g + k / 2 * 8, j = source + k % 2;
        const float decay = ptx::exp2(fminf(decay_to[k / 2] - (k % 2 ? from.y : from.x), 0.0f));
        const float weight = decay * ((k % 2 ? dt.y : dt.x) * halves[i][k]);
        // Chosen away, not multiplied by zero: later tokens may not be finite.
        halves[i][k] = j > token ? 0.0f : weight + (j == token ? D : 0.0f);
      }
    }
  }
};

// Weights as operand A in two bfloat16 parts, so that they err less than the outputs' own rounding.
struct WeightParts {
  uint32_t high[4], low[4];

  __device__ explicit WeightParts(const Scores& weights) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[2];
      split_pair(weights.halves[i / 2][i % 2 * 2], weights.halves[i / 2][i % 2 * 2 + 1], words);
      high[i] = words[0];
      low[i] = words[1];
    }
  }
};

}  // namespace replay
