// Where a chunk's tensors are.
#pragma once
#include "mamba2/pipeline/layout.cuh"

namespace replay {

// Addresses of a chunk's tensors; x and the x ring at its first head, whose neighbours follow.
struct ChunkTensors {
  const Mamba2Params& params;
  const Chunk& chunk;

  __device__ int group() const { return chunk.first_head / HEADS_PER_GROUP; }
  __device__ int num_tiles() const { return chunk.num_heads * TILES_PER_HEAD; }

  __device__ const ACTIVATION_TYPE* x(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.x) + chunk.row * params.x_stride_batch +
           token * params.x_stride_token + chunk.first_head * params.x_stride_head;
  }
  __device__ const ACTIVATION_TYPE* B(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.B) + chunk.row * params.B_stride_batch +
           token * params.B_stride_token + group() * params.B_stride_group;
  }
  __device__ const ACTIVATION_TYPE* C(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.C) + chunk.row * params.C_stride_batch +
           token * params.C_stride_token + group() * params.C_stride_group;
  }
  __device__ const DT_TYPE* raw_dt(int token, int head) const {
    return static_cast<const DT_TYPE*>(params.dt) + chunk.row * params.dt_stride_batch +
           token * params.dt_stride_token + chunk.first_head + head;
  }
  __device__ ACTIVATION_TYPE* y(int token) const {
    const int64_t line = (static_cast<int64_t>(chunk.row) * params.seq_len + token) * N_HEADS + chunk.first_head;
    return static_cast<ACTIVATION_TYPE*>(params.y) + line * HEAD_DIM;
  }
  // All heads of a chunk and all of their state rows are neighbours.
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + chunk.lengths.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(chunk.first_head) * HEAD_DIM * D_STATE;
  }
  // The rows of the rings: pending ones by their number, the window's by their token. They wrap once at most.
  __device__ int pending_line(int row) const { return wrap(chunk.lengths.first_pending_row + row); }
  __device__ int window_line(int token) const { return wrap(chunk.lengths.first_window_row + token); }
  __device__ ACTIVATION_TYPE* x_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_HEADS + chunk.first_head) * HEAD_DIM;
    return static_cast<ACTIVATION_TYPE*>(params.x_ring) + chunk.lengths.slot * params.x_ring_stride_slot + first;
  }
  __device__ ACTIVATION_TYPE* B_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_GROUPS + group()) * D_STATE;
    return static_cast<ACTIVATION_TYPE*>(params.B_ring) + chunk.lengths.slot * params.B_ring_stride_slot + first;
  }
  __device__ float* dt_ring(int line, int head) const {
    const int64_t first = static_cast<int64_t>(line) * N_HEADS + chunk.first_head + head;
    return params.dt_ring + chunk.lengths.slot * params.dt_ring_stride_slot + first;
  }

 private:
  __device__ int wrap(int line) const { return line < params.ring_rows ? line : line - params.ring_rows; }
};

}  // namespace replay
