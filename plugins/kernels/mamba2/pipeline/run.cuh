// A thread block of the pipelined step: who does what.
//
// A loader warp takes chunks of work for all. A producer thread brings their state tiles to shared memory, loader warps
// their token rows; the coefficient warps convolve x, B and C where these come raw, turn dt, B and C into the weights of
// the token rows and append the window to the rings; the consumer warps multiply, fold and write outputs.
// plugins/specializations/mamba2_pipeline.py chooses the numbers, and says which shapes this is for; the launch says which layouts.
#pragma once
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/coefficients.cuh"
#include "mamba2/pipeline/loader.cuh"
#include "mamba2/pipeline/outputs.cuh"
#include "mamba2/pipeline/producer.cuh"

namespace replay {

// Of a step whose x, B and C come convolved.
struct NoConvolution {
  __device__ void prefetch(const Chunk&) const {}
  __device__ void prefetch_history(const Chunk&, Loader) const {}

  struct Part {
    __device__ Part(const NoConvolution&, const Chunk&, int) {}
    __device__ void make_B_and_C(const PipelineShared&, const Turn<CHUNK_BUFFERS>&) const {}
    __device__ void make_x(const PipelineShared&, const Turn<CHUNK_BUFFERS>&) const {}
  };
};

template <typename Convolution>
__device__ inline void run_pipeline(const Mamba2Params& params, const Convolution& convolution, void* shared_memory) {
  const PipelineShared shared(shared_memory);
  const int warp = threadIdx.x / WARP_SIZE, loader = warp - (NUM_CONSUMERS + NUM_WEIGHERS);
  const bool is_producer = loader == NUM_LOADERS && threadIdx.x % WARP_SIZE == 0;
  const HeadPlan plan(params);
  if (threadIdx.x == 0) shared.init_barriers();
  if (loader == NUM_LOADERS) prefetch_first_chunk(params, plan, convolution);
  wait_for_previous();
  if (loader != TIMES_LOADER) shared.wait_for_barriers();  // that one waits by itself
  if (warp < NUM_CONSUMERS) {
    consume(params, shared, warp);
  } else if (loader < 0) {
    weigh(params, convolution, shared, warp - NUM_CONSUMERS);
  } else if (loader < NUM_LOADERS) {
    load(params, convolution, shared, plan, static_cast<Loader>(loader));
  } else if (is_producer) {
    produce(params, shared);
  }
}

}  // namespace replay
