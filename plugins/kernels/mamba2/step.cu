// Decode or verify one window of at most 1 + MAX_DRAFT_LEN tokens: one thread block per (head, row of the step).
//
// Reads the checkpoint once (not at all when f = 0), the pending ring rows and the window; writes the window's ring
// rows and outputs, and, when c - f + T > W, the checkpoint with the pending rows folded in. Tensors: params.h.
// Arithmetic is fp32; x and B ring rows are the inputs bit by bit; outputs and checkpoint are rounded once.
// Not done here: no token is committed, and no length is written.
#include "common/dependent_launch.cuh"
#include "mamba2/fold.cuh"
#include "mamba2/weights.cuh"
#include "mamba2/window.cuh"

static_assert(replay::StepShared::BYTES == DYNAMIC_SHARED_BYTES, "specializations/mamba2.py counts shared memory differently");

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    replay_mamba2_step(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ Vector16 shared_memory[];
  const StepShared shared(shared_memory);
  const Row row(params, HISTORY, blockIdx.x);
  const Tensors tensors{params, row};
  const TilePosition position;

  zero_unused_outputs(tensors);
  const bool is_flush = needs_flush(row.past, row.checkpoint, HISTORY, MAX_DRAFT_LEN);
  if (row.slot < 0 || (row.num_tokens == 0 && !is_flush)) return;

  // All loads are under way before the first is waited for: the checkpoint to registers, the rest to shared memory.
  const float A = params.A[row.head], D = params.D[row.head];
  StateTile tile;
  load_tile(tensors.state(), row.checkpoint == 0, position, tile);
  stage_inputs(tensors, shared);
  ptx::wait_for_copies();
  __syncthreads();  // every thread has staged its part

  append_window(tensors, shared);
  const int first = is_flush ? row.pending : 0;
  compute_window_weights(row, shared, first, A, D);
  if (is_flush) compute_fold_weights(row, shared, A);
  __syncthreads();  // every warp has written its weights

  if (is_flush) {
    fold_pending(row, shared, position, tile);
    store_tile(tensors.state(), position, tile);
  }
  compute_window(tensors, shared, position, tile, first);
}
