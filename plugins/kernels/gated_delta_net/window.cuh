// Last room of a step: token by token what the state predicts of v, u, and the output, by each warp for its columns.
//
// The u of a window build on each other: forward substitution, in fp32. What a key or a query reads is the decayed
// state's part and that of the staged rows; the lanes of a column share out both, and one sum over lanes completes them.
#pragma once
#include "gated_delta_net/weights.cuh"

namespace replay {

// share += sum over staged rows first + i, i < count, of weights[i] u_i, this lane's part of it.
__device__ inline void add_staged_rows(ColumnValues& share, const StepShared& shared, TilePosition position,
                                       const float* weights, int first, int count) {
  for (int i = position.row_lane; i < count; i += ROW_LANES) {
    const float weight = weights[i];
    const ColumnValues u = load_columns(shared.u + (first + i) * U_STRIDE, position);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) share.values[c] += weight * u.values[c];
  }
}

__device__ inline ColumnValues read_decayed(const StateTile& tile, TilePosition position, const float* x, float decay) {
  ColumnValues share = read_share(tile, position, x);
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) share.values[i] *= decay;
  return share;
}

// `first` is the first staged row that is not in the checkpoint.
__device__ inline void compute_window(const Tensors& tensors, const StepShared& shared, TilePosition position,
                                      const StateTile& tile, int first) {
  const int pending = tensors.row.pending;
  for (int token = 0; token < tensors.row.num_tokens; ++token) {
    const int own = pending + token, before = own - first;
    const float* query_weights = shared.query_weights + token * HISTORY;
    ColumnValues predicted = read_decayed(tile, position, shared.keys + own * KEY_DIM, shared.decay[token]);
    ColumnValues output = read_decayed(tile, position, shared.queries + token * KEY_DIM, shared.decay[token]);
    add_staged_rows(predicted, shared, position, shared.key_weights + token * HISTORY, first, before);
    add_staged_rows(output, shared, position, query_weights, first, before);
    sum_over_rows(predicted);
    sum_over_rows(output);

    ColumnValues u = gather_columns(tensors.v(token), position);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      u.values[i] = shared.beta[token] * (u.values[i] - predicted.values[i]);
      output.values[i] += query_weights[before] * u.values[i];
    }
    store_columns(shared.u + own * U_STRIDE, position, u);
    store_columns(tensors.u_ring(tensors.row.past + token), position, u);
    store_columns(tensors.o(token), position, output);
    __syncwarp();  // the next tokens read this one's u
  }
}

}  // namespace replay
