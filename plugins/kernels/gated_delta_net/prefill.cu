// Run a window of any length: one thread block per (slice of a value head, row of the step), its state in registers.
//
// Reads the checkpoint (not at all when f = 0), the pending ring rows and the window; writes the outputs and, once, the
// checkpoint of position c + n. Ring rows are not written: afterwards nothing is pending. Tensors: params.h.
// Arithmetic is fp32, token by token; outputs and checkpoint are rounded once.
//
// The tokens are the pending rows of the ring and then the window, one sequence; pending rows have their u already, and
// no output. Shared memory, fp32: keys, queries [CHUNK_SIZE, KEY_DIM]   values [CHUNK_SIZE, U_STRIDE], u of a pending
// row and v of a window token   decay, beta [CHUNK_SIZE]
#include "common/dependent_launch.cuh"
#include "gated_delta_net/unit_rows.cuh"

namespace replay {

struct ChunkShared {
  float* keys;
  float* queries;
  float* values;
  float* decay;
  float* beta;

  static constexpr int BYTES = static_cast<int>(sizeof(float)) * CHUNK_SIZE * (2 * KEY_DIM + U_STRIDE + 2);

  __device__ explicit ChunkShared(void* base)
      : keys(static_cast<float*>(base)),
        queries(keys + CHUNK_SIZE * KEY_DIM),
        values(queries + CHUNK_SIZE * KEY_DIM),
        decay(values + CHUNK_SIZE * U_STRIDE),
        beta(decay + CHUNK_SIZE) {}
};
static_assert(ChunkShared::BYTES == DYNAMIC_SHARED_BYTES, "the specialization counts shared memory differently");

// Bring tokens first .. first + count - 1 to shared memory; a barrier completes it.
__device__ inline void stage_chunk(const Tensors& tensors, int first, int count, const ChunkShared& shared) {
  const int pending = tensors.row.pending, base = tensors.row.checkpoint + first;
  const int num_ring = max(0, min(count, pending - first)), num_window = count - num_ring;
  const int token = first + num_ring - pending;
  stage_unit_rows(shared.keys, num_ring, 1.0f, [&](int i) { return tensors.k_ring(base + i); });
  stage_unit_rows(shared.keys + num_ring * KEY_DIM, num_window, 1.0f, [&](int i) { return tensors.k(token + i); });
  stage_unit_rows(shared.queries + num_ring * KEY_DIM, num_window, query_scale(),
                  [&](int i) { return tensors.q(token + i); });
#pragma unroll 1
  for (int i = threadIdx.x; i < count * SLICE; i += BLOCK_THREADS) {
    const int line = i / SLICE, column = i % SLICE;
    shared.values[line * U_STRIDE + column] = line < num_ring ? tensors.u_ring(base + line)[column]
                                                              : to_float(tensors.v(token + line - num_ring)[column]);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += BLOCK_THREADS) {
    shared.decay[i] = expf(i < num_ring ? *tensors.g_ring(base + i) : tensors.g(token + i - num_ring));
    if (i >= num_ring) shared.beta[i] = tensors.beta(token + i - num_ring);
  }
}

// The recurrence as it is written, by each warp for its columns.
__device__ inline void scan_chunk(const Tensors& tensors, int first, int count, const ChunkShared& shared,
                                  TilePosition position, StateTile& tile) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int token = first + i - tensors.row.pending;
    const float* key = shared.keys + i * KEY_DIM;
    ColumnValues u = load_columns(shared.values + i * U_STRIDE, position);
    scale_tile(tile, shared.decay[i]);
    if (token >= 0) {
      ColumnValues predicted = read_share(tile, position, key);
      sum_over_rows(predicted);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) u.values[c] = shared.beta[i] * (u.values[c] - predicted.values[c]);
    }
    add_outer_product(tile, position, 1.0f, key, u);
    if (token < 0) continue;
    ColumnValues output = read_share(tile, position, shared.queries + i * KEY_DIM);
    sum_over_rows(output);
    store_columns(tensors.o(token), position, output);
  }
}

}  // namespace replay

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    replay_gated_delta_net_prefill(const __grid_constant__ GatedDeltaNetParams params) {
  using namespace replay;
  wait_for_previous();
  let_next_start();
  extern __shared__ Vector16 shared_memory[];
  const ChunkShared shared(shared_memory);
  const Row row(params, params.ring_rows);
  const Tensors tensors{params, row};
  const TilePosition position;

  zero_unused_outputs(tensors);
  const int num_total = row.pending + row.num_tokens;
  if (row.slot < 0 || num_total == 0) return;

  StateTile tile;
  load_tile(tensors.state(), row.checkpoint == 0, position, tile);
#pragma unroll 1
  for (int first = 0; first < num_total; first += CHUNK_SIZE) {
    const int count = min(CHUNK_SIZE, num_total - first);
    __syncthreads();  // nobody reads the chunk before any more
    stage_chunk(tensors, first, count, shared);
    __syncthreads();  // the chunk is staged
    scan_chunk(tensors, first, count, shared, position, tile);
  }
  store_tile(tensors.state(), position, tile);
}
