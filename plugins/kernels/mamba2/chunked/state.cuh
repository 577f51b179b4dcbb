// A state warp's part of the state: 16 rows by WARP_COLUMNS in fp32, where products leave their sums. Per chunk it
// shows the state before the chunk to the output warps, then folds the chunk.
#pragma once
#include "common/bf16_parts.cuh"
#include "mamba2/chunked/stage.cuh"

namespace replay {

// Each part has 8 bits of the number: three for a state in fp32, two for one that is rounded to 11 or 8 bits.
constexpr int FOLD_PARTS = sizeof(STATE_TYPE) == 4 ? 3 : 2;
// Blocks that are multiplied side by side.
constexpr int FOLD_BLOCKS = COLUMN_BLOCKS < 4 ? COLUMN_BLOCKS : 4;

// Which rows and columns of the slice a state warp has, and the lane's place.
struct StatePart : LanePlace {
  int warp, row_tile, split;
  uint32_t x_first, B_first;  // in a stage, what the lane loads of the first token tile

  __device__ explicit StatePart(uint32_t thread)
      : LanePlace(thread), warp(thread / WARP_SIZE), row_tile(warp / COLUMN_SPLITS), split(warp % COLUMN_SPLITS) {
    const int token = lane % 8 + lane / 16 * 8, piece = 2 * row_tile + lane / 8 % 2;
    // In one register each, not in several that each use adds up.
    x_first = fresh(StageOffsets::X + token * X_ROW_BYTES + piece * 16);
    B_first = fresh(StageOffsets::B + (rows_first() ^ (split * WARP_COLUMNS * 2)));
  }

  // Of the lane's first element, from the slice on.
  __device__ int first_element() const {
    return (row_tile * MMA_TILE + g) * D_STATE + split * WARP_COLUMNS + 2 * q;
  }
};

// blocks[i] has rows g and g + 8 at columns 8 i + 2q and the next: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
struct WarpState {
  float blocks[COLUMN_BLOCKS][4];
};

struct alignas(2 * sizeof(STATE_TYPE)) StatePair {
  STATE_TYPE elements[2];
};

// A checkpoint at position 0 is zero whatever the memory holds, so it is not read. `slice` is the block's first row.
__device__ inline void load_state(const STATE_TYPE* slice, bool is_zero, const StatePart& part, WarpState& state) {
  const STATE_TYPE* first = slice + part.first_element();
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
__device__ inline void store_state(STATE_TYPE* slice, const StatePart& part, const WarpState& state) {
  STATE_TYPE* first = slice + part.first_element();
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

// Show the state as two bfloat16 parts, 16 bits: outputs are rounded to 8. As products leave a state, so the next ones
// take it: no number changes lanes.
__device__ inline void give_state(const ChunkShared& shared, const StatePart& part, const WarpState& state) {
#pragma unroll
  for (int k = 0; k < COLUMN_BLOCKS / 2; ++k) {
    Vector16 parts[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&block)[4] = state.blocks[2 * k + i % 2];
      uint32_t words[2];
      split_pair(block[i / 2 * 2], block[i / 2 * 2 + 1], words);
      parts[0].words[i] = words[0];
      parts[1].words[i] = words[1];
    }
    // Column splits of a row tile follow each other, as row tiles do.
    Vector16* target = shared.snapshot(0, part.warp * (COLUMN_BLOCKS / 2) + k, part.lane);
    target[0] = parts[0];
    target[WARP_SIZE] = parts[1];
  }
}

// x of 16 tokens times their weights, as operand A with the tokens for columns, in bfloat16 parts.
struct WeightedX {
  uint32_t parts[FOLD_PARTS][4];

  __device__ WeightedX(const uint32_t (&x)[4], const float* fold_weights, int q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 weights = *reinterpret_cast<const float2*>(fold_weights + 2 * q + i / 2 * 8);
      uint32_t words[FOLD_PARTS];
      split_pair(low_bf16(x[i]) * weights.x, high_bf16(x[i]) * weights.y, words);
#pragma unroll
      for (int k = 0; k < FOLD_PARTS; ++k) parts[k][i] = words[k];
    }
  }
};

// Load the x of a token tile as operand A: the warp's rows, tokens for columns.
__device__ inline void load_x(const Stage& stage, const StatePart& part, int tile, uint32_t (&x)[4]) {
  ptx::load_transposed(x, stage.address + part.x_first + tile * MMA_TILE * X_ROW_BYTES);
}

// S = decay S + sum over the chunk of fold_weight_j x_j B_j^T. The sum is kept apart until it is whole: tensor cores
// truncate, and a state that lives for thousands of tokens would feel each truncation.
__device__ inline void fold_chunk(const Stage& stage, float decay, const StatePart& part, WarpState& state) {
  const uint32_t B_first = stage.address + part.B_first;
  float sums[COLUMN_BLOCKS][4] = {};
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES; ++tile) {
    uint32_t x[4];
    // Where weighted x leaves registers free, loads of later tiles would fill more than these.
    if (MIN_BLOCKS > 1 && FOLD_PARTS == 2 && tile > 0) ptx::issue_loads();
    load_x(stage, part, tile, x);
    const WeightedX weighted(x, stage.decays().fold_weight + tile * MMA_TILE, part.q);
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
#pragma unroll
  for (int i = 0; i < COLUMN_BLOCKS; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) state.blocks[i][k] = fmaf(decay, state.blocks[i][k], sums[i][k]);
  }
}

}  // namespace replay
