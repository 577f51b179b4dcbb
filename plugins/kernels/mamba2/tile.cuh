// The state of one head, spread over the registers of a thread block.
//
// LANES_PER_ROW neighbouring lanes share a state row; lane l holds its 16-byte vectors l, l + LANES_PER_ROW, ... A warp
// covers ROWS_PER_PASS neighbouring rows per pass and PASSES * ROWS_PER_PASS neighbouring rows in all, so that every
// load instruction reads whole lines and the outputs of a warp are neighbours.
#pragma once
#include "common/lanes.cuh"
#include "common/types.cuh"

namespace replay {

constexpr int NUM_WARPS = BLOCK_THREADS / WARP_SIZE;
constexpr int STATE_VECTOR = elements_per_vector<STATE_TYPE>;
constexpr int VECTORS_PER_LANE = D_STATE / (LANES_PER_ROW * STATE_VECTOR);
constexpr int ROWS_PER_PASS = WARP_SIZE / LANES_PER_ROW;
constexpr int PASSES = HEAD_DIM / (ROWS_PER_PASS * NUM_WARPS);
static_assert(VECTORS_PER_LANE * LANES_PER_ROW * STATE_VECTOR == D_STATE, "the lanes of a row cover it exactly");
static_assert(PASSES * ROWS_PER_PASS * NUM_WARPS == HEAD_DIM, "the warps of a block cover the head exactly");

struct TilePosition {
  int lane;       // within the row's lanes
  int first_row;  // of the first pass; pass i holds row first_row + i * ROWS_PER_PASS

  __device__ TilePosition()
      : lane(threadIdx.x % LANES_PER_ROW),
        first_row(threadIdx.x / WARP_SIZE * PASSES * ROWS_PER_PASS + threadIdx.x % WARP_SIZE / LANES_PER_ROW) {}

  __device__ int row(int pass) const { return first_row + pass * ROWS_PER_PASS; }
  __device__ int column(int vector) const { return (vector * LANES_PER_ROW + lane) * STATE_VECTOR; }
};

// The head's checkpoint as it stands in memory.
struct StateTile {
  Vector16 vectors[PASSES][VECTORS_PER_LANE];
};

// The same in fp32, for updates.
struct StateValues {
  float values[PASSES][VECTORS_PER_LANE][STATE_VECTOR];
};

// A checkpoint at position 0 is zero whatever the memory holds, so it is not read.
__device__ inline void load_tile(const STATE_TYPE* head_state, bool is_zero, TilePosition position, StateTile& tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int v = 0; v < VECTORS_PER_LANE; ++v) {
      tile.vectors[pass][v] =
          is_zero ? Vector16{} : ptx::load_streaming(head_state + position.row(pass) * D_STATE + position.column(v));
    }
  }
}

__device__ inline void store_tile(STATE_TYPE* head_state, TilePosition position, const StateTile& tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int v = 0; v < VECTORS_PER_LANE; ++v) {
      ptx::store_streaming(head_state + position.row(pass) * D_STATE + position.column(v), tile.vectors[pass][v]);
    }
  }
}

__device__ inline void unpack_tile(const StateTile& tile, StateValues& state) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int v = 0; v < VECTORS_PER_LANE; ++v) unpack<STATE_TYPE>(tile.vectors[pass][v], state.values[pass][v]);
  }
}

// Round the state to its type in memory, once.
__device__ inline void pack_tile(const StateValues& state, StateTile& tile) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int v = 0; v < VECTORS_PER_LANE; ++v) tile.vectors[pass][v] = pack<STATE_TYPE>(state.values[pass][v]);
  }
}

// One vector of the state in fp32, from either form.
__device__ inline void load_vector(const StateTile& tile, int pass, int v, float (&values)[STATE_VECTOR]) {
  unpack<STATE_TYPE>(tile.vectors[pass][v], values);
}

__device__ inline void load_vector(const StateValues& state, int pass, int v, float (&values)[STATE_VECTOR]) {
#pragma unroll
  for (int i = 0; i < STATE_VECTOR; ++i) values[i] = state.values[pass][v][i];
}

// partial[pass] += this lane's share of (state row) . C; State is StateTile or StateValues.
template <typename State>
__device__ inline void multiply_state(const State& state, TilePosition position, const ACTIVATION_TYPE* C,
                                      float (&partial)[PASSES]) {
#pragma unroll
  for (int v = 0; v < VECTORS_PER_LANE; ++v) {
    float c[STATE_VECTOR];
    load_as_float(C + position.column(v), c);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      float values[STATE_VECTOR];
      load_vector(state, pass, v, values);
#pragma unroll
      for (int i = 0; i < STATE_VECTOR; ++i) partial[pass] += values[i] * c[i];
    }
  }
}

// Add up each row's partial sums over its lanes and write the block's HEAD_DIM outputs of one token.
__device__ inline void store_output(ACTIVATION_TYPE* head_output, TilePosition position, float (&partial)[PASSES]) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) partial[pass] = sum_over_lanes<LANES_PER_ROW>(partial[pass]);
  // Lane l of a row writes pass l: one store instruction for the warp's neighbouring outputs.
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    if (position.lane == pass % LANES_PER_ROW) {
      head_output[position.row(pass)] = from_float<ACTIVATION_TYPE>(partial[pass]);
    }
  }
}

}  // namespace replay
