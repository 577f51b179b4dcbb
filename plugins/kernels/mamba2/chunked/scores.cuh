// What each token of a chunk weighs in each later one: exp(A * sum of dt over (j, t]) dt_j (B_j . C_t), plus D at j = t.
#pragma once
#include "mamba2/chunked/decays.cuh"

namespace replay {

constexpr int K_STEPS = D_STATE / MMA_TILE;

// C of 16 tokens as operand A.
struct TokenC {
  uint32_t words[K_STEPS][4];

  __device__ TokenC(const ChunkShared& shared, const WarpPart& part, int token_tile) {
    const uint32_t first = shared.address + ChunkOffsets::C + token_tile * BC_TILE_BYTES + part.rows_first();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) ptx::load_matrices(words[k], first ^ (k * 32));
  }
};

// B_j . C_t: 16 tokens t (rows) by 8 tokens j (columns) of two tiles each. Even and odd steps have sums of their own, so
// that enough products are under way.
__device__ inline void compute_scores(const TokenC& C, uint32_t B_first, float (&sums)[2][4]) {
  float odd_sums[2][4] = {};
#pragma unroll
  for (int k = 0; k < K_STEPS; k += 2) {
    uint32_t B[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_matrices(B[i], (B_first ^ (k * 32)) + i * BC_TILE_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::mma_bf16(sums[i], C.words[k], B[i][0], B[i][1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::mma_bf16(odd_sums[i], C.words[k + 1], B[i][2], B[i][3]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[i][k] += odd_sums[i][k];
  }
}

// The weights of 8 tokens j in two bfloat16 parts, so that they err less than the outputs' own rounding.
__device__ inline void store_weights(const ChunkShared& shared, const WarpPart& part, int token_tile, int source_tile,
                                     int source_half, float D, const float (&sums)[4]) {
  const ChunkDecays decays = shared.decays();
  const int source = source_tile * MMA_TILE + 8 * source_half + 2 * part.q;
  const bool is_own_tile = source_tile == token_tile;
  float2 from = *reinterpret_cast<const float2*>((is_own_tile ? decays.decay_to : decays.decay_from) + source);
  if (is_own_tile) from = {-from.x, -from.y};
  float between = 0.0f;
#pragma unroll
  for (int i = 1; i < CHUNK_TILES - 1; ++i) {
    if (source_tile + i < token_tile) between += decays.decay_to[(source_tile + i) * MMA_TILE + MMA_TILE - 1];
  }
  const float2 dt = *reinterpret_cast<const float2*>(decays.dt + source);
  unsigned char* tile = shared.base + ChunkShared::weights_offset(token_tile, source_tile) + source_half * 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = token_tile * MMA_TILE + 8 * half + part.g;
    const float to = decays.decay_to[token] + between;
    float first = ptx::exp2(fminf(to + from.x, 0.0f)) * (dt.x * sums[2 * half]);
    float second = ptx::exp2(fminf(to + from.y, 0.0f)) * (dt.y * sums[2 * half + 1]);
    if (is_own_tile) {
      // Chosen away, not multiplied by zero: later tokens may not be finite.
      first = source > token ? 0.0f : first + (source == token ? D : 0.0f);
      second = source + 1 > token ? 0.0f : second + (source + 1 == token ? D : 0.0f);
    }
    const uint32_t high = pack_bf16(first, second);
    uint32_t* words = reinterpret_cast<uint32_t*>(tile + half * 256) + part.lane;
    words[0] = high;
    words[PART_BYTES / 4] = pack_bf16(first - low_bf16(high), second - high_bf16(high));
  }
}

// A task is one token tile with one half of every tile up to it. Warps that share a scheduler, 4 apart, get an early
// tile and a late one; the last of 8 warps, which has other work, gets the first tile.
__device__ inline void weigh_tokens(const ChunkShared& shared, const WarpPart& part, float D) {
#pragma unroll 1
  for (int task = threadIdx.x / WARP_SIZE; task < 2 * CHUNK_TILES; task += NUM_WARPS) {
    const int half = task / CHUNK_TILES, token_tile = half ? 2 * CHUNK_TILES - 1 - task : task;
    const TokenC C(shared, part, token_tile);
    const uint32_t B_first = shared.address + shared.B_offset() + part.half_tile(half);
#pragma unroll 1
    for (int tile = 0; tile <= token_tile; tile += 2) {
      float sums[2][4] = {};
      compute_scores(C, B_first + tile * BC_TILE_BYTES, sums);
      store_weights(shared, part, token_tile, tile, half, D, sums[0]);
      if (tile < token_tile) store_weights(shared, part, token_tile, tile + 1, half, D, sums[1]);
    }
  }
}

}  // namespace replay
