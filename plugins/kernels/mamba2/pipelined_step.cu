// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, each a pipeline.
//
// A producer thread brings state tiles to shared memory and loader warps token rows; the coefficient warps turn dt, B
// and C into the weights of the token rows and append the window to the rings; the consumer warps multiply, fold and
// write outputs. plugins/pipeline_shape.py chooses the numbers, and says which shapes this kernel is for; the launch
// says which layouts. Tensors: params.h, here with x, B and C in 16-byte pieces and the heads of x as neighbours.
// Numbers are as exact as in step.cu, to about 2^-17 of a weight; sums are fp32.
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/coefficients.cuh"
#include "mamba2/pipeline/loader.cuh"
#include "mamba2/pipeline/outputs.cuh"
#include "mamba2/pipeline/producer.cuh"

namespace replay {

// While the kernel before this one may still run: bring to the cache what is needed first. Of many rows that is worth
// the time that the guess takes.
__device__ inline void prepare(const Mamba2Params& params, const PipelineShared& shared, int loader,
                               bool is_producer) {
  if (params.num_rows < GUESS_ROWS) {
    prefetch_lengths(params);
    return;
  }
  const ChunkWalk<Reading::GUESS> walk(params, find_share<Reading::GUESS>(params, shared));
  if (is_producer) prefetch_tiles(params, walk);
  if (loader >= 0 && loader < NUM_LOADERS) prefetch_rows(params, walk.rest_of_row(), loader);
}

}  // namespace replay

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_mamba2_pipelined_step(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  extern __shared__ __align__(128) Vector16 shared_memory[];
  const PipelineShared shared(shared_memory);
  const int warp = threadIdx.x / WARP_SIZE, loader = warp - (NUM_CONSUMERS + NUM_WEIGHERS);
  const bool is_producer = loader == NUM_LOADERS && threadIdx.x % WARP_SIZE == 0;
  if (threadIdx.x == 0) shared.init_barriers();
  prepare(params, shared, loader, is_producer);
  wait_for_previous();
  __syncthreads();
  const Share share = find_share<Reading::FINAL>(params, shared);

  if (warp < NUM_CONSUMERS) {
    consume(params, shared, warp);
  } else if (loader < 0) {
    weigh(params, shared, warp - NUM_CONSUMERS);
  } else if (loader < NUM_LOADERS) {
    load_chunks(params, share, shared, loader);
  } else if (is_producer) {
    produce(params, share, shared);
  }
}
