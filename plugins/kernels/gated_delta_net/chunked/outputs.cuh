// Outputs of a chunk, by a state warp for its columns: what is left of the state says of q, plus the weighted u of the
// chunk's tokens up to each. With two splits each finishes one tile of tokens.
#pragma once
#include "gated_delta_net/chunked/updates.cuh"

namespace replay {

// Columns g and g + 8 of v at the tokens of the own tiles, in blocks of eight.
struct OwnOutputs {
  float blocks[2 * OWN_TILES][4];
};

// The first of a warp's own tiles.
__device__ inline int first_own_tile(const WarpPart& part) { return KEY_SPLITS == 1 ? 0 : part.split; }

// The numbers of the own tiles, or of the partner's. They lie in registers: chosen one by one.
__device__ inline OwnOutputs choose_tiles(const WarpPart& part, const TokenValues& values, bool is_own) {
  OwnOutputs chosen;
  const bool is_second = KEY_SPLITS == 2 && (part.split == 1) == is_own;
#pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      chosen.blocks[i][j] = is_second ? values.blocks[i + TOKEN_BLOCKS - 2 * OWN_TILES][j] : values.blocks[i][j];
    }
  }
  return chosen;
}

// Add up what the two splits of a value tile read: of the keys for both, of the queries for who finishes them. The same
// numbers are added on both sides, so both have the same sums.
__device__ inline void exchange_reads(const ChunkShared& shared, const WarpPart& part, TokenValues& keys,
                                      const TokenValues& queries, OwnOutputs& outputs) {
  const OwnOutputs others = choose_tiles(part, queries, false);
  const auto meet_partner = [&] { ptx::meet(1 + part.value_tile, KEY_SPLITS * WARP_SIZE); };
  meet_partner();  // it has taken what was given before
  float4* given = shared.given(part.warp) + part.lane;
  const auto give = [&](int i, const float(&block)[4]) {
    given[i * WARP_SIZE] = make_float4(block[0], block[1], block[2], block[3]);
  };
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) give(i, keys.blocks[i]);
#pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; ++i) give(TOKEN_BLOCKS + i, others.blocks[i]);
  meet_partner();  // both have given
  const float4* taken = shared.given(part.warp ^ 1) + part.lane;
  const auto take = [&](int i, float(&block)[4]) {
    const float4 other = taken[i * WARP_SIZE];
    block[0] += other.x;
    block[1] += other.y;
    block[2] += other.z;
    block[3] += other.w;
  };
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) take(i, keys.blocks[i]);
#pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; ++i) take(TOKEN_BLOCKS + i, outputs.blocks[i]);
}

// The address that a lane gives for a part of the weights of a tile of tokens by one of earlier ones; of a later one they
// are zero, as a block of the first tile is.
__device__ inline uint32_t weights_address(const Stage& stage, const WarpPart& part, int tile, int source, int which) {
  const bool is_seen = source <= tile;
  const int offset = Stage::weights_offset(is_seen ? Stage::tile_index(tile, source) : 0, which);
  return stage.address + offset + (is_seen ? part.lane * 16 : 128 + part.lane % 8 * 16);
}

// Finish the outputs, which come as what the state says of q: that with its weights, plus u W^T. u and the weights go in as
// two parts each, 16 bits. Without a branch, so that what follows fills the time in which products wait for each other.
__device__ inline void add_u(const Stage& stage, const WarpPart& part, const TokenParts<2>& u, OwnOutputs& outputs) {
  const int first = first_own_tile(part);
#pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; ++i) {
    const float2 weight = stage.coefficient_pair(OUTPUT_WEIGHT, first * MMA_TILE + 8 * i + 2 * part.q);
#pragma unroll
    for (int j = 0; j < 4; ++j) outputs.blocks[i][j] *= j % 2 ? weight.y : weight.x;
  }
#pragma unroll
  for (int i = 0; i < OWN_TILES; ++i) {
#pragma unroll
    for (int source = 0; source < TOKEN_TILES; ++source) {
      if (KEY_SPLITS == 1 && source > i) continue;
      uint32_t high[4], low[4];
      ptx::load_matrices(high, weights_address(stage, part, first + i, source, 0));
      ptx::load_matrices(low, weights_address(stage, part, first + i, source, 1));
      const auto multiply = [&](const uint32_t(&left)[4], const uint32_t(&right)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_bf16(outputs.blocks[2 * i + half], left, right[2 * half], right[2 * half + 1]);
        }
      };
      multiply(u.words[1][source], high);
      multiply(u.words[0][source], low);
      multiply(u.words[0][source], high);
    }
  }
}

// Write the outputs, rounded once. `o` is the slice's output of the chunk's first token.
__device__ inline void store_outputs(ACTIVATION_TYPE* o, const WarpPart& part, int num_tokens, const OwnOutputs& outputs) {
#pragma unroll
  for (int i = 0; i < 2 * OWN_TILES; ++i) {
    const float(&block)[4] = outputs.blocks[i];
    const uint32_t words[2] = {ptx::transpose(pack_bf16(block[0], block[1])),
                               ptx::transpose(pack_bf16(block[2], block[3]))};
    const int token = first_own_tile(part) * MMA_TILE + 8 * i + part.g;
    if (token >= num_tokens) continue;
    uint32_t* target = reinterpret_cast<uint32_t*>(o + static_cast<int64_t>(token) * (N_VALUE_HEADS * VALUE_DIM) +
                                                   part.value_tile * MMA_TILE) + part.q;
    target[0] = words[0];
    target[4] = words[1];
  }
}

}  // namespace replay
