// Run a window of any length, as prefill.cu does, by chunks of tokens on tensor cores: one thread block per (slice of a
// head's rows, row of the step) takes the chunks one after another with its part of the state in registers.
//
// Within a chunk all tokens are computed at once: outputs from the state before the chunk and from the weighted x of
// the chunk's own tokens, then the state behind it (mamba2/chunked/*). The next chunk is copied meanwhile.
// plugins/specializations/mamba2_chunks.py chooses the numbers and says which shapes this kernel is for. Tensors: params.h.
// Operands are split into bfloat16 parts where they would lose bits that count, sums are fp32; outputs and checkpoint
// are rounded once. Ring rows are not written: afterwards nothing is pending.
#include "common/dependent_launch.cuh"
#include "mamba2/chunked/outputs.cuh"

// Two blocks on an SM are worth it where it holds the second one and the registers suffice: on 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int MIN_BLOCKS_OF_SM = 1;
#else
constexpr int MIN_BLOCKS_OF_SM = MIN_BLOCKS;
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS_OF_SM)
    replay_mamba2_chunked_prefill(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ __align__(256) Vector16 shared_memory[];
  const Row row(params, params.ring_rows, blockIdx.x / HEAD_SLICES);
  const int first_channel = blockIdx.x % HEAD_SLICES * SLICE_ROWS;
  const Tensors tensors{params, row};
  const WarpPart part;

  zero_unused_outputs<SLICE_ROWS>(tensors, first_channel);
  const int num_total = row.pending + row.num_tokens;
  if (row.slot < 0 || num_total == 0) return;

  // The last warp has the fewest score tiles.
  const bool is_timekeeper = threadIdx.x / WARP_SIZE == NUM_WARPS - 1;
  const float A = params.A[row.head], D = params.D[row.head], dt_bias = params.dt_bias[row.head];
  {
    const ChunkShared shared(shared_memory, 0);
    const Chunk chunk(row, 0);
    stage_x_and_B(tensors, first_channel, chunk, shared);
    stage_C(tensors, chunk, shared);
    if (is_timekeeper) store_decays(chunk, load_times(tensors, chunk), A, dt_bias, shared.decays());
  }
  LaneTimes next_times;
  if (is_timekeeper) next_times = load_times(tensors, Chunk(row, 1));
  WarpState state;
  load_state(tensors.state() + first_channel * D_STATE, row.checkpoint == 0, part, state);

#pragma unroll 1
  for (int index = 0; index * CHUNK_SIZE < num_total; ++index) {
    const ChunkShared shared(shared_memory, index % 2), next_shared(shared_memory, 1 - index % 2);
    const Chunk chunk(row, index), next(row, index + 1);
    ptx::wait_for_copies();
    __syncthreads();  // this chunk is staged, and nobody reads the other buffers any more
    stage_x_and_B(tensors, first_channel, next, next_shared);
    if (is_timekeeper) store_decays(next, next_times, A, dt_bias, next_shared.decays());
    weigh_tokens(shared, part, D);
    float sums[CHUNK_TILES][2][4] = {};
    multiply_state(shared, part, state, sums);
    give_partials(shared, part, sums);
    __syncthreads();  // weights and partial sums are there, and nobody reads C any more
    stage_C(tensors, next, shared);
    if (is_timekeeper) next_times = load_times(tensors, Chunk(row, index + 2));
    finish_outputs(tensors, first_channel, chunk, shared, part, sums);
    fold_chunk(shared, part, state);
  }
  store_state(tensors.state() + first_channel * D_STATE, part, state);
}
