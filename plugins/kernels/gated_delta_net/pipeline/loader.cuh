// The loader warps: bring a chunk's token rows to its buffer.
#pragma once
#include "common/pipeline/loading.cuh"
#include "gated_delta_net/pipeline/work.cuh"

namespace replay {

constexpr int KEY_PIECES = KEY_DIM * 2 / 16;
constexpr int U_PIECES = CHUNK_HEADS * VALUE_DIM * 4 / 16, V_PIECES = CHUNK_HEADS * VALUE_DIM * 2 / 16;

// g of the pending rows, as it stands in the ring; a and b of the window, raw; and the constants.
__device__ inline void load_gates(const ChunkTensors& tensors, ChunkBuffer buffer) {
  constexpr int LANES = WARP_SIZE / CHUNK_HEADS;  // of each head
  const int lane = threadIdx.x % WARP_SIZE, head = lane % CHUNK_HEADS, first = lane / CHUNK_HEADS;
  if (head >= tensors.chunk.num_heads || first == LANES) return;
  const RowLengths& lengths = tensors.chunk.lengths;
#pragma unroll
  for (int start = 0; start < HISTORY; start += LANES) {
    const int row = start + first;
    if (row < lengths.pending) {
      ptx::copy_async_word(buffer.g(head) + row, tensors.g_ring(tensors.pending_line(row), head));
    }
  }
#pragma unroll
  for (int start = 0; start < WINDOW; start += LANES) {
    const int token = start + first;
    if (token < lengths.num_tokens) {
      copy_word_of(buffer.raw_gate(GATE_A, head, token), tensors.raw_gate(GATE_A, token, head));
      copy_word_of(buffer.raw_gate(GATE_B, head, token), tensors.raw_gate(GATE_B, token, head));
    }
  }
  static_assert(LANES >= NUM_CONSTANTS, "one lane of each head brings one constant");
  if (first < NUM_CONSTANTS) {
    const float* constants = first == A_LOG ? tensors.params.A_log : tensors.params.dt_bias;
    ptx::copy_async_word(buffer.constants(static_cast<Constant>(first)) + head,
                         constants + tensors.chunk.first_head + head);
  }
}

__device__ inline void load_keys_and_queries(const ChunkTensors& tensors, ChunkBuffer buffer) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const GatedDeltaNetParams& params = tensors.params;
  const uint32_t keys = buffer.address + ChunkOffsets::KEYS;
  copy_window_rows<KEY_PIECES>(lengths, keys + MMA_TOKENS * KEY_ROW_BYTES, KEY_ROW_BYTES, tensors.k(0),
                               params.k_stride_token, KEY_PIECES);
  copy_window_rows<KEY_PIECES>(lengths, buffer.address + ChunkOffsets::QUERIES, KEY_ROW_BYTES, tensors.q(0),
                               params.q_stride_token, KEY_PIECES);
  copy_pending_rows<KEY_PIECES, N_KEY_HEADS * KEY_DIM * 2>(tensors, keys, KEY_ROW_BYTES, tensors.k_ring(0), KEY_PIECES);
  if (!lengths.is_flush()) return;
  const int first = lengths.pending * KEY_PIECES + static_cast<int>(threadIdx.x) % WARP_SIZE;
#pragma unroll 1
  for (int i = first; i < MMA_TOKENS * KEY_PIECES; i += WARP_SIZE) {
    ptx::copy_async_or_zero(keys + i / KEY_PIECES * KEY_ROW_BYTES + i % KEY_PIECES * 16, tensors.k(0), false);
  }
}

__device__ inline void load_values(const ChunkTensors& tensors, ChunkBuffer buffer) {
  const int num_heads = tensors.chunk.num_heads;
  copy_pending_rows<U_PIECES, N_VALUE_HEADS * VALUE_DIM * 4>(tensors, buffer.address + ChunkOffsets::U, U_ROW_BYTES,
                                                             tensors.u_ring(0), num_heads * (VALUE_DIM * 4 / 16));
  copy_window_rows<V_PIECES>(tensors.chunk.lengths, buffer.address + ChunkOffsets::V, V_ROW_BYTES, tensors.v(0),
                             tensors.params.v_stride_token, num_heads * (VALUE_DIM * 2 / 16));
}

// The loader with the least to bring takes the chunks.
__device__ inline void load(const GatedDeltaNetParams& params, const PipelineShared& shared, const HeadPlan& plan,
                            Loader loader) {
  if (loader == GATES_LOADER) {
    take_chunks(params, shared, plan, loader,
                [&](const Chunk& chunk, ChunkBuffer buffer) { load_gates({params, chunk}, buffer); });
    return;
  }
  follow_chunks(shared, loader, [&](const Chunk& chunk, ChunkBuffer buffer) {
    const ChunkTensors tensors{params, chunk};
    if (loader == KEYS_LOADER) load_keys_and_queries(tensors, buffer);
    if (loader == VALUES_LOADER) load_values(tensors, buffer);
  });
}

}  // namespace replay
