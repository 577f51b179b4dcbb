// The loader warps: bring a chunk's token rows to its buffer.
#pragma once
#include "common/pipeline/loading.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int X_PIECES = CHUNK_HEADS * HEAD_DIM * 2 / 16, BC_PIECES = D_STATE * 2 / 16;

// The token rows of one tensor: pending ones from its ring, then the window's from the input.
template <int PIECES, int RING_BYTES>
__device__ inline void copy_token_rows(const ChunkTensors& tensors, uint32_t target, int target_stride,
                                       const ACTIVATION_TYPE* ring, const ACTIVATION_TYPE* window,
                                       int64_t window_stride, int num_pieces) {
  const RowLengths& lengths = tensors.chunk.lengths;
  copy_pending_rows<PIECES, RING_BYTES>(tensors, target, target_stride, ring, num_pieces);
  copy_window_rows<PIECES>(lengths, target + lengths.pending * target_stride, target_stride, window, window_stride,
                           num_pieces);
}

__device__ inline void load_x_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  copy_token_rows<X_PIECES, N_HEADS * HEAD_DIM * 2>(tensors, buffer.address + ChunkOffsets::X, X_ROW_BYTES,
                                                    tensors.x_ring(0), tensors.x(0), tensors.params.x_stride_token,
                                                    tensors.chunk.num_heads * (HEAD_DIM * 2 / 16));
}

__device__ inline void load_B_and_C_rows(const ChunkTensors& tensors, ChunkBuffer buffer) {
  const Mamba2Params& params = tensors.params;
  copy_token_rows<BC_PIECES, N_GROUPS * D_STATE * 2>(tensors, buffer.address + ChunkOffsets::B, BC_ROW_BYTES,
                                                     tensors.B_ring(0), tensors.B(0), params.B_stride_token, BC_PIECES);
  copy_window_rows<BC_PIECES>(tensors.chunk.lengths, buffer.address + ChunkOffsets::C, BC_ROW_BYTES, tensors.C(0),
                              params.C_stride_token, BC_PIECES);
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
      copy_word_of(buffer.raw_time(head, token), tensors.raw_dt(token, head));
    }
  }
  static_assert(LANES >= NUM_CONSTANTS, "one lane of each head brings one constant");
  if (first < NUM_CONSTANTS) {
    const float* constants = first == 0 ? tensors.params.A : first == 1 ? tensors.params.D : tensors.params.dt_bias;
    ptx::copy_async_word(buffer.constants(first) + head, constants + tensors.chunk.first_head + head);
  }
}

// The loader with the least to bring takes the chunks.
template <typename Convolution>
__device__ inline void load(const Mamba2Params& params, const Convolution& convolution, const PipelineShared& shared,
                            const HeadPlan& plan, Loader loader) {
  if (loader == TIMES_LOADER) {
    take_chunks(params, shared, plan, loader,
                [&](const Chunk& chunk, ChunkBuffer buffer) { load_times({params, chunk}, buffer); });
    return;
  }
  follow_chunks(shared, loader, [&](const Chunk& chunk, ChunkBuffer buffer) {
    const ChunkTensors tensors{params, chunk};
    if (loader == X_LOADER) load_x_rows(tensors, buffer);
    if (loader == BC_LOADER) load_B_and_C_rows(tensors, buffer);
    convolution.prefetch_history(chunk, loader);
  });
}

}  // namespace replay
