// First room of a step: bring the row's pending tokens and its window to shared memory, and append the window to the
// rings, all but its u.
//
// Shared memory, fp32, rows in token order, first the pending ones, then the window; no dead ring row is ever staged:
//   keys [HISTORY + WINDOW, KEY_DIM]   queries [WINDOW, KEY_DIM]   u [HISTORY + WINDOW, U_STRIDE]
//   g [HISTORY + WINDOW]   beta, decay [WINDOW]   key_weights, query_weights [WINDOW, HISTORY]   fold_weights [1 + HISTORY]
#pragma once
#include "gated_delta_net/unit_rows.cuh"

namespace replay {

constexpr int STAGED_ROWS = HISTORY + WINDOW;

struct StepShared {
  float* keys;
  float* queries;
  float* u;
  float* g;
  float* beta;
  float* decay;
  float* key_weights;
  float* query_weights;
  float* fold_weights;

  static constexpr int BYTES = static_cast<int>(sizeof(float)) *
                               (STAGED_ROWS * (KEY_DIM + U_STRIDE + 1) + WINDOW * (KEY_DIM + 2 + 2 * HISTORY) + 1 + HISTORY);

  __device__ explicit StepShared(void* base)
      : keys(static_cast<float*>(base)),
        queries(keys + STAGED_ROWS * KEY_DIM),
        u(queries + WINDOW * KEY_DIM),
        g(u + STAGED_ROWS * U_STRIDE),
        beta(g + STAGED_ROWS),
        decay(beta + WINDOW),
        key_weights(decay + WINDOW),
        query_weights(key_weights + WINDOW * HISTORY),
        fold_weights(query_weights + WINDOW * HISTORY) {}
};

// Start all loads of rings and window; wait_for_copies() and a barrier complete them.
__device__ inline void stage_inputs(const Tensors& tensors, const StepShared& shared) {
  const Row& row = tensors.row;
  const int pending = row.pending, num_tokens = row.num_tokens;
  stage_rows<SLICE, U_STRIDE>(shared.u, pending, true, [&](int i) { return tensors.u_ring(row.checkpoint + i); });
  stage_unit_rows(shared.keys, pending, 1.0f, [&](int i) { return tensors.k_ring(row.checkpoint + i); });
  stage_unit_rows(shared.keys + pending * KEY_DIM, num_tokens, 1.0f, [&](int i) { return tensors.k(i); });
  stage_unit_rows(shared.queries, num_tokens, query_scale(), [&](int i) { return tensors.q(i); });
  for (int i = threadIdx.x; i < pending + num_tokens; i += BLOCK_THREADS) {
    shared.g[i] = i < pending ? *tensors.g_ring(row.checkpoint + i) : tensors.g(i - pending);
    if (i >= pending) shared.beta[i - pending] = tensors.beta(i - pending);
  }
}

// Write the window's rows of k, as it came, and of g. They are no rows that this step reads (R >= W + T); what heads
// and slices share is written by the first of them alone.
__device__ inline void append_window(const Tensors& tensors, const StepShared& shared) {
  const Row& row = tensors.row;
  if (row.slice != 0) return;
  for (int i = threadIdx.x; i < row.num_tokens; i += BLOCK_THREADS) {
    *tensors.g_ring(row.past + i) = shared.g[row.pending + i];
  }
  if (row.head % HEADS_PER_KEY != 0) return;
  for (int i = threadIdx.x; i < row.num_tokens * KEY_DIM; i += BLOCK_THREADS) {
    const int token = i / KEY_DIM, column = i % KEY_DIM;
    tensors.k_ring(row.past + token)[column] = tensors.k(token)[column];
  }
}

}  // namespace replay
