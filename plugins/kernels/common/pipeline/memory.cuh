// The dynamic shared memory of a pipelined step: stages for the state's tiles, chunk buffers, barriers.
//
// Chunks go through the chunk buffers in turn. Loader warps bring a chunk's token rows to its buffer, the coefficient
// warps, in teams of TEAM_WARPS, make weights of them, and the consumer warps are through with it at last.
#pragma once
#include "common/warp_barrier.cuh"
#include "common/pipeline/chunks.cuh"
#include "common/pipeline/turn.cuh"

namespace replay {

static_assert(CHUNK_BUFFERS >= 2, "a chunk is brought while another is consumed");

// Where a chunk's description may stand: it is read in vectors, which must not touch what others write before it.
__device__ constexpr int whole_vectors(int bytes) { return (bytes + 15) / 16 * 16; }

// One chunk buffer, by its address in either form; a recurrence's ChunkBuffer says what stands in it, the chunk's
// description at CHUNK_OFFSET.
template <int CHUNK_OFFSET>
struct BufferAddress {
  unsigned char* base;
  uint32_t address;

  template <typename T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  __device__ Chunk& chunk() const { return *at<Chunk>(CHUNK_OFFSET); }
};

// STAGE_WARPS warps consume each stage; Buffer is a BufferAddress. FURTHER barriers of each buffer count the warps of a
// team.
template <typename Buffer, int STAGE_BYTES, int STAGE_WARPS, int LOADERS, int FURTHER = 0>
struct PipelineMemory {
  unsigned char* base;
  uint32_t address;

  static constexpr int BUFFERS = NUM_STAGES * STAGE_BYTES;
  static constexpr int BARRIERS = BUFFERS + CHUNK_BUFFERS * Buffer::BYTES;
  static constexpr int NUM_BARRIERS = 2 * NUM_STAGES + (3 + LOADERS + FURTHER) * CHUNK_BUFFERS;
  static constexpr int BYTES = (BARRIERS + 8 * NUM_BARRIERS + 15) / 16 * 16;
  static_assert(BYTES == DYNAMIC_SHARED_BYTES, "the shape of the pipeline counts shared memory differently");

  __device__ explicit PipelineMemory(void* memory)
      : base(static_cast<unsigned char*>(memory)), address(ptx::shared_address(memory)) {}

  __device__ Buffer buffer(int index) const {
    const int offset = BUFFERS + index * Buffer::BYTES;
    return {base + offset, address + offset};
  }
  __device__ uint32_t barrier(int index) const { return address + BARRIERS + 8 * index; }
  __device__ uint32_t is_stage_full(int stage) const { return barrier(stage); }
  __device__ uint32_t is_stage_free(int stage) const { return barrier(NUM_STAGES + stage); }
  // The description of the chunk is there; its weights are; everybody is through with it; what a loader brings is
  // there. Of those who free it some must have waited for each loader: none may fall a chunk buffer's turn behind.
  __device__ uint32_t is_chunk_known(int buffer) const { return chunk_barrier(0, buffer); }
  __device__ uint32_t is_chunk_weighed(int buffer) const { return chunk_barrier(1, buffer); }
  __device__ uint32_t is_chunk_free(int buffer) const { return chunk_barrier(2, buffer); }
  __device__ uint32_t is_loaded(int loader, int buffer) const { return chunk_barrier(3 + loader, buffer); }
  __device__ uint32_t further_barrier(int kind, int buffer) const { return chunk_barrier(3 + LOADERS + kind, buffer); }

  // By one thread, of warp 0.
  __device__ void init_barriers() const {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      ptx::barrier_init(is_stage_full(stage), 1);
      init_for_warps(is_stage_free(stage), STAGE_WARPS);
    }
    for (int buffer = 0; buffer < CHUNK_BUFFERS; ++buffer) {
      ptx::barrier_init(is_chunk_known(buffer), 1);
      // Each lane of a loader warp when its copies have come.
      for (int loader = 0; loader < LOADERS; ++loader) ptx::barrier_init(is_loaded(loader, buffer), WARP_SIZE);
      for (int kind = 0; kind < FURTHER; ++kind) init_for_warps(further_barrier(kind, buffer), TEAM_WARPS);
      init_for_warps(is_chunk_weighed(buffer), TEAM_WARPS);
      init_for_warps(is_chunk_free(buffer), NUM_CONSUMERS + TEAM_WARPS);
    }
    ptx::fence_barrier_init();
  }

  // Wait, whole warps, until the barriers are initialised: as late as can be, for that takes a while. But for warp 0
  // nobody waits for the producer's warp, the last one, which comes late from its guess.
  __device__ void wait_for_barriers() const {
    constexpr int LAST_WARP = BLOCK_THREADS / WARP_SIZE - 1;
    const int warp = threadIdx.x / WARP_SIZE;
    if (warp != LAST_WARP) ptx::meet(1, BLOCK_THREADS - WARP_SIZE);
    if (warp == 0 || warp == LAST_WARP) ptx::meet(2, 2 * WARP_SIZE);
  }

 private:
  __device__ uint32_t chunk_barrier(int kind, int buffer) const {
    return barrier(2 * NUM_STAGES + kind * CHUNK_BUFFERS + buffer);
  }
};

}  // namespace replay
