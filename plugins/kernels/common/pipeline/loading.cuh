// What the loader warps of a pipelined step have in common: they take chunks, start copies, and never wait for them.
//
// Token rows are many and short: copies by threads bring them sooner than the copy engine would, which spends about as
// long on a row as on a tile. One warp alone would be too slow: what it executes for a chunk takes about as long as the
// chunk's tiles.
#pragma once
#include "common/pipeline/memory.cuh"
#include "common/types.cuh"

namespace replay {

constexpr int ROWS_AT_ONCE = 4;  // of a lane, so that their addresses are computed side by side

// Start copying rows of num_pieces pieces of 16 bytes, at most ROWS and PIECES; source(row) gives where a row begins.
template <int ROWS, int PIECES, typename Source>
__device__ inline void copy_rows(uint32_t target, int target_stride, int num_rows, int num_pieces, Source source) {
  constexpr int LANES = PIECES > 16 ? WARP_SIZE : 16, ROWS_OF_WARP = WARP_SIZE / LANES;
  constexpr int ROUNDS = (ROWS + ROWS_OF_WARP - 1) / ROWS_OF_WARP;
  constexpr int AT_ONCE = ROUNDS < ROWS_AT_ONCE ? ROUNDS : ROWS_AT_ONCE;
  const int lane = threadIdx.x % LANES, first = threadIdx.x % WARP_SIZE / LANES;
  target += first * target_stride + lane * 16;
#pragma unroll 1
  for (int start = first; start < num_rows; start += AT_ONCE * ROWS_OF_WARP) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = start + i * ROWS_OF_WARP;
      const unsigned char* row_source = source(static_cast<uint32_t>(row)) + lane * 16;
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += LANES) {
        if (row < num_rows && lane + piece < num_pieces) {
          ptx::copy_async(target + i * ROWS_OF_WARP * target_stride + piece * 16, row_source + piece * 16);
        }
      }
    }
    target += AT_ONCE * ROWS_OF_WARP * target_stride;
  }
}

// The pending rows of a ring, whose rows are RING_BYTES apart.
template <int PIECES, int RING_BYTES, typename Tensors, typename T>
__device__ inline void copy_pending_rows(const Tensors& tensors, uint32_t target, int target_stride, const T* ring,
                                         int num_pieces) {
  copy_rows<HISTORY, PIECES>(target, target_stride, tensors.chunk.lengths.pending, num_pieces, [&](uint32_t row) {
    const uint64_t line = static_cast<uint32_t>(tensors.pending_line(row));
    return reinterpret_cast<const unsigned char*>(ring) + line * RING_BYTES;
  });
}

// The rows of the window, `stride` elements apart.
template <int PIECES, typename T>
__device__ inline void copy_window_rows(const RowLengths& lengths, uint32_t target, int target_stride, const T* window,
                                        int64_t stride, int num_pieces) {
  copy_rows<1 + MAX_DRAFT_LEN, PIECES>(target, target_stride, lengths.num_tokens, num_pieces, [&](uint32_t token) {
    return reinterpret_cast<const unsigned char*>(window + token * stride);
  });
}

// Start copying the aligned word in which a number stands, which may have 16 bits; and take the number from it.
template <typename T>
__device__ inline void copy_word_of(uint32_t* target, const T* source) {
  ptx::copy_async_word(target, reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(source) & ~uintptr_t{3}));
}

template <typename T>
__device__ inline float number_in(uint32_t word, const T* source) {
  // Of two 16-bit numbers in the word, the upper one?
  if (sizeof(T) == 2 && (reinterpret_cast<uintptr_t>(source) & 2) != 0) word >>= 16;
  T number;
  memcpy(&number, &word, sizeof(number));
  return to_float(number);
}

// Start a loader's copies of one chunk by `load`, unless nothing is to be done; its barrier is told when they have come.
// Who waits for it has waited for is_chunk_known() before, so it cannot take an earlier phase for this one.
template <typename Memory, typename Load>
__device__ inline void load_chunk(const Memory& shared, const Chunk& chunk, int place, int loader, Load load) {
  if (chunk.lengths.is_active()) load(chunk, shared.buffer(place));
  ptx::barrier_arrive_after_copies(shared.is_loaded(loader, place));
}

// The loader with the least to bring takes the chunks, for all. Each team of coefficient warps must see an end.
template <int NUM_HEADS, typename Params, typename Memory, typename Load>
__device__ inline void take_chunks(const Params& params, const Memory& shared, const ChunkPlan<NUM_HEADS>& plan,
                                   int loader, Load load) {
  ChunkTaker<NUM_HEADS, Params> taker(params, plan);
  shared.wait_for_barriers();  // while the first lengths are on their way
  Turn<CHUNK_BUFFERS> turn;
#pragma unroll 1
  for (int num_ends = 0; num_ends < COEFFICIENT_TEAMS; turn.advance(1)) {
    const Chunk chunk = taker.chunk();
    ptx::barrier_wait(shared.is_chunk_free(turn.index()), turn.parity_before());
    if (threadIdx.x % WARP_SIZE == 0) {
      shared.buffer(turn.index()).chunk() = chunk;
      ptx::barrier_arrive(shared.is_chunk_known(turn.index()));
    }
    if (chunk.num_heads == 0) {
      ++num_ends;
    } else {
      load_chunk(shared, chunk, turn.index(), loader, load);
      taker.advance();
    }
  }
}

// The other loaders.
template <typename Memory, typename Load>
__device__ inline void follow_chunks(const Memory& shared, int loader, Load load) {
  Turn<CHUNK_BUFFERS> turn;
#pragma unroll 1
  for (;; turn.advance(1)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const Chunk chunk = shared.buffer(turn.index()).chunk();
    if (chunk.num_heads == 0) return;
    load_chunk(shared, chunk, turn.index(), loader, load);
  }
}

}  // namespace replay
