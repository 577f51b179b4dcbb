// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, each a pipeline.
//
// A loader warp takes chunks of work for all. A producer thread brings their state tiles to shared memory, loader warps
// their token rows; the coefficient warps turn gates, keys and queries into weights and append k and g to the rings; the
// consumer warps fold, find u and outputs, and append u. plugins/specializations/gated_delta_net_pipeline.py chooses the numbers,
// and says which shapes this kernel is for; the launch says which layouts. Tensors: params.h, here with q, k and v in
// 16-byte pieces and the heads of v as neighbours. Numbers are as exact as in step.cu, to about 2^-20 of what a key
// reads; sums are fp32.
#include "common/dependent_launch.cuh"
#include "gated_delta_net/pipeline/coefficients.cuh"
#include "gated_delta_net/pipeline/loader.cuh"
#include "gated_delta_net/pipeline/outputs.cuh"
#include "gated_delta_net/pipeline/producer.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_gated_delta_net_pipelined_step(const __grid_constant__ GatedDeltaNetParams params) {
  using namespace replay;
  extern __shared__ __align__(128) Vector16 shared_memory[];
  const PipelineShared shared(shared_memory);
  const int warp = threadIdx.x / WARP_SIZE, loader = warp - (NUM_CONSUMERS + NUM_WEIGHERS);
  const bool is_producer = loader == NUM_LOADERS && threadIdx.x % WARP_SIZE == 0;
  const HeadPlan plan(params);
  if (threadIdx.x == 0) shared.init_barriers();
  if (loader == NUM_LOADERS) prefetch_first_chunk(params, plan);
  wait_for_previous();
  if (loader != GATES_LOADER) shared.wait_for_barriers();  // that one waits by itself
  if (warp < NUM_CONSUMERS) {
    consume(params, shared);
  } else if (loader < 0) {
    weigh(params, shared, warp - NUM_CONSUMERS);
  } else if (loader < NUM_LOADERS) {
    load(params, shared, plan, static_cast<Loader>(loader));
  } else if (is_producer) {
    produce(params, shared);
  }
}
