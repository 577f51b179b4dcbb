// The producer warp: brings token rows and state tiles to shared memory, as far ahead as there is room.
//
// Everything goes by bulk copies, which need no registers and no thread that waits for them.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

// Bring the pending and window rows of x and B, and the window's C, to a free chunk buffer. One lane a token row; no
// dead ring row is ever brought.
__device__ inline void bring_rows(const ChunkTensors& tensors, const ChunkLengths& lengths, int heads_per_chunk,
                                  ChunkBuffer buffer, uint32_t is_full) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int num_total = lengths.is_active() ? lengths.pending + lengths.num_tokens : 0;
  const int num_window = lengths.is_active() ? lengths.num_tokens : 0;
  const int x_bytes = heads_per_chunk * HEAD_DIM * 2, bc_bytes = D_STATE * 2;
  if (lane == 0) {
    buffer.lengths() = lengths;
    ptx::barrier_expect(is_full, num_total * (x_bytes + bc_bytes) + num_window * bc_bytes);
  }
  __syncwarp();  // the bytes are announced before the first of them can come
  if (lane < num_total) {
    const int token = lane - lengths.pending;
    const int line = tensors.line(lengths.first_pending_row, lane);
    const ACTIVATION_TYPE* x = token < 0 ? tensors.x_ring(line) : tensors.x(token);
    const ACTIVATION_TYPE* B = token < 0 ? tensors.B_ring(line) : tensors.B(token);
    ptx::copy_bulk(buffer.address + ChunkOffsets::X + lane * X_ROW_BYTES, x, x_bytes, is_full);
    ptx::copy_bulk(buffer.address + ChunkOffsets::B + lane * BC_ROW_BYTES, B, bc_bytes, is_full);
  }
  if (lane < num_window) {
    ptx::copy_bulk(buffer.address + ChunkOffsets::C + lane * BC_ROW_BYTES, tensors.C(lane), bc_bytes, is_full);
  }
}

// Bring the tiles [first, last) of a chunk to their stages, the first of which is the block's tile number `count`. A
// tile that is not needed passes through its stage empty.
__device__ inline void bring_tiles(const PipelineShared& shared, const STATE_TYPE* state, bool is_needed, int first,
                                   int last, int count, uint64_t policy) {
#pragma unroll 1
  for (int tile = first; tile < last; ++tile, ++count) {
    const int stage = count % NUM_STAGES;
    if (count >= NUM_STAGES) ptx::barrier_wait(shared.is_stage_free(stage), parity_of(count, NUM_STAGES) ^ 1);
    ptx::barrier_expect(shared.is_stage_full(stage), is_needed ? TILE_BYTES : 0);
    if (is_needed) {
      ptx::copy_bulk(shared.address + stage * TILE_BYTES, state + static_cast<int64_t>(tile) * STAGE_ROWS * D_STATE,
                     TILE_BYTES, shared.is_stage_full(stage), policy);
    }
  }
}

__device__ inline void produce(const Mamba2Params& params, const Schedule& schedule, const PipelineShared& shared) {
  const bool is_first_lane = threadIdx.x % WARP_SIZE == 0;
  const uint64_t policy = ptx::streaming_policy();
  const int num_tiles = schedule.num_tiles();
  int index = blockIdx.x, count = 0;
  if (index >= schedule.num_chunks) return;
  ChunkLengths next = read_lengths(params, schedule.chunk(index).row);
#pragma unroll 1
  for (int turn = 0; index < schedule.num_chunks; ++turn) {
    const ChunkLengths lengths = next;
    const ChunkTensors tensors{params, schedule.chunk(index), lengths.slot};
    index += gridDim.x;
    // The lengths of the next chunk are under way while this one is brought.
    if (index < schedule.num_chunks) next = read_lengths(params, schedule.chunk(index).row);

    const bool is_state_needed = lengths.is_active() && lengths.has_state();
    // Nothing is in the pipeline yet: the first tiles, which take longest, go before the rows.
    const int num_early = turn == 0 ? min(NUM_STAGES, num_tiles) : 0;
    if (is_first_lane) bring_tiles(shared, tensors.state(), is_state_needed, 0, num_early, count, policy);
    if (turn >= CHUNK_BUFFERS) ptx::barrier_wait(shared.is_chunk_free(turn), parity_of(turn, CHUNK_BUFFERS) ^ 1);
    bring_rows(tensors, lengths, schedule.heads_per_chunk, shared.buffer(turn), shared.is_chunk_full(turn));
    if (is_first_lane) {
      bring_tiles(shared, tensors.state(), is_state_needed, num_early, num_tiles, count + num_early, policy);
    }
    __syncwarp();
    count += num_tiles;
  }
}

}  // namespace replay
