// The producer, one thread: brings state tiles to shared memory, as far ahead as there is room.
//
// Tiles go by bulk copies, which need no registers and no thread that waits for them.
#pragma once
#include "mamba2/pipeline/work.cuh"

namespace replay {

// Bring what the stages will hold at first to the cache.
__device__ inline void prefetch_tiles(const Mamba2Params& params, ChunkWalk<Reading::GUESS> walk) {
  for (int num_tiles = 0; num_tiles < NUM_STAGES;) {
    const Chunk chunk = walk.next();
    if (chunk.num_heads == 0) return;
    if (chunk.lengths.is_state_read()) {
      ptx::prefetch_bulk(ChunkTensors{params, chunk}.state(), chunk.num_tiles() * TILE_BYTES);
    }
    num_tiles += chunk.num_tiles();
  }
}

// A tile that is not needed passes through its stage empty.
__device__ inline void produce(const Mamba2Params& params, const Share& share, const PipelineShared& shared) {
  const uint64_t policy = ptx::streaming_policy();
  ChunkWalk<Reading::FINAL> walk(params, share);
  int count = 0;
#pragma unroll 1
  while (true) {
    const Chunk chunk = walk.next();
    if (chunk.num_heads == 0) return;
    const STATE_TYPE* state = ChunkTensors{params, chunk}.state();
    const bool is_needed = chunk.lengths.is_state_read();
#pragma unroll 1
    for (int tile = 0; tile < chunk.num_tiles(); ++tile, ++count) {
      const int stage = count % NUM_STAGES;
      if (count >= NUM_STAGES) ptx::barrier_wait(shared.is_stage_free(stage), parity_of(count, NUM_STAGES) ^ 1);
      ptx::barrier_expect(shared.is_stage_full(stage), is_needed ? TILE_BYTES : 0);
      if (is_needed) {
        ptx::copy_bulk(shared.address + stage * TILE_BYTES, state + static_cast<int64_t>(tile) * STAGE_ROWS * D_STATE,
                       TILE_BYTES, shared.is_stage_full(stage), policy);
      }
    }
  }
}

}  // namespace replay
