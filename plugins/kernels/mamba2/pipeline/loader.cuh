// The loader warp: brings a chunk's token rows to its buffer, and never waits for what it loads.
//
// Token rows are many and short: copies by threads bring them sooner than the copy engine would, which spends about as
// long on a row as on a tile. Behind the tiles in memory's queue they would still come late, so the rows of all heads
// are brought to the cache as soon as a row of the step is entered.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int PIECE = 16 / static_cast<int>(sizeof(ACTIVATION_TYPE));  // elements of one copy
constexpr int X_PIECES = CHUNK_HEADS * HEAD_DIM / PIECE, BC_PIECES = D_STATE / PIECE;

// Start copying rows of num_pieces pieces, at most PIECES. Lean, for one warp does it all: addresses only grow.
template <int PIECES>
__device__ inline void copy_rows(uint32_t target, int target_stride, const ACTIVATION_TYPE* source, int64_t stride,
                                 int num_rows, int num_pieces) {
  constexpr int LANES = PIECES > 16 ? WARP_SIZE : 16, ROWS_AT_ONCE = WARP_SIZE / LANES;
  const int lane = threadIdx.x % LANES, first = threadIdx.x % WARP_SIZE / LANES;
  target += first * target_stride + lane * 16;
  source += first * stride + lane * PIECE;
#pragma unroll 2
  for (int row = first; row < num_rows; row += ROWS_AT_ONCE) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += LANES) {
      if (lane + piece < num_pieces) ptx::copy_async(target + piece * 16, source + piece * PIECE);
    }
    target += ROWS_AT_ONCE * target_stride;
    source += ROWS_AT_ONCE * stride;
  }
}

// Pending rows, then the window's, of x and B; then C of the window. No dead ring row is ever read.
__device__ inline void load_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  const Mamba2Params& params = tensors.params;
  const int pending = tensors.chunk.lengths.pending, num_tokens = tensors.chunk.lengths.num_tokens;
  const int first_line = tensors.chunk.lengths.first_pending_row, x_pieces = tensors.chunk.num_heads * (HEAD_DIM / PIECE);
  // Before the rings wrap, and after.
  const int before = min(pending, params.ring_rows - first_line);
  const uint32_t C = buffer.address + ChunkOffsets::C, B = buffer.address + ChunkOffsets::B,
                 x = buffer.address + ChunkOffsets::X;
  copy_rows<BC_PIECES>(B, BC_ROW_BYTES, tensors.B_ring(first_line), N_GROUPS * D_STATE, before, BC_PIECES);
  copy_rows<X_PIECES>(x, X_ROW_BYTES, tensors.x_ring(first_line), N_HEADS * HEAD_DIM, before, x_pieces);
  if (before < pending) {
    const int after = pending - before;
    copy_rows<BC_PIECES>(B + before * BC_ROW_BYTES, BC_ROW_BYTES, tensors.B_ring(0), N_GROUPS * D_STATE, after,
                         BC_PIECES);
    copy_rows<X_PIECES>(x + before * X_ROW_BYTES, X_ROW_BYTES, tensors.x_ring(0), N_HEADS * HEAD_DIM, after, x_pieces);
  }
  copy_rows<BC_PIECES>(B + pending * BC_ROW_BYTES, BC_ROW_BYTES, tensors.B(0), params.B_stride_token, num_tokens,
                       BC_PIECES);
  copy_rows<BC_PIECES>(C, BC_ROW_BYTES, tensors.C(0), params.C_stride_token, num_tokens, BC_PIECES);
  copy_rows<X_PIECES>(x + pending * X_ROW_BYTES, X_ROW_BYTES, tensors.x(0), params.x_stride_token, num_tokens,
                      x_pieces);
}

// dt of the pending rows, as it stands in the ring; and of the window, raw, in words that are aligned.
__device__ inline void load_times(const ChunkTensors& tensors, ChunkBuffer buffer) {
  const int lane = threadIdx.x % WARP_SIZE, head = lane % CHUNK_HEADS;
  if (head >= tensors.chunk.num_heads) return;
  for (int row = lane / CHUNK_HEADS; row < tensors.chunk.lengths.pending; row += WARP_SIZE / CHUNK_HEADS) {
    ptx::copy_async_word(buffer.pending_times(head) + row, tensors.dt_ring(tensors.pending_line(row), head));
  }
  for (int token = lane / CHUNK_HEADS; token < tensors.chunk.lengths.num_tokens; token += WARP_SIZE / CHUNK_HEADS) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(tensors.raw_dt(token, head)) & ~uintptr_t{3};
    ptx::copy_async_word(buffer.raw_time(head, token), reinterpret_cast<const void*>(address));
  }
}

__device__ inline void prefetch_lines(const void* source, int bytes) {
#pragma unroll 1
  for (int offset = 0; offset < bytes; offset += 128) {
    ptx::prefetch_line(static_cast<const unsigned char*>(source) + offset);
  }
}

// Bring the token rows of many heads to the cache; one lane a token row.
__device__ inline void prefetch_rows(const Mamba2Params& params, const Chunk& heads) {
  if (!heads.lengths.is_active()) return;
  const ChunkTensors tensors{params, heads};
  const int lane = threadIdx.x % WARP_SIZE;
  const int token = lane - heads.lengths.pending;
  const int num_groups = (heads.first_head + heads.num_heads - 1) / HEADS_PER_GROUP - heads.group() + 1;
  const int x_bytes = heads.num_heads * HEAD_DIM * 2;
  if (token < 0) {
    const int line = tensors.pending_line(lane);
    prefetch_lines(tensors.dt_ring(line, 0), heads.num_heads * 4);
    prefetch_lines(tensors.B_ring(line), num_groups * D_STATE * 2);
    prefetch_lines(tensors.x_ring(line), x_bytes);
  } else if (token < heads.lengths.num_tokens) {
    prefetch_lines(tensors.raw_dt(token, 0), heads.num_heads * static_cast<int>(sizeof(DT_TYPE)));
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
      prefetch_lines(tensors.B(token) + group * params.B_stride_group, D_STATE * 2);
      prefetch_lines(tensors.C(token) + group * params.C_stride_group, D_STATE * 2);
    }
    prefetch_lines(tensors.x(token), x_bytes);
  } else if (lane >= WARP_SIZE - 3) {
    const float* weights = lane == WARP_SIZE - 1 ? params.A : lane == WARP_SIZE - 2 ? params.D : params.dt_bias;
    prefetch_lines(weights + heads.first_head, heads.num_heads * 4);
  }
}

__device__ inline void load_chunks(const Mamba2Params& params, const Share& share, const PipelineShared& shared) {
  const bool is_first_lane = threadIdx.x % WARP_SIZE == 0;
  ChunkWalk<Reading::FINAL> walk(params, share);
  int prefetched_row = share.row;
  Turn<CHUNK_BUFFERS> turn;
  turn.parity = 1;  // of the phase before: nobody has used the buffers yet
  // Each team of coefficient warps must see an end.
#pragma unroll 1
  for (int num_ends = 0; num_ends < COEFFICIENT_TEAMS; turn.advance(1)) {
    const Chunk chunk = walk.next();
    const ChunkBuffer buffer = shared.buffer(turn.index);
    if (chunk.num_heads > 0 && chunk.row != prefetched_row) {
      prefetch_rows(params, {chunk.lengths, chunk.row, chunk.first_head, walk.last_head_of_row() - chunk.first_head});
      prefetched_row = chunk.row;
    }
    ptx::barrier_wait(shared.is_chunk_free(turn.index), turn.parity);
    if (is_first_lane) buffer.chunk() = chunk;
    if (chunk.num_heads == 0) {
      ++num_ends;
    } else if (chunk.lengths.is_active()) {
      const ChunkTensors tensors{params, chunk};
      load_rows(tensors, buffer);
      load_times(tensors, buffer);
    }
    ptx::barrier_arrive_after_copies(shared.is_chunk_full(turn.index));
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_full(turn.index));
  }
}

}  // namespace replay
