// A slice of one head's state, all K rows of SLICE neighbouring columns, spread over the registers of a thread block.
//
// The columns of a state never meet: u, the state and the outputs of a column depend on that column of v alone. So a
// warp owns COLUMNS_PER_WARP columns for good, and the tokens of a window need no barrier of the block. Lane l of a warp
// holds rows l % 16, l % 16 + 16, ... of one 16-byte vector of columns; sums over rows are sums over neighbouring lanes.
#pragma once
#include "common/lanes.cuh"
#include "gated_delta_net/row.cuh"

namespace replay {

constexpr int NUM_WARPS = BLOCK_THREADS / WARP_SIZE;
constexpr int COLUMNS = elements_per_vector<STATE_TYPE>;  // of a lane
constexpr int ROW_LANES = 16;                             // lanes that share the rows of one vector of columns
constexpr int PASSES = KEY_DIM / ROW_LANES;
constexpr int COLUMNS_PER_WARP = WARP_SIZE / ROW_LANES * COLUMNS;
static_assert(PASSES * ROW_LANES == KEY_DIM, "the lanes of a vector cover the rows exactly");
static_assert(NUM_WARPS * COLUMNS_PER_WARP == SLICE, "the warps of a block cover its columns exactly");

struct TilePosition {
  int row_lane;
  int column;  // of the slice, the first of this lane's

  __device__ TilePosition()
      : row_lane(threadIdx.x % ROW_LANES), column(static_cast<int>(threadIdx.x) / ROW_LANES * COLUMNS) {}

  __device__ int row(int pass) const { return row_lane + pass * ROW_LANES; }
};

struct StateTile {
  float values[PASSES][COLUMNS];
};

// One value per column of this lane; where nothing else is said, all lanes of the columns hold the same.
struct ColumnValues {
  float values[COLUMNS];
};

// A checkpoint at position 0 is zero whatever the memory holds, so it is not read.
__device__ inline void load_tile(const STATE_TYPE* slice_state, bool is_zero, TilePosition position, StateTile& tile) {
  Vector16 vectors[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    vectors[pass] = is_zero ? Vector16{}
                            : ptx::load_streaming(slice_state + position.row(pass) * VALUE_DIM + position.column);
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) unpack<STATE_TYPE>(vectors[pass], tile.values[pass]);
}

// Round the state to its type in memory, once; afterwards the tile is what memory holds.
__device__ inline void store_tile(STATE_TYPE* slice_state, TilePosition position, StateTile& tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const Vector16 rounded = pack<STATE_TYPE>(tile.values[pass]);
    ptx::store_streaming(slice_state + position.row(pass) * VALUE_DIM + position.column, rounded);
    unpack<STATE_TYPE>(rounded, tile.values[pass]);
  }
}

__device__ inline void scale_tile(StateTile& tile, float factor) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) tile.values[pass][i] *= factor;
  }
}

// state += weight k u^T; `key` is a row of K numbers in shared memory.
__device__ inline void add_outer_product(StateTile& tile, TilePosition position, float weight, const float* key,
                                         const ColumnValues& u) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const float weighted = weight * key[position.row(pass)];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) tile.values[pass][i] += weighted * u.values[i];
  }
}

// This lane's share of S^T x: sum_over_rows() completes it.
__device__ inline ColumnValues read_share(const StateTile& tile, TilePosition position, const float* x) {
  ColumnValues share = {};
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const float factor = x[position.row(pass)];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) share.values[i] += factor * tile.values[pass][i];
  }
  return share;
}

__device__ inline void sum_over_rows(ColumnValues& share) {
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) share.values[i] = sum_over_lanes<ROW_LANES>(share.values[i]);
}

// The lanes of the columns take turns, so that one instruction writes what they hold in common.
template <typename T>
__device__ inline void store_columns(T* target, TilePosition position, const ColumnValues& values) {
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    if (position.row_lane == i) target[position.column + i] = from_float<T>(values.values[i]);
  }
}

// The address of the first column is a multiple of 16 bytes, as in shared memory.
__device__ inline ColumnValues load_columns(const float* source, TilePosition position) {
  ColumnValues found;
  load_as_float(source + position.column, found.values);
  return found;
}

// From memory of any alignment.
template <typename T>
__device__ inline ColumnValues gather_columns(const T* source, TilePosition position) {
  ColumnValues found;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) found.values[i] = to_float(source[position.column + i]);
  return found;
}

}  // namespace replay
