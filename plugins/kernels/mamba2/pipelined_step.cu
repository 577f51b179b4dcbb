// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens, as step.cu does, for GPUs with bulk copies and
// tensor cores that are as fast as their memory needs: persistent thread blocks, one an SM, each a pipeline.
//
// One producer warp brings chunks of work to shared memory; the coefficient warps turn dt, B and C into the weights of
// the token rows and append the window to the rings; the consumer warps multiply, fold and write outputs.
// plugins/pipeline_shape.py chooses the numbers, and says which shapes this kernel is for; the launch says which
// layouts. Tensors: params.h, here with x, B and C in 16-byte pieces and the heads of x as neighbours.
// Outputs: a state in fp32 is rounded to tf32 where C multiplies it, sums are fp32; the checkpoint is as in step.cu.
#include "mamba2/pipeline/coefficients.cuh"
#include "mamba2/pipeline/outputs.cuh"
#include "mamba2/pipeline/producer.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    replay_mamba2_pipelined_step(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  const PipelineShared shared(shared_memory);
  const Schedule schedule(params);
  const int warp = threadIdx.x / WARP_SIZE;
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (warp < NUM_CONSUMERS) {
    consume(params, schedule, shared, warp);
  } else if (warp < NUM_CONSUMERS + COEFFICIENT_WARPS) {
    weigh(params, schedule, shared, warp - NUM_CONSUMERS);
  } else {
    produce(params, schedule, shared);
  }
}
