// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens: one thread block per (slice of a value head, row).
//
// Reads the checkpoint once (not at all when f = 0), the pending ring rows and the window; writes the window's ring
// rows and outputs, and, when c - f + T > W, the checkpoint with the pending rows folded in. Tensors: params.h.
// Arithmetic is fp32; k ring rows are the inputs bit by bit, u and g are fp32; outputs and checkpoint are rounded once.
// Not done here: no token is committed, and no length is written.
#include "common/dependent_launch.cuh"
#include "gated_delta_net/window.cuh"

static_assert(replay::StepShared::BYTES == DYNAMIC_SHARED_BYTES, "the specialization counts shared memory differently");

namespace replay {

// S_c = exp(sum of g) S_f + sum over pending j of weight_j k_j u_j^T, rounded once.
__device__ inline void fold_pending(const Tensors& tensors, const StepShared& shared, TilePosition position,
                                    StateTile& tile) {
  scale_tile(tile, shared.fold_weights[0]);
  for (int i = 0; i < tensors.row.pending; ++i) {
    const ColumnValues u = load_columns(shared.u + i * U_STRIDE, position);
    add_outer_product(tile, position, shared.fold_weights[1 + i], shared.keys + i * KEY_DIM, u);
  }
  store_tile(tensors.state(), position, tile);
}

}  // namespace replay

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_gated_delta_net_step(const __grid_constant__ GatedDeltaNetParams params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ Vector16 shared_memory[];
  const StepShared shared(shared_memory);
  const Row row(params, HISTORY);
  const Tensors tensors{params, row};
  const TilePosition position;

  zero_unused_outputs(tensors);
  const bool is_flush = needs_flush(row.past, row.checkpoint, HISTORY, MAX_DRAFT_LEN);
  if (row.slot < 0 || (row.num_tokens == 0 && !is_flush)) return;

  StateTile tile;
  load_tile(tensors.state(), row.checkpoint == 0, position, tile);
  stage_inputs(tensors, shared);
  ptx::wait_for_copies();
  __syncthreads();  // every thread has staged its part

  append_window(tensors, shared);
  const int first = is_flush ? row.pending : 0;
  compute_window_weights(row, shared, first);
  if (is_flush) compute_fold_weights(row, shared);
  __syncthreads();  // every warp has written its weights

  if (is_flush) fold_pending(tensors, shared, position, tile);
  compute_window(tensors, shared, position, tile, first);
}
