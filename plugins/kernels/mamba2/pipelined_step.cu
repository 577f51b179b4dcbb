// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, each a pipeline.
//
// A loader warp takes chunks of work for all. A producer thread brings their state tiles to shared memory, loader warps
// their token rows; the coefficient warps turn dt, B and C into the weights of the token rows and append the window to
// the rings; the consumer warps multiply, fold and write outputs. plugins/pipeline_shape.py chooses the numbers, and
// says which shapes this kernel is for; the launch says which layouts. Tensors: params.h, here with x, B and C in
// 16-byte pieces and the heads of x as neighbours. Numbers are as exact as in step.cu, to about 2^-17 of a weight; sums
// are fp32.
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/coefficients.cuh"
#include "mamba2/pipeline/loader.cuh"
#include "mamba2/pipeline/outputs.cuh"
#include "mamba2/pipeline/producer.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_mamba2_pipelined_step(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  extern __shared__ __align__(128) Vector16 shared_memory[];
  const PipelineShared shared(shared_memory);
  const int warp = threadIdx.x / WARP_SIZE, loader = warp - (NUM_CONSUMERS + NUM_WEIGHERS);
  const bool is_producer = loader == NUM_LOADERS && threadIdx.x % WARP_SIZE == 0;
  const HeadPlan plan(params);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  // Nobody else waits for it.
  if (loader == NUM_LOADERS) prefetch_first_chunk(params, plan);
  wait_for_previous();
  if (warp < NUM_CONSUMERS) {
    consume(params, shared, warp);
  } else if (loader < 0) {
    weigh(params, shared, warp - NUM_CONSUMERS);
  } else if (loader < NUM_LOADERS) {
    load(params, shared, plan, static_cast<Loader>(loader));
  } else if (is_producer) {
    produce(params, shared);
  }
}
