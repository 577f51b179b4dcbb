// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, each a pipeline.
//
// A producer thread brings state tiles to shared memory and a loader warp token rows; the coefficient warps turn dt, B
// and C into the weights of the token rows and append the window to the rings; the consumer warps multiply, fold and
// write outputs. plugins/pipeline_shape.py chooses the numbers, and says which shapes this kernel is for; the launch
// says which layouts. Tensors: params.h, here with x, B and C in 16-byte pieces and the heads of x as neighbours.
// Outputs: a state in fp32 is rounded to tf32 where C multiplies it, sums are fp32; the checkpoint is as in step.cu.
#include "common/dependent_launch.cuh"
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/coefficients.cuh"
#include "mamba2/pipeline/loader.cuh"
#include "mamba2/pipeline/outputs.cuh"
#include "mamba2/pipeline/producer.cuh"

namespace replay {

// Before the kernel before this one has ended: bring to the cache what is needed first.
//
// Beside a step that is short the next one may start at once, on the other half of each multiprocessor: it guesses its
// share and prefetches it. Beside a long one that would be in the cache too early; the next kernel then starts when the
// last tiles are under way, and has no time to guess.
__device__ inline void prepare(const Mamba2Params& params, const PipelineShared& shared, bool is_loader,
                               bool is_producer) {
  if constexpr (!IS_EARLY_START) {
    prefetch_lengths(params);
    return;
  }
  const ChunkWalk<Reading::GUESS> walk(params, find_share<Reading::GUESS>(params, shared));
  if (is_producer) prefetch_tiles(params, walk);
  if (is_loader) prefetch_rows(params, walk.rest_of_row());
}

}  // namespace replay

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_mamba2_pipelined_step(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const PipelineShared shared(shared_memory);
  const int warp = threadIdx.x / WARP_SIZE;
  constexpr int LOADER = NUM_CONSUMERS + NUM_WEIGHERS, PRODUCER = LOADER + 1;
  const bool is_producer = threadIdx.x == PRODUCER * WARP_SIZE;
  if (threadIdx.x == 0) shared.init_barriers();
  prepare(params, shared, warp == LOADER, is_producer);
  wait_for_previous();
  if constexpr (IS_EARLY_START) let_next_start();
  __syncthreads();
  const Share share = find_share<Reading::FINAL>(params, shared);

  if (warp < NUM_CONSUMERS) {
    consume(params, shared, warp);
  } else if (warp < LOADER) {
    weigh(params, shared, warp - NUM_CONSUMERS);
  } else if (warp == LOADER) {
    load_chunks(params, share, shared);
  } else if (is_producer) {
    produce(params, share, shared);
  }
}
