// Where a chunk's tensors are.
#pragma once
#include "gated_delta_net/pipeline/layout.cuh"

namespace replay {

// Addresses; those of v, o, state and u ring at the chunk's first head, whose neighbours follow.
struct ChunkTensors {
  const GatedDeltaNetParams& params;
  const Chunk& chunk;

  __device__ int key_head() const { return chunk.first_head / HEADS_PER_KEY; }

  __device__ const ACTIVATION_TYPE* q(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.q) + chunk.row * params.q_stride_batch +
           token * params.q_stride_token + key_head() * params.q_stride_head;
  }
  __device__ const ACTIVATION_TYPE* k(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.k) + chunk.row * params.k_stride_batch +
           token * params.k_stride_token + key_head() * params.k_stride_head;
  }
  __device__ const ACTIVATION_TYPE* v(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.v) + chunk.row * params.v_stride_batch +
           token * params.v_stride_token + chunk.first_head * params.v_stride_head;
  }
  __device__ const GATE_TYPE* raw_gate(Gate gate, int token, int head) const {
    const bool is_a = gate == GATE_A;
    const int64_t row = chunk.row * (is_a ? params.a_stride_batch : params.b_stride_batch);
    const int64_t line = token * (is_a ? params.a_stride_token : params.b_stride_token);
    return static_cast<const GATE_TYPE*>(is_a ? params.a : params.b) + row + line + chunk.first_head + head;
  }
  __device__ ACTIVATION_TYPE* o(int token) const {
    const int64_t line = (static_cast<int64_t>(chunk.row) * params.seq_len + token) * N_VALUE_HEADS + chunk.first_head;
    return static_cast<ACTIVATION_TYPE*>(params.o) + line * VALUE_DIM;
  }
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + chunk.lengths.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(chunk.first_head) * KEY_DIM * VALUE_DIM;
  }
  // The rows of the rings: pending ones by their number, the window's by their token. They wrap once at most.
  __device__ int pending_line(int row) const { return wrap(chunk.lengths.first_pending_row + row); }
  __device__ int window_line(int token) const { return wrap(chunk.lengths.first_window_row + token); }
  __device__ ACTIVATION_TYPE* k_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_KEY_HEADS + key_head()) * KEY_DIM;
    return static_cast<ACTIVATION_TYPE*>(params.k_ring) + chunk.lengths.slot * params.k_ring_stride_slot + first;
  }
  __device__ float* u_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_VALUE_HEADS + chunk.first_head) * VALUE_DIM;
    return params.u_ring + chunk.lengths.slot * params.u_ring_stride_slot + first;
  }
  __device__ float* g_ring(int line, int head) const {
    const int64_t first = static_cast<int64_t>(line) * N_VALUE_HEADS + chunk.first_head + head;
    return params.g_ring + chunk.lengths.slot * params.g_ring_stride_slot + first;
  }

 private:
  __device__ int wrap(int line) const { return line < params.ring_rows ? line : line - params.ring_rows; }
};

}  // namespace replay
