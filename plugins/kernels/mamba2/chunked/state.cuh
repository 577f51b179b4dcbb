// A warp's part of the state: 16 rows by WARP_COLUMNS in fp32, where products leave their sums.
#pragma once
#include "mamba2/chunked/layout.cuh"

namespace replay {

// Each part has 8 bits of the number: three for a state in fp32, two for one that is rounded to 11 or 8 bits.
constexpr int FOLD_PARTS = sizeof(STATE_TYPE) == 4 ? 3 : 2;
// Blocks that are multiplied side by side.
constexpr int FOLD_BLOCKS = COLUMN_BLOCKS < 4 ? COLUMN_BLOCKS : 4;

// blocks[i] has rows g and g + 8 at columns 8 i + 2q and the next: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
struct WarpState {
  float blocks[COLUMN_BLOCKS][4];
};

struct alignas(2 * sizeof(STATE_TYPE)) StatePair {
  STATE_TYPE elements[2];
};

// A checkpoint at position 0 is zero whatever the memory holds, so it is not read. `slice` is the block's first row.
__device__ inline void load_state(const STATE_TYPE* slice, bool is_zero, const WarpPart& part, WarpState& state) {
  const STATE_TYPE* first =
      slice + (part.row_tile * MMA_TILE + part.g) * D_STATE + part.first_column() + 2 * part.q;
#pragma unroll
  for (int i = 0; i < COLUMN_BLOCKS; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StatePair pair = {};
      if (!is_zero) pair = *reinterpret_cast<const StatePair*>(first + half * 8 * D_STATE + i * 8);
      state.blocks[i][2 * half] = to_float(pair.elements[0]);
      state.blocks[i][2 * half + 1] = to_float(pair.elements[1]);
    }
  }
}

// Round to the state's type in memory, once.
__device__ inline void store_state(STATE_TYPE* slice, const WarpPart& part, const WarpState& state) {
  STATE_TYPE* first = slice + (part.row_tile * MMA_TILE + part.g) * D_STATE + part.first_column() + 2 * part.q;
#pragma unroll
  for (int i = 0; i < COLUMN_BLOCKS; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const StatePair pair = {from_float<STATE_TYPE>(state.blocks[i][2 * half]),
                              from_float<STATE_TYPE>(state.blocks[i][2 * half + 1])};
      *reinterpret_cast<StatePair*>(first + half * 8 * D_STATE + i * 8) = pair;
    }
  }
}

// sums[i] += S C^T over the warp's columns, for the 16 tokens of its i-th tile: rows of the state by tokens. The state
// goes in as two bfloat16 parts, 16 bits: outputs are rounded to 8.
__device__ inline void multiply_state(const ChunkShared& shared, const WarpPart& part, const WarpState& state,
                                      float (&sums)[CHUNK_TILES][2][4]) {
  const uint32_t C_first = shared.address + ChunkOffsets::C + (part.pieces_first() ^ (part.first_column() * 2));
#pragma unroll
  for (int k = 0; k < COLUMN_BLOCKS / 2; ++k) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = state.blocks[2 * k + i / 2][i % 2 * 2], second = state.blocks[2 * k + i / 2][i % 2 * 2 + 1];
      high[i] = pack_bf16(first, second);
      low[i] = pack_bf16(first - low_bf16(high[i]), second - high_bf16(high[i]));
    }
    // Products of one sum are far apart, so that they overlap.
    uint32_t C[CHUNK_TILES][4];
#pragma unroll
    for (int i = 0; i < CHUNK_TILES; ++i) {
      ptx::load_matrices(C[i], (C_first ^ (k * 32)) + part.token_tile(i) * BC_TILE_BYTES);
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNK_TILES; ++i) {
      ptx::mma_bf16(sums[i / 2][i % 2], low, C[i / 2][i % 2 * 2], C[i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNK_TILES; ++i) {
      ptx::mma_bf16(sums[i / 2][i % 2], high, C[i / 2][i % 2 * 2], C[i / 2][i % 2 * 2 + 1]);
    }
  }
}

// x of 16 tokens times their weights, as operand A with the tokens for columns, in bfloat16 parts.
struct WeightedX {
  uint32_t parts[FOLD_PARTS][4];

  __device__ WeightedX(const uint32_t (&x)[4], const float* fold_weights, int q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 weights = *reinterpret_cast<const float2*>(fold_weights + 2 * q + i / 2 * 8);
      float first = low_bf16(x[i]) * weights.x, second = high_bf16(x[i]) * weights.y;
#pragma unroll
      for (int k = 0; k < FOLD_PARTS; ++k) {
        parts[k][i] = pack_bf16(first, second);
        first -= low_bf16(parts[k][i]);
        second -= high_bf16(parts[k][i]);
      }
    }
  }
};

// Load the x of a token tile as operand A: the warp's rows, tokens for columns.
__device__ inline void load_x(const ChunkShared& shared, const WarpPart& part, int tile, uint32_t (&x)[4]) {
  const int row = tile * MMA_TILE + part.lane % 8 + part.lane / 16 * 8, piece = 2 * part.row_tile + part.lane / 8 % 2;
  ptx::load_transposed(x, shared.address + shared.x_offset() + row * X_ROW_BYTES + piece * 16);
}

// S = decay S + sum over the chunk of fold_weight_j x_j B_j^T. The sum is kept apart until it is whole: tensor cores
// truncate, and a state that lives for thousands of tokens would feel each truncation.
__device__ inline void fold_chunk(const ChunkShared& shared, const WarpPart& part, WarpState& state) {
  const ChunkDecays decays = shared.decays();
  const uint32_t B_first = shared.address + shared.B_offset() + (part.rows_first() ^ (part.first_column() * 2));
  float sums[COLUMN_BLOCKS][4] = {};
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES; ++tile) {
    uint32_t x[4];
    load_x(shared, part, tile, x);
    const WeightedX weighted(x, decays.fold_weight + tile * MMA_TILE, part.q);
#pragma unroll
    for (int first = 0; first < COLUMN_BLOCKS; first += FOLD_BLOCKS) {
      uint32_t B[FOLD_BLOCKS / 2][4];
#pragma unroll
      for (int i = 0; i < FOLD_BLOCKS / 2; ++i) {
        ptx::load_transposed(B[i], (B_first ^ ((first + 2 * i) * 16)) + tile * BC_TILE_BYTES);
      }
      // Small parts first; products of one sum are apart, so that they overlap.
#pragma unroll
      for (int k = FOLD_PARTS - 1; k >= 0; --k) {
#pragma unroll
        for (int i = 0; i < FOLD_BLOCKS; ++i) {
          ptx::mma_bf16(sums[first + i], weighted.parts[k], B[i / 2][i % 2 * 2], B[i / 2][i % 2 * 2 + 1]);
        }
      }
    }
  }
  const float decay = decays.state_decay[CHUNK_SIZE - 1];
#pragma unroll
  for (int i = 0; i < COLUMN_BLOCKS; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) state.blocks[i][k] = fmaf(decay, state.blocks[i][k], sums[i][k]);
  }
}

}  // namespace replay
