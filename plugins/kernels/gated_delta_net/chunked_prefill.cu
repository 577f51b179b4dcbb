// Run a window of any length, as prefill.cu does, by chunks of tokens on tensor cores: one thread block per (slice of a
// value head, row of the step) takes the chunks one after another with its part of the state in registers.
//
// Within a chunk the recurrence is one triangular system: its inverse gives all u of the chunk from what the state before
// it says of the keys; with u, outputs and the state behind the chunk are plain sums. Solver warps prepare the inverse
// and all else that does not depend on the state, some chunks ahead (chunked/solve.cuh); state warps follow, each with
// its columns (chunked/state.cuh, updates.cuh, outputs.cuh). plugins/specializations/gated_delta_net_chunks.py chooses the numbers
// and says which shapes this kernel is for. Tensors: params.h.
// What reaches the state is as exact as fp32, by operands in bfloat16 parts; outputs and checkpoint are rounded once.
// Ring rows are not written: afterwards nothing is pending.
#include "common/dependent_launch.cuh"
#include "gated_delta_net/chunked/outputs.cuh"
#include "gated_delta_net/chunked/solve.cuh"

namespace replay {

// A state warp: all chunks on its part of the state.
__device__ inline void scan(const Tensors& tensors, const ChunkShared& shared) {
  uint32_t thread = threadIdx.x;
  const WarpPart part(thread);
  const Row& row = tensors.row;
  WarpState state;
  load_state(tensors.state(), row.checkpoint == 0, part, state);
  Place place;
#pragma unroll 1
  for (int first = 0; first < row.pending; first += CHUNK_SIZE, place.advance()) {
    const Stage stage = shared.stage(place.stage());
    ptx::barrier_wait(shared.is_solved(place.stage()), place.parity());
    TokenValues u;
    load_u(stage, part, u);
    fold_chunk(stage, part, u, state);
    arrive_as_warp(shared.is_free(place.stage()));
  }
  ACTIVATION_TYPE* o = tensors.o(0);
  bool is_solved = false;
#pragma unroll 1
  for (int left = row.num_tokens; left > 0; left -= CHUNK_SIZE) {
    const Stage stage = shared.stage(place.stage());
    if (!is_solved) {
      ptx::barrier_wait(shared.is_solved(place.stage()), place.parity());
    }
    TokenValues reads, query_reads, u;
    read_state(stage, part, state, reads, query_reads);
    OwnOutputs outputs = choose_tiles(part, query_reads, true);
    if (KEY_SPLITS == 2) exchange_reads(shared, part, reads, query_reads, outputs);
    FirstSpoilt first;
    solve_for_u(stage, part, reads, first, u);
    const TokenParts<2> finite_u(u);
    if (__builtin_expect(first.is_any, false)) first.put_back(part, 0, u.blocks);
    add_u(stage, part, finite_u, outputs);
    fold_chunk(stage, part, u, state);
    arrive_as_warp(shared.is_free(place.stage()));
    place.advance();
    is_solved = ptx::barrier_has_ended(shared.is_solved(place.stage()), place.parity());
    if (__builtin_expect(first.is_any, false)) {
      first.put_back(part, first_own_tile(part) * MMA_TILE, outputs.blocks);
    }
    store_outputs(o, part, left, outputs);
    o += CHUNK_SIZE * N_VALUE_HEADS * VALUE_DIM;
  }
  ptx::make_opaque(thread);  // addresses are computed anew: kept from the start they would lie on the stack
  store_state(tensors.state(), WarpPart(thread), state);
}

}  // namespace replay

// Two blocks on an SM are worth it where it holds the second one and the registers suffice: on 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int MIN_BLOCKS_OF_SM = 1;
#else
constexpr int MIN_BLOCKS_OF_SM = MIN_BLOCKS;
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS_OF_SM)
    replay_gated_delta_net_chunked_prefill(const __grid_constant__ GatedDeltaNetParams params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ __align__(256) Vector16 shared_memory[];
  const ChunkShared shared(shared_memory);
  const Row row(params, params.ring_rows);
  const Tensors tensors{params, row};

  zero_unused_outputs(tensors);
  if (row.slot < 0 || row.pending + row.num_tokens == 0) return;
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();  // the barriers are there
  const int solver = static_cast<int>(threadIdx.x) / WARP_SIZE - NUM_STATE_WARPS;
  if (solver >= 0) {
    solve(tensors, shared, solver);
  } else {
    scan(tensors, shared);
  }
}
