// Last room of a step: the outputs of the window tokens, from the checkpoint and the staged rows.
//
// y_t = decay_t S C_t + sum over rows j <= t of weight_{j,t} x_j, with D x_t inside the weight of the token's own row.
#pragma once
#include "mamba2/stage.cuh"

namespace replay {

// `first` is the first staged row that is not in the checkpoint.
__device__ inline void compute_window(const Tensors& tensors, const StepShared& shared, TilePosition position,
                                      const StateTile& tile, int first) {
  for (int token = 0; token < tensors.row.num_tokens; ++token) {
    const float* weights = shared.weights + token * WEIGHTS_PER_TOKEN;
    float partial[PASSES] = {};
    multiply_state(tile, position, shared.C + token * D_STATE, partial);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) partial[pass] *= weights[0];
    // The lanes of a state row share out the staged rows; the sum over lanes that follows anyway adds them up.
    for (int i = position.lane; i <= tensors.row.pending + token - first; i += LANES_PER_ROW) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        partial[pass] += weights[1 + i] * to_float(shared.x[(first + i) * X_STRIDE + position.row(pass)]);
      }
    }
    store_output(tensors.y(token), position, partial);
  }
}

}  // namespace replay
