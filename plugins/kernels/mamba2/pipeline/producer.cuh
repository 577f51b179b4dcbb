// The producer, one thread: brings state tiles to shared memory, as far ahead as there is room.
//
// Tiles go by bulk copies, which need no registers and no thread that waits for them.
#pragma once
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

// Bring what the stages will hold at first to the cache.
__device__ inline void prefetch_tiles(const Mamba2Params& params, ChunkWalk<Reading::GUESS> walk) {
#pragma unroll 1
  for (int num_tiles = 0; num_tiles < NUM_STAGES;) {
    const Chunk chunk = walk.next();
    if (chunk.num_heads == 0) return;
    if (chunk.lengths.is_state_read()) {
      ptx::prefetch_bulk(ChunkTensors{params, chunk}.state(), chunk.num_tiles() * TILE_BYTES);
    }
    num_tiles += chunk.num_tiles();
  }
}

// A tile that is not needed passes through its stage empty. When the last one is under way the next kernel may start:
// it prepares itself while this one finishes.
__device__ inline void produce(const Mamba2Params& params, const Share& share, const PipelineShared& shared) {
  const uint64_t policy = ptx::streaming_policy();
  ChunkWalk<Reading::FINAL> walk(params, share);
  auto stage = Turn<NUM_STAGES>::of_phase_before();
  for (Chunk chunk = walk.next(); chunk.num_heads > 0; chunk = walk.next()) {
    const unsigned char* state = reinterpret_cast<const unsigned char*>(ChunkTensors{params, chunk}.state());
    const int num_bytes = chunk.lengths.is_state_read() ? TILE_BYTES : 0;
#pragma unroll 1
    for (int tile = chunk.num_tiles(); tile > 0; --tile) {
      const uint32_t is_full = shared.is_stage_full(stage.index());
      ptx::barrier_wait(shared.is_stage_free(stage.index()), stage.parity());
      ptx::barrier_expect(is_full, num_bytes);
      if (num_bytes > 0) {
        ptx::copy_bulk(shared.address + stage.index() * TILE_BYTES, state, TILE_BYTES, is_full, policy);
      }
      state += TILE_BYTES;
      stage.advance(1);
    }
  }
  let_next_start();
}

}  // namespace replay
