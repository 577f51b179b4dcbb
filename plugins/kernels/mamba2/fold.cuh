// Third room, in a flush alone: fold the pending rows into the checkpoint, in fp32, and round it once.
//
// S_c = exp(A D(f, c)) S_f + sum over pending j of weight_j x_j B_j^T, as weights.cuh has them.
#pragma once
#include "mamba2/stage.cuh"

namespace replay {

// state = decay * state + weight * x B^T for one token; x and B are staged rows.
__device__ inline void add_outer_product(StateValues& state, TilePosition position, float weight,
                                         const ACTIVATION_TYPE* x, const ACTIVATION_TYPE* B) {
  float weighted_x[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) weighted_x[pass] = weight * to_float(x[position.row(pass)]);
#pragma unroll
  for (int v = 0; v < VECTORS_PER_LANE; ++v) {
    float b[STATE_VECTOR];
    load_as_float(B + position.column(v), b);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
      for (int i = 0; i < STATE_VECTOR; ++i) state.values[pass][v][i] += weighted_x[pass] * b[i];
    }
  }
}

__device__ inline void scale_state(StateValues& state, float factor) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
    for (int v = 0; v < VECTORS_PER_LANE; ++v) {
#pragma unroll
      for (int i = 0; i < STATE_VECTOR; ++i) state.values[pass][v][i] *= factor;
    }
  }
}

// Fold all pending rows; afterwards the tile is the new checkpoint as memory will hold it.
__device__ inline void fold_pending(const Row& row, const StepShared& shared, TilePosition position, StateTile& tile) {
  StateValues state;
  unpack_tile(tile, state);
  scale_state(state, shared.fold_weights[0]);
  for (int i = 0; i < row.pending; ++i) {
    add_outer_product(state, position, shared.fold_weights[1 + i], shared.x + i * X_STRIDE, shared.B + i * D_STATE);
  }
  pack_tile(state, tile);
}

}  // namespace replay
