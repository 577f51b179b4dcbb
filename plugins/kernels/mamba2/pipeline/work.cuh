// Which chunks a thread block works on, and where their tensors are.
#pragma once
#include "mamba2/pipeline/layout.cuh"

namespace replay {

struct Chunk {
  int row;         // of the step
  int first_head;  // neighbours from here on
  int group;
};

// Thread blocks take chunks in turn: block b has the chunks b, b + gridDim.x, ... Every warp counts them by itself.
struct Schedule {
  int heads_per_chunk;
  int chunks_per_row;
  int num_chunks;

  // Chunks are made smaller while there are fewer of them than thread blocks.
  __device__ explicit Schedule(const Mamba2Params& params) : heads_per_chunk(CHUNK_HEADS) {
    while (heads_per_chunk > 1 && params.num_rows * (N_HEADS / heads_per_chunk) < static_cast<int>(gridDim.x)) {
      heads_per_chunk /= 2;
    }
    chunks_per_row = N_HEADS / heads_per_chunk;
    num_chunks = params.num_rows * chunks_per_row;
  }

  __device__ Chunk chunk(int index) const {
    const int row = index / chunks_per_row, first_head = (index - row * chunks_per_row) * heads_per_chunk;
    return {row, first_head, first_head / HEADS_PER_GROUP};
  }
  __device__ int num_tiles() const { return heads_per_chunk * TILES_PER_HEAD; }
};

// Lengths that break the protocol must not lead outside of shared memory or of a slot's rings, hence the clamps.
__device__ inline ChunkLengths read_lengths(const Mamba2Params& params, int row) {
  const int slot = params.slot_ids[row], past = params.past_lengths[row];
  const int checkpoint = params.checkpoint_lengths[row], num_tokens = params.num_tokens[row];
  ChunkLengths lengths;
  lengths.slot = slot;
  lengths.checkpoint = max(0, checkpoint);
  lengths.pending = max(0, min(past - checkpoint, HISTORY));
  lengths.num_tokens = slot < 0 ? 0 : max(0, min(num_tokens, min(params.seq_len, WINDOW)));
  lengths.first_pending_row = ring_row(max(0, checkpoint), params.ring_rows);
  lengths.first_window_row = ring_row(max(0, past), params.ring_rows);
  return lengths;
}

// Addresses of a chunk's tensors; x and the x ring at its first head, whose neighbours follow.
struct ChunkTensors {
  const Mamba2Params& params;
  Chunk chunk;
  int slot;

  __device__ const ACTIVATION_TYPE* x(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.x) + chunk.row * params.x_stride_batch +
           token * params.x_stride_token + chunk.first_head * params.x_stride_head;
  }
  __device__ const ACTIVATION_TYPE* B(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.B) + chunk.row * params.B_stride_batch +
           token * params.B_stride_token + chunk.group * params.B_stride_group;
  }
  __device__ const ACTIVATION_TYPE* C(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.C) + chunk.row * params.C_stride_batch +
           token * params.C_stride_token + chunk.group * params.C_stride_group;
  }
  __device__ float raw_dt(int token, int head) const {
    return to_float(static_cast<const DT_TYPE*>(
        params.dt)[chunk.row * params.dt_stride_batch + token * params.dt_stride_token + head]);
  }
  __device__ ACTIVATION_TYPE* y(int token) const {
    const int64_t line = (static_cast<int64_t>(chunk.row) * params.seq_len + token) * N_HEADS + chunk.first_head;
    return static_cast<ACTIVATION_TYPE*>(params.y) + line * HEAD_DIM;
  }
  // All heads of a chunk and all of their state rows are neighbours.
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(chunk.first_head) * HEAD_DIM * D_STATE;
  }
  // `line` is a row of the ring; rows after `first` wrap once at most.
  __device__ int line(int first, int offset) const {
    const int row = first + offset;
    return row < params.ring_rows ? row : row - params.ring_rows;
  }
  __device__ ACTIVATION_TYPE* x_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_HEADS + chunk.first_head) * HEAD_DIM;
    return static_cast<ACTIVATION_TYPE*>(params.x_ring) + slot * params.x_ring_stride_slot + first;
  }
  __device__ ACTIVATION_TYPE* B_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_GROUPS + chunk.group) * D_STATE;
    return static_cast<ACTIVATION_TYPE*>(params.B_ring) + slot * params.B_ring_stride_slot + first;
  }
  __device__ float* dt_ring(int line, int head) const {
    return params.dt_ring + slot * params.dt_ring_stride_slot + static_cast<int64_t>(line) * N_HEADS + head;
  }
};

}  // namespace replay
