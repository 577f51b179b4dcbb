// Run a window of any length: one thread block per (head, row of the step) scans it with the head's state in registers.
//
// Reads the checkpoint (not at all when f = 0), the pending ring rows and the window; writes the outputs and, once, the
// checkpoint of position c + n. Ring rows are not written: afterwards nothing is pending. Tensors: params.h.
// Arithmetic is fp32, token by token; outputs and checkpoint are rounded once.
#include "common/dependent_launch.cuh"
#include "mamba2/scan.cuh"

static_assert(2 * replay::ChunkShared::BYTES == DYNAMIC_SHARED_BYTES, "specializations/mamba2.py counts shared memory differently");
static_assert(CHUNK_SIZE <= BLOCK_THREADS, "every token of a chunk has a thread for its dt");

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    replay_mamba2_prefill(const __grid_constant__ Mamba2Params params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ Vector16 shared_memory[];
  const Row row(params, params.ring_rows, blockIdx.x);
  const Tensors tensors{params, row};
  const TilePosition position;

  zero_unused_outputs(tensors);
  const int num_total = row.pending + row.num_tokens;
  if (row.slot < 0 || num_total == 0) return;

  StateTile tile;
  load_tile(tensors.state(), row.checkpoint == 0, position, tile);
  Chunk chunk{0, min(CHUNK_SIZE, num_total)};
  int buffer = 0;
  stage_chunk(tensors, chunk, ChunkShared(shared_memory, buffer));
  store_dt(tensors, chunk, load_dt(tensors, chunk), ChunkShared(shared_memory, buffer));
  StateValues state;
  unpack_tile(tile, state);
  const float D = params.D[row.head];
  while (chunk.count > 0) {
    ptx::wait_for_copies();
    __syncthreads();  // this chunk is staged, and nobody reads the other buffer any more
    const Chunk next{chunk.first + chunk.count, min(CHUNK_SIZE, num_total - chunk.first - chunk.count)};
    const ChunkShared next_shared(shared_memory, 1 - buffer);
    stage_chunk(tensors, next, next_shared);
    const float next_dt = load_dt(tensors, next);
    scan_chunk(tensors, chunk, ChunkShared(shared_memory, buffer), position, D, state);
    store_dt(tensors, next, next_dt, next_shared);
    chunk = next;
    buffer = 1 - buffer;
  }
  pack_tile(state, tile);
  store_tile(tensors.state(), position, tile);
}
