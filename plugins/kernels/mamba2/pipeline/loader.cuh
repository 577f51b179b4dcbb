// The loader warps: bring a chunk's token rows to its buffer, and never wait for what they load.
//
// Token rows are many and short: copies by threads bring them sooner than the copy engine would, which spends about as
// long on a row as on a tile. Behind the tiles in memory's queue they would still come late, so the rows of all heads
// are brought to the cache as soon as a row of the step is entered. One warp alone would be too slow: what it executes
// for a chunk takes about as long as the chunk's tiles.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int PIECE = 16 / static_cast<int>(sizeof(ACTIVATION_TYPE));  // elements of one copy
constexpr int X_PIECES = CHUNK_HEADS * HEAD_DIM / PIECE, BC_PIECES = D_STATE / PIECE;

// Start copying rows of num_pieces pieces, at most PIECES. Addresses only grow, to keep it lean.
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

// Pending rows and the window's, of one tensor: from its ring, in two parts if they wrap, and from the input.
template <int PIECES>
__device__ inline void load_token_rows(const ChunkTensors& tensors, uint32_t target, int target_stride,
                                       const ACTIVATION_TYPE* ring, const ACTIVATION_TYPE* first_pending,
                                       int64_t ring_stride, const ACTIVATION_TYPE* window, int64_t window_stride,
                                       int num_pieces) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const int before = min(lengths.pending, tensors.params.ring_rows - lengths.first_pending_row);
  copy_rows<PIECES>(target, target_stride, first_pending, ring_stride, before, num_pieces);
  if (before < lengths.pending) {
    copy_rows<PIECES>(target + before * target_stride, target_stride, ring, ring_stride, lengths.pending - before,
                      num_pieces);
  }
  copy_rows<PIECES>(target + lengths.pending * target_stride, target_stride, window, window_stride, lengths.num_tokens,
                    num_pieces);
}

__device__ inline void load_x_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  load_token_rows<X_PIECES>(tensors, buffer.address + ChunkOffsets::X, X_ROW_BYTES, tensors.x_ring(0),
                            tensors.x_ring(tensors.chunk.lengths.first_pending_row), N_HEADS * HEAD_DIM, tensors.x(0),
                            tensors.params.x_stride_token, tensors.chunk.num_heads * (HEAD_DIM / PIECE));
}

__device__ inline void load_B_and_C_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  load_token_rows<BC_PIECES>(tensors, buffer.address + ChunkOffsets::B, BC_ROW_BYTES, tensors.B_ring(0),
                             tensors.B_ring(tensors.chunk.lengths.first_pending_row), N_GROUPS * D_STATE,
                             tensors.B(0), tensors.params.B_stride_token, BC_PIECES);
  copy_rows<BC_PIECES>(buffer.address + ChunkOffsets::C, BC_ROW_BYTES, tensors.C(0), tensors.params.C_stride_token,
                       tensors.chunk.lengths.num_tokens, BC_PIECES);
}

// dt of the pending rows, as it stands in the ring; of the window, raw, in words that are aligned; and the constants.
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
  for (int which = lane / CHUNK_HEADS; which < NUM_CONSTANTS; which += WARP_SIZE / CHUNK_HEADS) {
    const float* constants = tensors.params.A;
    if (which == 1) constants = tensors.params.D;
    if (which == 2) constants = tensors.params.dt_bias;
    ptx::copy_async_word(buffer.constants(which) + head, constants + tensors.chunk.first_head + head);
  }
}

__device__ inline void prefetch_lines(const void* source, int bytes) {
#pragma unroll 1
  for (int offset = 0; offset < bytes; offset += 128) {
    ptx::prefetch_line(static_cast<const unsigned char*>(source) + offset);
  }
}

// Bring a loader's token rows of many heads to the cache; one lane a token row.
__device__ inline void prefetch_rows(const Mamba2Params& params, const Chunk& heads, int loader) {
  if (!heads.lengths.is_active() || heads.num_heads == 0) return;
  const ChunkTensors tensors{params, heads};
  const int lane = threadIdx.x % WARP_SIZE;
  const int token = lane - heads.lengths.pending;
  if (token >= heads.lengths.num_tokens) return;
  const int line = token < 0 ? tensors.pending_line(lane) : 0;
  const int num_groups = (heads.first_head + heads.num_heads - 1) / HEADS_PER_GROUP - heads.group() + 1;
  if (loader == 0 && token < 0) {
    prefetch_lines(tensors.B_ring(line), num_groups * D_STATE * 2);
  } else if (loader == 0) {
#pragma unroll 1
    for (int group = 0; group < num_groups; ++group) {
      prefetch_lines(tensors.B(token) + group * params.B_stride_group, D_STATE * 2);
      prefetch_lines(tensors.C(token) + group * params.C_stride_group, D_STATE * 2);
    }
  } else if (loader == 1) {
    ptx::prefetch_bulk(token < 0 ? tensors.x_ring(line) : tensors.x(token), heads.num_heads * HEAD_DIM * 2);
  } else if (token < 0) {
    prefetch_lines(tensors.dt_ring(line, 0), heads.num_heads * 4);
  } else {
    prefetch_lines(tensors.raw_dt(token, 0), heads.num_heads * static_cast<int>(sizeof(DT_TYPE)));
  }
}

__device__ inline void load_chunks(const Mamba2Params& params, const Share& share, const PipelineShared& shared,
                                   int loader) {
  const bool is_first_lane = threadIdx.x % WARP_SIZE == 0;
  ChunkWalk<Reading::FINAL> walk(params, share);
  int prefetched_row = share.row;
  auto turn = Turn<CHUNK_BUFFERS>::of_phase_before();
  // Each team of coefficient warps must see an end.
#pragma unroll 1
  for (int num_ends = 0; num_ends < COEFFICIENT_TEAMS; turn.advance(1)) {
    const Chunk chunk = walk.next();
    const ChunkBuffer buffer = shared.buffer(turn.index());
    if (chunk.num_heads > 0 && chunk.row != prefetched_row) {
      prefetch_rows(params, {chunk.lengths, chunk.row, chunk.first_head, walk.last_head_of_row() - chunk.first_head},
                    loader);
      prefetched_row = chunk.row;
    }
    ptx::barrier_wait(shared.is_chunk_free(turn.index()), turn.parity());
    if (loader == 0 && is_first_lane) buffer.chunk() = chunk;
    if (chunk.num_heads == 0) {
      ++num_ends;
    } else if (chunk.lengths.is_active()) {
      const ChunkTensors tensors{params, chunk};
      if (loader == 0) load_B_and_C_rows(tensors, buffer);
      if (loader == 1) load_x_rows(tensors, buffer);
      if (loader == 2) load_times(tensors, buffer);
    }
    ptx::barrier_arrive_after_copies(shared.is_chunk_full(turn.index()));
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_full(turn.index()));
  }
}

}  // namespace replay
