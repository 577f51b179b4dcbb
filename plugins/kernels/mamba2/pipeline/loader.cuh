// The loader warps: bring a chunk's token rows to its buffer, and never wait for what they load.
//
// Token rows are many and short: copies by threads bring them sooner than the copy engine would, which spends about as
// long on a row as on a tile. One warp alone would be too slow: what it executes for a chunk takes about as long as the
// chunk's tiles.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int PIECE = 16 / static_cast<int>(sizeof(ACTIVATION_TYPE));  // elements of one copy
constexpr int X_PIECES = CHUNK_HEADS * HEAD_DIM / PIECE, BC_PIECES = D_STATE / PIECE;

constexpr int ROWS_AT_ONCE = 4;  // of a lane, so that their addresses are computed side by side

// Start copying rows of num_pieces pieces, at most PIECES; source(row) gives where a row begins.
template <int PIECES, typename Source>
__device__ inline void copy_rows(uint32_t target, int target_stride, int num_rows, int num_pieces, Source source) {
  constexpr int LANES = PIECES > 16 ? WARP_SIZE : 16, ROWS_OF_WARP = WARP_SIZE / LANES;
  const int lane = threadIdx.x % LANES, first = threadIdx.x % WARP_SIZE / LANES;
  target += first * target_stride + lane * 16;
#pragma unroll 1
  for (int start = first; start < num_rows; start += ROWS_AT_ONCE * ROWS_OF_WARP) {
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
      const int row = start + i * ROWS_OF_WARP;
      const unsigned char* row_source = source(static_cast<uint32_t>(row)) + lane * 16;
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += LANES) {
        if (row < num_rows && lane + piece < num_pieces) {
          ptx::copy_async(target + i * ROWS_OF_WARP * target_stride + piece * 16, row_source + piece * 16);
        }
      }
    }
    target += ROWS_AT_ONCE * ROWS_OF_WARP * target_stride;
  }
}

// The token rows of one tensor: pending ones from its ring, whose rows are RING_BYTES apart, and the window's from the
// input.
template <int PIECES, int RING_BYTES>
__device__ inline void copy_token_rows(const ChunkTensors& tensors, uint32_t target, int target_stride,
                                       const ACTIVATION_TYPE* ring, const ACTIVATION_TYPE* window,
                                       int64_t window_stride, int num_pieces) {
  const RowLengths& lengths = tensors.chunk.lengths;
  copy_rows<PIECES>(target, target_stride, lengths.pending, num_pieces, [&](uint32_t row) {
    const uint64_t line = static_cast<uint32_t>(tensors.pending_line(row));
    return reinterpret_cast<const unsigned char*>(ring) + line * RING_BYTES;
  });
  copy_rows<PIECES>(target + lengths.pending * target_stride, target_stride, lengths.num_tokens, num_pieces,
                    [&](uint32_t token) { return reinterpret_cast<const unsigned char*>(window + token * window_stride); });
}

__device__ inline void load_x_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  copy_token_rows<X_PIECES, N_HEADS * HEAD_DIM * 2>(tensors, buffer.address + ChunkOffsets::X, X_ROW_BYTES,
                                                    tensors.x_ring(0), tensors.x(0), tensors.params.x_stride_token,
                                                    tensors.chunk.num_heads * (HEAD_DIM / PIECE));
}

__device__ inline void load_B_and_C_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  copy_token_rows<BC_PIECES, N_GROUPS * D_STATE * 2>(tensors, buffer.address + ChunkOffsets::B, BC_ROW_BYTES,
                                                     tensors.B_ring(0), tensors.B(0), tensors.params.B_stride_token,
                                                     BC_PIECES);
  copy_rows<BC_PIECES>(buffer.address + ChunkOffsets::C, BC_ROW_BYTES, tensors.chunk.lengths.num_tokens, BC_PIECES,
                       [&](uint32_t token) {
                         return reinterpret_cast<const unsigned char*>(tensors.C(static_cast<int>(token)));
                       });
}

// dt of the pending rows, as it stands in the ring; of the window, raw, in words that are aligned; and the constants.
__device__ inline void load_times(const ChunkTensors& tensors, ChunkBuffer buffer) {
  constexpr int LANES = WARP_SIZE / CHUNK_HEADS;  // of each head
  const int lane = threadIdx.x % WARP_SIZE, head = lane % CHUNK_HEADS, first = lane / CHUNK_HEADS;
  if (head >= tensors.chunk.num_heads) return;
#pragma unroll
  for (int start = 0; start < HISTORY; start += LANES) {
    const int row = start + first;
    if (row < tensors.chunk.lengths.pending) {
      ptx::copy_async_word(buffer.pending_times(head) + row, tensors.dt_ring(tensors.pending_line(row), head));
    }
  }
#pragma unroll
  for (int start = 0; start < WINDOW; start += LANES) {
    const int token = start + first;
    if (token < tensors.chunk.lengths.num_tokens) {
      const uintptr_t address = reinterpret_cast<uintptr_t>(tensors.raw_dt(token, head)) & ~uintptr_t{3};
      ptx::copy_async_word(buffer.raw_time(head, token), reinterpret_cast<const void*>(address));
    }
  }
  static_assert(LANES >= NUM_CONSTANTS, "one lane of each head brings one constant");
  if (first < NUM_CONSTANTS) {
    const float* constants = first == 0 ? tensors.params.A : first == 1 ? tensors.params.D : tensors.params.dt_bias;
    ptx::copy_async_word(buffer.constants(first) + head, constants + tensors.chunk.first_head + head);
  }
}

// Start a loader's copies of one chunk; its barrier is told when they have come, in the order of the chunks. At the end
// it is told at once: nobody may be left who waits for copies.
__device__ inline void load_chunk(const Mamba2Params& params, const PipelineShared& shared, const Chunk& chunk,
                                  int place, Loader loader) {
  const uint32_t is_loaded = shared.is_loaded(loader, place);
  if (chunk.num_heads == 0) {
    ptx::barrier_arrive(is_loaded);
    return;
  }
  if (chunk.lengths.is_active()) {
    const ChunkTensors tensors{params, chunk};
    const ChunkBuffer buffer = shared.buffer(place);
    if (loader == TIMES_LOADER) load_times(tensors, buffer);
    if (loader == X_LOADER) load_x_rows(tensors, buffer);
    if (loader == BC_LOADER) load_B_and_C_rows(tensors, buffer);
  }
  ptx::barrier_arrive_after_copies(is_loaded);
}

// The loader with the least to bring takes the chunks, for all. Each team of coefficient warps must see an end.
__device__ inline void take_chunks(const Mamba2Params& params, const PipelineShared& shared, const ChunkPlan& plan) {
  ChunkTaker taker(params, plan);
  Turn<CHUNK_BUFFERS> turn;
#pragma unroll 1
  for (int num_ends = 0; num_ends < COEFFICIENT_TEAMS; turn.advance(1)) {
    const Chunk chunk = taker.chunk();
    ptx::barrier_wait(shared.is_chunk_free(turn.index()), turn.parity_before());
    if (threadIdx.x % WARP_SIZE == 0) {
      shared.buffer(turn.index()).chunk() = chunk;
      ptx::barrier_arrive(shared.is_chunk_known(turn.index()));
    }
    load_chunk(params, shared, chunk, turn.index(), TIMES_LOADER);
    taker.advance();
    if (chunk.num_heads == 0) ++num_ends;
  }
}

// The other loaders.
__device__ inline void follow_chunks(const Mamba2Params& params, const PipelineShared& shared, Loader loader) {
  Turn<CHUNK_BUFFERS> turn;
#pragma unroll 1
  for (int num_ends = 0; num_ends < COEFFICIENT_TEAMS; turn.advance(1)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const Chunk chunk = shared.buffer(turn.index()).chunk();
    load_chunk(params, shared, chunk, turn.index(), loader);
    if (chunk.num_heads == 0) ++num_ends;
  }
}

}  // namespace replay
