// What a thread block works on: a slice of one value head of one row of the step, and the addresses of its tensors.
#pragma once
#include "common/softplus.cuh"
#include "common/step_row.cuh"
#include "gated_delta_net/tile.cuh"

namespace replay {

struct Row : StepRow {
  int head;
  int slice;

  __device__ Row(const GatedDeltaNetParams& params, int max_pending)
      : StepRow(params, blockIdx.y, max_pending),
        head(static_cast<int>(blockIdx.x) / NUM_SLICES),
        slice(static_cast<int>(blockIdx.x) % NUM_SLICES) {}

  __device__ int key_head() const { return head / HEADS_PER_KEY; }
};

// Base addresses of one (row, head, slice); the functions take a window token or an absolute position.
struct Tensors {
  const GatedDeltaNetParams& params;
  const Row& row;

  __device__ const ACTIVATION_TYPE* q(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.q) + row.index * params.q_stride_batch +
           token * params.q_stride_token + row.key_head() * params.q_stride_head;
  }
  __device__ const ACTIVATION_TYPE* k(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.k) + row.index * params.k_stride_batch +
           token * params.k_stride_token + row.key_head() * params.k_stride_head;
  }
  __device__ const ACTIVATION_TYPE* v(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.v) + row.index * params.v_stride_batch +
           token * params.v_stride_token + row.head * params.v_stride_head + row.slice * SLICE;
  }
  // The log decay of a window token, <= 0.
  __device__ float g(int token) const {
    const float a = to_float(static_cast<const GATE_TYPE*>(
        params.a)[row.index * params.a_stride_batch + token * params.a_stride_token + row.head]);
    return -expf(params.A_log[row.head]) * softplus(a + params.dt_bias[row.head]);
  }
  __device__ float beta(int token) const {
    const float b = to_float(static_cast<const GATE_TYPE*>(
        params.b)[row.index * params.b_stride_batch + token * params.b_stride_token + row.head]);
    return 1.0f / (1.0f + expf(-b));
  }
  __device__ ACTIVATION_TYPE* o(int token) const {
    const int64_t line = (static_cast<int64_t>(row.index) * params.seq_len + token) * N_VALUE_HEADS + row.head;
    return static_cast<ACTIVATION_TYPE*>(params.o) + line * VALUE_DIM + row.slice * SLICE;
  }
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + row.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(row.head) * KEY_DIM * VALUE_DIM + row.slice * SLICE;
  }
  __device__ ACTIVATION_TYPE* k_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_KEY_HEADS + row.key_head();
    return static_cast<ACTIVATION_TYPE*>(params.k_ring) + row.slot * params.k_ring_stride_slot + line * KEY_DIM;
  }
  __device__ float* u_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_VALUE_HEADS + row.head;
    return params.u_ring + row.slot * params.u_ring_stride_slot + line * VALUE_DIM + row.slice * SLICE;
  }
  __device__ float* g_ring(int position) const {
    const int64_t line = ring_row(position, params.ring_rows);
    return params.g_ring + row.slot * params.g_ring_stride_slot + line * N_VALUE_HEADS + row.head;
  }
};

// Outputs beyond the row's tokens, and all outputs of a padding row, are zero.
__device__ inline void zero_unused_outputs(const Tensors& tensors) {
  const int first = tensors.row.num_tokens, count = tensors.params.seq_len - first;
  for (int i = threadIdx.x; i < count * SLICE; i += BLOCK_THREADS) {
    tensors.o(first + i / SLICE)[i % SLICE] = from_float<ACTIVATION_TYPE>(0.0f);
  }
}

}  // namespace replay
