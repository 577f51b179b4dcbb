// Run a window of any length, as prefill.cu does, by chunks of tokens on tensor cores: one thread block per (slice of a
// head's rows, row of the step) takes the chunks one after another with its part of the state in registers.
//
// One warp brings the chunks and makes their decays (mamba2/chunked/stage.cuh, decays.cuh), some chunks ahead. State
// warps have the state: they show it as it is before a chunk, and fold the chunk (state.cuh). Output warps have the
// tokens: what the shown state says, and the weighted x of the chunk's own tokens (outputs.cuh, scores.cuh). So only
// the fold is one chain from chunk to chunk. plugins/specializations/mamba2_chunks.py chooses the numbers and says
// which shapes this kernel is for. Tensors: params.h. Operands are split into bfloat16 parts where they would lose bits
// that count, sums are fp32; outputs and checkpoint are rounded once. Ring rows are not written: afterwards nothing is
// pending.
#include "common/dependent_launch.cuh"
#include "mamba2/chunked/outputs.cuh"
#include "mamba2/chunked/state.cuh"

namespace replay {

// The last warp: bring one chunk after the other.
__device__ inline void bring_chunks(const Tensors& tensors, int first_channel, const ChunkShared& shared) {
  const Row& row = tensors.row;
  const float A = tensors.params.A[row.head], dt_bias = tensors.params.dt_bias[row.head];
  LaneTimes times = load_times(tensors, Chunk(row, 0));
  ChunkLoader loader(tensors, first_channel);
#pragma unroll 1
  for (ChunkPlace place; place.first() < row.pending + row.num_tokens; place.advance()) {
    const Chunk chunk(row, place.first());
    const Stage stage = shared.stage(place.stage());
    const LaneTimes next_times = load_times(tensors, Chunk(row, place.first() + CHUNK_SIZE));
    ptx::barrier_wait(shared.is_free(place.stage()), place.parity() ^ 1);
    loader.load(chunk, stage);
    ptx::barrier_arrive_after_copies(shared.is_full(place.stage()));
    store_decays(chunk, times, A, dt_bias, stage.decays(), shared.chunk_decay(place.stage()));
    arrive_as_warp(shared.is_full(place.stage()));
    times = next_times;
    loader.advance();
  }
}

// A state warp: all chunks on its part of the state.
__device__ inline void scan(const Tensors& tensors, int first_channel, const ChunkShared& shared) {
  WarpState state;
  const STATE_TYPE* old_slice = tensors.state() + first_channel * D_STATE;
  load_state(old_slice, tensors.row.checkpoint == 0, StatePart(fresh(threadIdx.x)), state);
#pragma unroll 1
  for (ChunkPlace place; place.first() < shared.values().num_total; place.advance()) {
    const StatePart part(fresh(threadIdx.x));
    ptx::barrier_wait(shared.is_taken(), place.snapshot_parity() ^ 1);
    give_state(shared, part, state);
    arrive_as_warp(shared.is_given());
    ptx::barrier_wait(shared.is_full(place.stage()), place.parity());
    fold_chunk(shared.stage(place.stage()), shared.chunk_decay(place.stage()), part, state);
    place.index = fresh(place.index);
    arrive_as_warp(shared.is_free(place.stage()));
  }
  // All anew: not even the slot has a register of its own while products are under way.
  const int channel = first_channel_of(fresh(blockIdx.x));
  Row row = tensors.row;
  row.slot = tensors.params.slot_ids[row.index];
  STATE_TYPE* slice = Tensors{tensors.params, row}.state() + channel * D_STATE;
  store_state(slice, StatePart(fresh(threadIdx.x)), state);
}

// An output warp. Late tiles have more tokens before them, so it takes turns: its tile from the start, then from the
// end.
__device__ inline void write_outputs(const Tensors& tensors, const ChunkShared& shared) {
#pragma unroll 1
  for (ChunkPlace place; place.first() < shared.values().num_total; place.advance()) {
    const uint32_t thread = fresh(threadIdx.x);
    const LanePlace lane_place(thread);
    const Stage stage = shared.stage(place.stage());
    const int warp = thread / WARP_SIZE - NUM_STATE_WARPS;
    const int token_tile = place.index % 2 ? CHUNK_TILES - 1 - warp : warp;
    ptx::barrier_wait(shared.is_full(place.stage()), place.parity());
    TileOutputs outputs;
    ptx::barrier_wait(shared.is_given(), place.snapshot_parity());
    multiply_state(shared, stage, lane_place, token_tile, outputs);
    arrive_as_warp(shared.is_taken());
    add_tokens(stage, lane_place, TokenC(stage, lane_place, token_tile), token_tile, shared.values().D, outputs);
    place.index = fresh(place.index);
    arrive_as_warp(shared.is_free(place.stage()));
    const uint32_t block = fresh(blockIdx.x);
    Row row = tensors.row;
    row.index = fresh(blockIdx.y);
    row.head = block / HEAD_SLICES;
    const BlockValues& values = shared.values();
    const int first_token = place.first() - values.num_ring;
    ACTIVATION_TYPE* y = Tensors{tensors.params, row}.y(first_token) + first_channel_of(block);
    store_outputs(y, lane_place, token_tile, -first_token, values.num_total - place.first(), outputs);
  }
}

}  // namespace replay

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
  extern __shared__ __align__(512) Vector16 shared_memory[];
  const ChunkShared shared(shared_memory);
  const Row row(params, params.ring_rows, blockIdx.x / HEAD_SLICES);
  const int first_channel = first_channel_of(blockIdx.x);
  const Tensors tensors{params, row};

  const float D = params.D[row.head];  // under way while outputs are cleared
  zero_unused_outputs<SLICE_ROWS>(tensors, first_channel);
  if (row.slot < 0 || row.pending + row.num_tokens == 0) return;
  if (threadIdx.x == 0) {
    shared.values() = {row.pending, row.pending + row.num_tokens, D};
    shared.init_barriers();
  }
  __syncthreads();  // the barriers are there
  const int warp = threadIdx.x / WARP_SIZE;
  if (warp < NUM_STATE_WARPS) {
    scan(tensors, first_channel, shared);
  } else if (warp < NUM_STATE_WARPS + NUM_OUTPUT_WARPS) {
    write_outputs(tensors, shared);
  } else {
    bring_chunks(tensors, first_channel, shared);
  }
}
