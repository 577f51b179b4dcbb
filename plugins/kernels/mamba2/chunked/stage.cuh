// Bring a chunk's rows of x, B and C to shared memory. The tokens are the pending rows of the ring and then the window,
// one sequence; pending rows have no C. Rows that are not there become zeros: a product would spread what stands there.
#pragma once
#include "mamba2/chunked/layout.cuh"

namespace replay {

// A run of tokens; token i < pending is ring row checkpoint + i, the others are window tokens.
struct Chunk {
  int first;
  int count;
  int num_ring;  // this many of them are ring rows

  __device__ Chunk(const Row& row, int index)
      : first(index * CHUNK_SIZE),
        count(max(0, min(CHUNK_SIZE, row.pending + row.num_tokens - first))),
        num_ring(max(0, min(count, row.pending - first))) {}

  // The window token of a row of the chunk, negative for a ring row.
  __device__ int token(const Row& row, int i) const { return first + i - row.pending; }
};

// Start copying the window's rows first_row .. count - 1, PIECES 16-byte pieces each, and clear those after them;
// wait_for_copies() and a barrier complete it. `source` is row 0, target_of(row, piece) an offset in `shared`. Rows that
// are not aligned go element by element.
template <int PIECES, typename TargetOf>
__device__ inline void stage_window(const ChunkShared& shared, const ACTIVATION_TYPE* source, int64_t stride,
                                    bool is_aligned, int first_row, int count, TargetOf target_of) {
  constexpr int ROWS_PER_PASS = BLOCK_THREADS / PIECES;
  static_assert(ROWS_PER_PASS * PIECES == BLOCK_THREADS, "a thread keeps its piece from row to row");
  const int piece = threadIdx.x % PIECES;
  int row = threadIdx.x / PIECES;
  if (__builtin_expect(is_aligned, true)) {
    source += row * stride + piece * 8;
#pragma unroll
    for (int pass = 0; pass * ROWS_PER_PASS < CHUNK_SIZE; ++pass) {
      const bool is_row = CHUNK_SIZE % ROWS_PER_PASS == 0 || row < CHUNK_SIZE;
      if (is_row && row >= first_row) {
        ptx::copy_async_or_zero(shared.address + target_of(row, piece), source, row < count);
      }
      row += ROWS_PER_PASS;
      source += ROWS_PER_PASS * stride;
    }
  } else {
#pragma unroll 1
    for (; row < CHUNK_SIZE; row += ROWS_PER_PASS) {
      if (row < first_row) continue;
      ACTIVATION_TYPE* target = reinterpret_cast<ACTIVATION_TYPE*>(shared.base + target_of(row, piece));
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        target[i] = row < count ? source[row * stride + piece * 8 + i] : ACTIVATION_TYPE{};
      }
    }
  }
}

// Start copying the chunk's rows of a ring; they are aligned.
template <int PIECES, typename SourceOf, typename TargetOf>
__device__ inline void stage_ring(const ChunkShared& shared, int num_rows, SourceOf source_of, TargetOf target_of) {
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * PIECES; i += BLOCK_THREADS) {
    const int row = i / PIECES, piece = i % PIECES;
    ptx::copy_async_or_zero(shared.address + target_of(row, piece), source_of(row) + piece * 8, true);
  }
}

__device__ inline void stage_x_and_B(const Tensors& tensors, int first_channel, const Chunk& chunk,
                                     const ChunkShared& shared) {
  if (chunk.count == 0) return;
  const Row& row = tensors.row;
  const int position = row.checkpoint + chunk.first, token = chunk.token(row, 0);
  const auto x_target = [&](int i, int piece) { return shared.x_offset() + i * X_ROW_BYTES + piece * 16; };
  const auto B_target = [&](int i, int piece) { return shared.B_offset() + ChunkShared::piece_offset(i, piece); };
  stage_window<SLICE_ROWS / 8>(shared, tensors.x(token) + first_channel, tensors.params.x_stride_token,
                               tensors.is_x_aligned(), chunk.num_ring, chunk.count, x_target);
  stage_window<D_STATE / 8>(shared, tensors.B(token), tensors.params.B_stride_token, tensors.is_B_aligned(),
                            chunk.num_ring, chunk.count, B_target);
  if (__builtin_expect(chunk.num_ring == 0, true)) return;
  stage_ring<SLICE_ROWS / 8>(
      shared, chunk.num_ring, [&](int i) { return tensors.x_ring(position + i) + first_channel; }, x_target);
  stage_ring<D_STATE / 8>(shared, chunk.num_ring, [&](int i) { return tensors.B_ring(position + i); }, B_target);
}

// Pending rows have no C, and their outputs are never used.
__device__ inline void stage_C(const Tensors& tensors, const Chunk& chunk, const ChunkShared& shared) {
  if (chunk.count == 0) return;
  stage_window<D_STATE / 8>(shared, tensors.C(chunk.token(tensors.row, 0)), tensors.params.C_stride_token,
                            tensors.is_C_aligned(), chunk.num_ring, chunk.count, [&](int i, int piece) {
                              return ChunkOffsets::C + ChunkShared::piece_offset(i, piece);
                            });
}

}  // namespace replay
