// The producer, one thread: brings state tiles to shared memory, as far ahead as there is room.
//
// Tiles go by bulk copies, which need no registers and no thread that waits for them.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

__device__ inline void prefetch_lines(const void* source, int bytes) {
  for (int offset = 0; offset < bytes; offset += 128) {
    ptx::prefetch_line(static_cast<const unsigned char*>(source) + offset);
  }
}

// Bring a chunk's token rows to the cache.
__device__ inline void prefetch_rows(const ChunkTensors& tensors) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const int lane = threadIdx.x % WARP_SIZE, x_bytes = tensors.chunk.num_heads * HEAD_DIM * 2;
  for (int row = lane; row < lengths.pending; row += WARP_SIZE) {
    const int line = tensors.pending_line(row);
    ptx::prefetch_line(tensors.dt_ring(line, 0));
    prefetch_lines(tensors.B_ring(line), D_STATE * 2);
    ptx::prefetch_bulk(tensors.x_ring(line), x_bytes);
  }
  // By other lanes than most pending rows.
  const int token = WARP_SIZE - 1 - lane;
  if (token >= lengths.num_tokens) return;
  ptx::prefetch_line(tensors.raw_dt(token, 0));
  prefetch_lines(tensors.B(token), D_STATE * 2);
  prefetch_lines(tensors.C(token), D_STATE * 2);
  ptx::prefetch_bulk(tensors.x(token), x_bytes);
}

// The producer's warp, while the kernel before this one may still run: bring the block's first chunk to the cache, by a
// guess of the lengths; token rows first, behind the tiles they would come late.
template <typename Convolution>
__device__ inline void prefetch_first_chunk(const Mamba2Params& params, const HeadPlan& plan,
                                            const Convolution& convolution) {
  const RawLengths guess = RawLengths::read<Reading::GUESS>(params, plan.row_of(blockIdx.x));
  const Chunk chunk = plan.at(blockIdx.x, guess.clamped(params, plan.ring));
  if (!chunk.lengths.is_active()) return;
  const ChunkTensors tensors{params, chunk};
  prefetch_rows(tensors);
  convolution.prefetch(chunk);
  __syncwarp();
  if (threadIdx.x % WARP_SIZE == 0 && chunk.lengths.has_state()) {
    ptx::prefetch_bulk(tensors.state(), tensors.num_tiles() * TILE_BYTES);
  }
}

// Tiles that are not needed pass through their stages empty.
__device__ inline void produce(const Mamba2Params& params, const PipelineShared& shared) {
  const uint64_t policy = ptx::reading_policy();
  Turn<NUM_STAGES> stage;
#pragma unroll 1
  for (Turn<CHUNK_BUFFERS> turn;; turn.advance(1)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const Chunk chunk = shared.buffer(turn.index()).chunk();
    if (chunk.num_heads == 0) return;
    const ChunkTensors tensors{params, chunk};
    const unsigned char* state = reinterpret_cast<const unsigned char*>(tensors.state());
    const bool is_read = chunk.lengths.is_state_read();
#pragma unroll 1
    for (int tile = tensors.num_tiles(); tile > 0; --tile) {
      const uint32_t is_full = shared.is_stage_full(stage.index());
      ptx::barrier_wait(shared.is_stage_free(stage.index()), stage.parity_before());
      ptx::barrier_expect(is_full, is_read ? TILE_BYTES : 0);
      if (is_read) ptx::copy_bulk(shared.address + stage.index() * TILE_BYTES, state, TILE_BYTES, is_full, policy);
      state += TILE_BYTES;
      stage.advance(1);
    }
  }
}

}  // namespace replay
