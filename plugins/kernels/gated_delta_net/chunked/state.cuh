// A state warp's part of the state, in fp32 where products leave their sums: 16 columns and WARP_KEYS rows of it,
// transposed. What it reads, right sides, u and outputs lie the same way, columns of v by tokens, so that each is operand
// A of the next product as it stands, and columns never leave their warp.
#pragma once
#include "gated_delta_net/chunked/layout.cuh"

namespace replay {

constexpr int KEY_BLOCKS = WARP_KEYS / 8;
// Blocks that are folded side by side: with all rows of the state to a warp, more would not fit in the registers.
constexpr int FOLD_BLOCKS = KEY_SPLITS == 1 || KEY_BLOCKS < 8 ? 4 : 8;

// A warp's part, and a lane's place in its products (common/mma.cuh).
struct WarpPart {
  int warp, value_tile, split;
  int lane, g, q;

  __device__ explicit WarpPart(uint32_t thread)
      : warp(thread / WARP_SIZE),
        value_tile(warp / KEY_SPLITS),
        split(warp % KEY_SPLITS),
        lane(thread % WARP_SIZE),
        g(lane / 4),
        q(lane % 4) {}

  // Of the slice; the lane's other one is eight further on.
  __device__ int column() const { return value_tile * MMA_TILE + g; }
  __device__ int first_key() const { return split * WARP_KEYS; }

  // A lane's offset for load_matrices() of 16 rows by two pieces of k or q: matrices in the order of rows first, or of
  // pieces first, from the warp's first key on. The next two pieces are at the offset ^ 32, ^ 64, ^ 96, ...
  __device__ int rows_first() const { return Stage::piece_offset(lane % 16, lane / 16) ^ (first_key() * 2); }
  __device__ int pieces_first() const {
    return Stage::piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ (first_key() * 2);
  }
};

// blocks[i] has columns g and g + 8 of v at rows 8 i + 2q and the next: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
struct WarpState {
  float blocks[KEY_BLOCKS][4];
};

// Columns g and g + 8 of v at tokens 8 i + 2q and the next.
struct TokenValues {
  float blocks[TOKEN_BLOCKS][4];
};

// The same in bfloat16 parts: operand A for each tile of tokens.
template <int PARTS>
struct TokenParts {
  uint32_t words[PARTS][TOKEN_TILES][4];

  __device__ explicit TokenParts(const TokenValues& values) {
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&block)[4] = values.blocks[2 * tile + i / 2];
        uint32_t parts[PARTS];
        split_pair(block[i % 2 * 2], block[i % 2 * 2 + 1], parts);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) words[part][tile][i] = parts[part];
      }
    }
  }
};

// The address in memory of block i's number j: [KEY_DIM, VALUE_DIM], columns side by side. `slice` is row 0.
__device__ inline STATE_TYPE* state_address(STATE_TYPE* slice, const WarpPart& part, int i, int j) {
  return slice + (part.first_key() + 8 * i + 2 * part.q + j % 2) * VALUE_DIM + part.column() + j / 2 * 8;
}

// A checkpoint at position 0 is zero whatever the memory holds, so it is not read.
__device__ inline void load_state(STATE_TYPE* slice, bool is_zero, const WarpPart& part, WarpState& state) {
  state = {};
  if (is_zero) return;
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state.blocks[i][j] = to_float(*state_address(slice, part, i, j));
  }
}

// Round to the state's type in memory, once.
__device__ inline void store_state(STATE_TYPE* slice, const WarpPart& part, const WarpState& state) {
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) *state_address(slice, part, i, j) = from_float<STATE_TYPE>(state.blocks[i][j]);
  }
}

// What the warp's rows of the state say of the chunk's keys, by the state in all its parts: u, and so the state, rests on
// it. And of the queries, by two parts, 16 bits: outputs are rounded to 8. Small parts of the former have sums of their
// own: tensor cores truncate each sum, a small one by less.
__device__ inline void read_state(const Stage& stage, const WarpPart& part, const WarpState& state, TokenValues& keys,
                                  TokenValues& queries) {
  const uint32_t first = stage.address + part.pieces_first();
  TokenValues small = {};
  keys = {};
  queries = {};
#pragma unroll
  for (int step = 0; step < KEY_BLOCKS / 2; ++step) {
    uint32_t parts[STATE_PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&block)[4] = state.blocks[2 * step + i / 2];
      uint32_t pair[STATE_PARTS];
      split_pair(block[i % 2 * 2], block[i % 2 * 2 + 1], pair);
#pragma unroll
      for (int k = 0; k < STATE_PARTS; ++k) parts[k][i] = pair[k];
    }
    uint32_t k[TOKEN_TILES][4], q[TOKEN_TILES][4];
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      const uint32_t address = (first ^ (step * 32)) + tile * KEY_TILE_BYTES;
      ptx::load_matrices(k[tile], address + StageOffsets::K);
      ptx::load_matrices(q[tile], address + StageOffsets::Q);
    }
    const auto multiply = [&](TokenValues& sums, int which, const uint32_t(&operand)[TOKEN_TILES][4]) {
#pragma unroll
      for (int i = 0; i < TOKEN_BLOCKS; ++i) {
        ptx::mma_bf16(sums.blocks[i], parts[which], operand[i / 2][i % 2 * 2], operand[i / 2][i % 2 * 2 + 1]);
      }
    };
    // Products of one sum are apart, so that they overlap.
    if constexpr (STATE_PARTS == 3) multiply(small, 2, k);
    multiply(queries, 1, q);
    multiply(small, 1, k);
    multiply(queries, 0, q);
    multiply(keys, 0, k);
  }
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) keys.blocks[i][j] += small.blocks[i][j];
  }
}

// u with its weight in the state behind the chunk.
__device__ inline TokenValues weigh_u(const Stage& stage, const WarpPart& part, const TokenValues& u) {
  TokenValues weighted;
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) {
    const float2 weight = stage.coefficient_pair(FOLD_WEIGHT, 8 * i + 2 * part.q);
#pragma unroll
    for (int j = 0; j < 4; ++j) weighted.blocks[i][j] = (j % 2 ? weight.y : weight.x) * u.blocks[i][j];
  }
  return weighted;
}

// S = decay S + sum over the chunk of k_j u_j^T, u with its weight. The sum is whole before it meets the state: a state
// that lives for thousands of tokens would feel each truncation.
__device__ inline void fold_chunk(const Stage& stage, const WarpPart& part, const TokenValues& u, WarpState& state) {
  const TokenParts<STATE_PARTS> weighted(weigh_u(stage, part, u));
  const uint32_t K_first = stage.address + StageOffsets::K + part.rows_first();
  const float decay = stage.coefficients(DECAYS)[CHUNK_DECAY];
#pragma unroll
  for (int first = 0; first < KEY_BLOCKS; first += FOLD_BLOCKS) {
    float sums[FOLD_BLOCKS][4] = {};
#pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
      uint32_t k[FOLD_BLOCKS / 2][4];
#pragma unroll
      for (int i = 0; i < FOLD_BLOCKS / 2; ++i) {
        ptx::load_transposed(k[i], (K_first ^ ((first + 2 * i) * 16)) + tile * KEY_TILE_BYTES);
      }
      // Small parts first.
#pragma unroll
      for (int which = STATE_PARTS - 1; which >= 0; --which) {
#pragma unroll
        for (int i = 0; i < FOLD_BLOCKS; ++i) {
          ptx::mma_bf16(sums[i], weighted.words[which][tile], k[i / 2][i % 2 * 2], k[i / 2][i % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < FOLD_BLOCKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state.blocks[first + i][j] = fmaf(decay, state.blocks[first + i][j], sums[i][j]);
      }
    }
  }
}

}  // namespace replay
