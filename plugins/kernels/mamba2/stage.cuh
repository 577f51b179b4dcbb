// First room of a step: bring the row's pending and window inputs to shared memory, and append the window to the ring.
//
// Shared memory, rows in token order, first the pending ones, then the window; no dead ring row is ever staged:
//   B [HISTORY + WINDOW, D_STATE]   C [WINDOW, D_STATE]   x [HISTORY + WINDOW, X_STRIDE]   activation type
//   dt [HISTORY + WINDOW]   weights [WINDOW, WEIGHTS_PER_TOKEN]   fold_weights [1 + HISTORY]   fp32
#pragma once
#include "common/softplus.cuh"
#include "mamba2/row.cuh"
#include "mamba2/tile.cuh"

namespace replay {

constexpr int STAGED_ROWS = HISTORY + WINDOW;
constexpr int X_STRIDE = HEAD_DIM + X_PADDING;
// The checkpoint's decay and one weight per row that the token sees: pending ones (none in a flush) and its window's.
constexpr int WEIGHTS_PER_TOKEN = 1 + HISTORY;

struct StepShared {
  ACTIVATION_TYPE* B;
  ACTIVATION_TYPE* C;
  ACTIVATION_TYPE* x;
  float* dt;
  float* weights;
  float* fold_weights;

  static constexpr int BYTES =
      ((STAGED_ROWS + WINDOW) * D_STATE + STAGED_ROWS * X_STRIDE) * static_cast<int>(sizeof(ACTIVATION_TYPE)) +
      (STAGED_ROWS + WINDOW * WEIGHTS_PER_TOKEN + 1 + HISTORY) * static_cast<int>(sizeof(float));

  __device__ explicit StepShared(void* base)
      : B(static_cast<ACTIVATION_TYPE*>(base)),
        C(B + STAGED_ROWS * D_STATE),
        x(C + WINDOW * D_STATE),
        dt(reinterpret_cast<float*>(x + STAGED_ROWS * X_STRIDE)),
        weights(dt + STAGED_ROWS),
        fold_weights(weights + WINDOW * WEIGHTS_PER_TOKEN) {}
};

// Start all loads of ring and window; wait_for_copies() and a barrier complete them.
__device__ inline void stage_inputs(const Tensors& tensors, const StepShared& shared) {
  const Row& row = tensors.row;
  const int pending = row.pending, num_tokens = row.num_tokens;
  stage_rows<D_STATE, D_STATE>(shared.B, pending, true, [&](int i) { return tensors.B_ring(row.checkpoint + i); });
  stage_rows<HEAD_DIM, X_STRIDE>(shared.x, pending, true, [&](int i) { return tensors.x_ring(row.checkpoint + i); });
  stage_rows<D_STATE, D_STATE>(shared.B + pending * D_STATE, num_tokens, tensors.is_B_aligned(),
                               [&](int i) { return tensors.B(i); });
  stage_rows<D_STATE, D_STATE>(shared.C, num_tokens, tensors.is_C_aligned(), [&](int i) { return tensors.C(i); });
  stage_rows<HEAD_DIM, X_STRIDE>(shared.x + pending * X_STRIDE, num_tokens, tensors.is_x_aligned(),
                                 [&](int i) { return tensors.x(i); });
  const float dt_bias = tensors.params.dt_bias[row.head];
  for (int i = threadIdx.x; i < pending + num_tokens; i += BLOCK_THREADS) {
    shared.dt[i] = i < pending ? *tensors.dt_ring(row.checkpoint + i) : softplus(tensors.raw_dt(i - pending) + dt_bias);
  }
}

// Write the window's ring rows. They are no rows that this step reads (R >= W + T); a group's B rows are written by
// the group's first head alone.
__device__ inline void append_window(const Tensors& tensors, const StepShared& shared) {
  const Row& row = tensors.row;
  const int pending = row.pending, num_tokens = row.num_tokens;
  store_rows<HEAD_DIM, X_STRIDE>(shared.x + pending * X_STRIDE, num_tokens,
                                 [&](int i) { return tensors.x_ring(row.past + i); });
  if (row.head % HEADS_PER_GROUP == 0) {
    store_rows<D_STATE, D_STATE>(shared.B + pending * D_STATE, num_tokens,
                                 [&](int i) { return tensors.B_ring(row.past + i); });
  }
  for (int i = threadIdx.x; i < num_tokens; i += BLOCK_THREADS) {
    *tensors.dt_ring(row.past + i) = shared.dt[pending + i];
  }
}

}  // namespace replay
