// Outputs of a chunk, an output warp for each tile of tokens: y_t = decay_t S C_t + sum over j <= t of weight_{j,t}
// x_j, D x_t inside the weight of t. Rows of the products are tokens, columns are state rows.
#pragma once
#include "mamba2/chunked/scores.cuh"

namespace replay {

// Of each row tile two blocks of eight state rows, at tokens g and g + 8.
struct TileOutputs {
  float blocks[ROW_TILES][2][4];

  // Scale tokens g and g + 8.
  __device__ void scale(float first, float second) {
#pragma unroll
    for (int i = 0; i < 8 * ROW_TILES; ++i) blocks[i / 8][i / 4 % 2][i % 4] *= i % 4 < 2 ? first : second;
  }
};

// outputs = S C^T, with the state in two parts. With few rows the parts have sums of their own, so that enough products
// are under way. Operands come some products before they are needed.
__device__ inline void multiply_state(const ChunkShared& shared, const Stage& stage, const LanePlace& place,
                                      int token_tile, TileOutputs& outputs) {
  constexpr bool IS_APART = ROW_TILES <= 2;
  constexpr int NUM_TURNS = K_STEPS * ROW_TILES, AHEAD = 2;
  TileOutputs low_outputs = {};
  outputs = {};
  TileOutputs& low_sums = IS_APART ? low_outputs : outputs;
  Vector16 words[AHEAD + 1][2];
  const auto load_words = [&](int turn) {
    const Vector16* source = shared.snapshot(turn % ROW_TILES, turn / ROW_TILES, place.lane);
    for (int part = 0; part < 2; ++part) words[turn % (AHEAD + 1)][part] = source[part * WARP_SIZE];
  };
  uint32_t C[2][4];
  const uint32_t C_first = TokenC::first(stage, place, token_tile);
  ptx::load_matrices(C[0], C_first);
#pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) load_words(turn);
#pragma unroll
  for (int turn = 0; turn < NUM_TURNS; ++turn) {
    const int k = turn / ROW_TILES, tile = turn % ROW_TILES;
    if (tile == 0 && k + 1 < K_STEPS) ptx::load_matrices(C[(k + 1) % 2], C_first ^ ((k + 1) * 32));
    if (turn + AHEAD < NUM_TURNS) load_words(turn + AHEAD);
    const Vector16 &high = words[turn % (AHEAD + 1)][0], &low = words[turn % (AHEAD + 1)][1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_bf16(low_sums.blocks[tile][i], C[k % 2], low.words[2 * i], low.words[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_bf16(outputs.blocks[tile][i], C[k % 2], high.words[2 * i], high.words[2 * i + 1]);
    }
  }
  if (!IS_APART) return;
#pragma unroll
  for (int i = 0; i < 8 * ROW_TILES; ++i) {
    outputs.blocks[i / 8][i / 4 % 2][i % 4] += low_outputs.blocks[i / 8][i / 4 % 2][i % 4];
  }
}

__device__ inline bool is_finite(bfloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }

// What was cleared from a tile's x spoils the outputs of its own token and of those after it in the tile.
__device__ inline void spoil_outputs(const Stage& stage, const LanePlace& place, int token_tile, int row_tile,
                                     float (&blocks)[2][4]) {
#pragma unroll 1
  for (int j = 0; j < MMA_TILE; ++j) {
    const bfloat16* x = stage.x(token_tile * MMA_TILE + j) + row_tile * MMA_TILE + 2 * place.q;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_reached = j <= place.g + i % 4 / 2 * 8;
      if (is_reached && !is_finite(x[i / 4 * 8 + i % 2])) blocks[i / 4][i % 4] = bits_to_float(0x7fc00000u);
    }
  }
}

// outputs += weights times x of one tile of sources. In the tokens' own tile a token must not reach those before it,
// and zero times what is not finite would: that goes by another way.
template <bool IS_OWN>
__device__ inline void multiply_tokens(const Stage& stage, const LanePlace& place, int source_tile,
                                       const WeightParts& weights, TileOutputs& outputs) {
  const int row = source_tile * MMA_TILE + place.lane % 16;
  const uint32_t first = stage.address + StageOffsets::X + row * X_ROW_BYTES + place.lane / 16 * 16;
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile) {
    uint32_t x[4];
    ptx::load_transposed(x, first + tile * 32);
    const bool is_spoilt = IS_OWN && __any_sync(FULL_WARP, has_non_finite(x));
    if (is_spoilt) clear_non_finite(x);
    float(&blocks)[2][4] = outputs.blocks[tile];
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::mma_bf16(blocks[i], weights.low, x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::mma_bf16(blocks[i], weights.high, x[2 * i], x[2 * i + 1]);
    if (is_spoilt) spoil_outputs(stage, place, source_tile, tile, blocks);
  }
}

// From what the state before the chunk gives to what the tokens up to each add.
__device__ inline void add_tokens(const Stage& stage, const LanePlace& place, const TokenC& C, int token_tile, float D,
                                  TileOutputs& outputs) {
  const ChunkDecays& decays = stage.decays();
  const auto tile_decay = [&](int tile) { return decays.decay_to[tile * MMA_TILE + MMA_TILE - 1]; };
  float before = 0.0f;
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES - 1; ++tile) before += tile < token_tile ? tile_decay(tile) : 0.0f;
  const float state_decay = ptx::exp2(before);
  outputs.scale(state_decay, state_decay);
  float decay = 1.0f;
#pragma unroll 1
  for (int tile = token_tile - 1; tile >= 0; --tile) {
    Scores scores(stage, place, C, tile);
    scores.weigh_earlier(decays, place, tile, decay);
    multiply_tokens<false>(stage, place, tile, WeightParts(scores), outputs);
    decay *= ptx::exp2(tile_decay(tile));
  }
  const float* first = decays.decay_to + token_tile * MMA_TILE + place.g;
  const float decay_to[2] = {first[0], first[8]};
  outputs.scale(ptx::exp2(decay_to[0]), ptx::exp2(decay_to[1]));
  Scores scores(stage, place, C, token_tile);
  scores.weigh_own(decays, place, token_tile, decay_to, D);
  multiply_tokens<true>(stage, place, token_tile, WeightParts(scores), outputs);
}

// Write the outputs of a tile's tokens, from the chunk's row `first` on and before row `end`, rounded once. `y` is the
// slice's output of the chunk's first row.
__device__ inline void store_outputs(ACTIVATION_TYPE* y, const LanePlace& place, int token_tile, int first, int end,
                                     const TileOutputs& outputs) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = token_tile * MMA_TILE + 8 * half + place.g;
    if (i < first || i >= end) continue;
    uint32_t* target = reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(i) * (N_HEADS * HEAD_DIM)) + place.q;
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float(&values)[4] = outputs.blocks[tile][block];
        target[tile * 8 + block * 4] = pack_bf16(values[2 * half], values[2 * half + 1]);
      }
    }
  }
}

}  // namespace replay
