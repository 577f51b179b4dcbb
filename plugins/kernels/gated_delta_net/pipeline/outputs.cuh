// The consumer warps: per head, fold if it is due, what the window's keys and queries read of the state, and outputs.
#pragma once
#include "gated_delta_net/pipeline/fold.cuh"
#include "gated_delta_net/pipeline/window.cuh"

namespace replay {

// One lane's view of a tile: its columns of the rows of its part, in shared memory and in the pool.
struct TileRows {
  const unsigned char* staged;
  unsigned char* memory;

  __device__ TileRows(const ChunkTensors& tensors, const PipelineShared& shared, const HeadColumns& columns, int tile,
                      int stage) {
    const int q = threadIdx.x % 4, offset = columns.column * static_cast<int>(sizeof(STATE_TYPE));
    staged = shared.base + stage * STAGE_BYTES + q * PART_STRIDE + offset;
    const int row = columns.head * KEY_DIM + q * PART_ROWS + tile * TILE_ROWS;
    memory = reinterpret_cast<unsigned char*>(tensors.state()) + row * STATE_ROW_BYTES + offset;
  }
  __device__ StateVector load(int row) const {
    return *reinterpret_cast<const StateVector*>(staged + row * STATE_ROW_BYTES);
  }
  __device__ void store(int row, const StateVector& vector) const {
    ptx::store(reinterpret_cast<StateVector*>(memory + row * STATE_ROW_BYTES), vector);
  }
  __device__ void advance(int num_rows) {
    staged += num_rows * STATE_ROW_BYTES;
    memory += num_rows * STATE_ROW_BYTES;
  }
};

// One warp's place among the heads of its thread block.
struct ConsumerTurn {
  int head;                  // of the chunk
  Turn<GROUP_STAGES> stage;  // of the group's

  __device__ ConsumerTurn() : head(group()) {}

  __device__ static int group() { return static_cast<int>(threadIdx.x) / (GROUP_WARPS * WARP_SIZE); }
  __device__ int stage_index() const { return group() * GROUP_STAGES + stage.index(); }
  __device__ void wait(const PipelineShared& shared) const {
    ptx::barrier_wait(shared.is_stage_full(stage_index()), stage.parity());
  }
  // All lanes are through with the stage.
  __device__ void release(const PipelineShared& shared) {
    arrive_as_warp(shared.is_stage_free(stage_index()));
    stage.advance(1);
  }
};

// sums += S^T x over a tile of the checkpoint as it stands.
__device__ inline void multiply_tile(const TileRows& rows, const TileColumns& x, ReadSums& read, ReadSums& low) {
#pragma unroll
  for (int row = 0; row < TILE_ROWS; row += PRODUCT_ROWS) {
    StateVector vectors[PRODUCT_ROWS];
#pragma unroll
    for (int k = 0; k < PRODUCT_ROWS; ++k) vectors[k] = rows.load(row + k);
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      ProductPairs pairs;
#pragma unroll
      for (int k = 0; k < PRODUCT_ROWS / 2; ++k) {
        const int pair = row / 2 + k;
        pairs.words[k] = x.vectors[b][pair / PAIRS_PER_VECTOR].words[pair % PAIRS_PER_VECTOR];
      }
      multiply_rows(vectors, pairs, read.sums[b], low.sums[b]);
    }
    // For the compiler: with more vectors at once other things would leave the registers.
    if (row % 8 == 8 - PRODUCT_ROWS) __syncwarp();
  }
}

// The same of the checkpoint that the fold makes, which is written to memory on the way; keys and queries stay in
// shared memory: registers are few.
__device__ inline void fold_and_multiply_tile(TileRows rows, bool has_state, ChunkBuffer buffer,
                                              const WeightedU& u, float decay, int tile, ReadSums& read,
                                              ReadSums& low) {
#pragma unroll 1
  for (int block = 0; block < TILE_ROWS / FOLD_ROWS; ++block, rows.advance(FOLD_ROWS)) {
    const int first_row = tile * TILE_ROWS + block * FOLD_ROWS;
    StateVector vectors[FOLD_ROWS] = {};
    if (has_state) {
#pragma unroll
      for (int row = 0; row < FOLD_ROWS; ++row) vectors[row] = rows.load(row);
    }
    FoldPairs x[TOKEN_BLOCKS];
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) x[b] = ColumnPart(buffer, b).fold_pairs(first_row);
    const FoldSums sums(u, PendingKeys(buffer, first_row));
    // All of them before the first is stored: loads do not pass stores.
#pragma unroll
    for (int row = 0; row < FOLD_ROWS; ++row) sums.fold(row, decay, vectors[row]);
#pragma unroll
    for (int row = 0; row < FOLD_ROWS; ++row) rows.store(row, vectors[row]);
#pragma unroll
    for (int row = 0; row < FOLD_ROWS; row += PRODUCT_ROWS) {
      StateVector product[PRODUCT_ROWS];
#pragma unroll
      for (int k = 0; k < PRODUCT_ROWS; ++k) product[k] = vectors[row + k];
#pragma unroll
      for (int b = 0; b < TOKEN_BLOCKS; ++b) {
        ProductPairs pairs;
#pragma unroll
        for (int k = 0; k < PRODUCT_ROWS / 2; ++k) pairs.words[k] = x[b].words[row / 2 + k];
        multiply_rows(product, pairs, read.sums[b], low.sums[b]);
      }
    }
  }
}

// What a consumer waits for after keys and queries, once in a chunk, of which it may have several heads.
struct ChunkWait {
  uint32_t is_weighed, are_values_loaded, parity;
  bool is_over = false;

  __device__ void wait() {
    if (CHUNK_HEADS > NUM_GROUPS && is_over) return;
    ptx::barrier_wait(are_values_loaded, parity);
    ptx::barrier_wait(is_weighed, parity);
    is_over = true;
  }
};

// read = (read + low) factor + more.
__device__ inline void add_up(ReadSums& read, const ReadSums& low, float factor, const ReadSums& more) {
#pragma unroll
  for (int b = 0; b < TOKEN_BLOCKS; ++b) {
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float sum = IS_STATE_FP32 ? read.sums[b][i][k] + low.sums[b][i][k] : read.sums[b][i][k];
        read.sums[b][i][k] = factor * sum + more.sums[b][i][k];
      }
    }
  }
}

// What keys and queries read of a head, the pending rows included. They are there, and read the state while values are
// still on their way and weights made; pending rows are read before the last tile, the one that is waited for longest.
__device__ inline void read_head(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                 const HeadColumns& columns, ChunkWait& rest, ConsumerTurn& turn, ReadSums& read) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const bool is_state_read = lengths.is_state_read();
  ReadSums low = {}, pending = {};
#pragma unroll 1
  for (int tile = 0; tile < TILES_PER_HEAD; ++tile) {
    if (tile == TILES_PER_HEAD - 1) {
      rest.wait();
      if (lengths.is_active()) add_pending(buffer, columns, lengths.pending, pending);
    }
    const TileColumns x(buffer, tile);
    turn.wait(shared);
    if (is_state_read) multiply_tile(TileRows(tensors, shared, columns, tile, turn.stage_index()), x, read, low);
    turn.release(shared);
  }
  add_up(read, low, buffer.row_weights(columns.head)[MMA_TOKENS], pending);
}

// The same in a flush, of the checkpoint that it makes of state and pending rows.
__device__ inline void fold_head(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                 const HeadColumns& columns, ChunkWait& rest, ConsumerTurn& turn, ReadSums& read) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const float* weights = buffer.row_weights(columns.head);
  ReadSums low = {};
  rest.wait();
  const WeightedU u(columns.u(buffer), weights, lengths.pending);
#pragma unroll 1
  for (int tile = 0; tile < TILES_PER_HEAD; ++tile) {
    turn.wait(shared);
    fold_and_multiply_tile(TileRows(tensors, shared, columns, tile, turn.stage_index()), lengths.has_state(), buffer,
                           u, weights[MMA_TOKENS], tile, read, low);
    turn.release(shared);
  }
  add_up(read, low, 1.0f, {});
}

__device__ inline void consume(const GatedDeltaNetParams& params, const PipelineShared& shared) {
  ConsumerTurn turn;
  Turn<CHUNK_BUFFERS> chunk_turn;
#pragma unroll 1
  for (;; chunk_turn.advance(1)) {
    const ChunkBuffer buffer = shared.buffer(chunk_turn.index());
    ptx::barrier_wait(shared.is_chunk_known(chunk_turn.index()), chunk_turn.parity());
    const Chunk& chunk = buffer.chunk();  // where it stands: registers are few
    if (chunk.num_heads == 0) return;
    ptx::barrier_wait(shared.is_loaded(KEYS_LOADER, chunk_turn.index()), chunk_turn.parity());
    const ChunkTensors tensors{params, chunk};
    ChunkWait rest{shared.is_chunk_weighed(chunk_turn.index()), shared.is_loaded(VALUES_LOADER, chunk_turn.index()),
                   chunk_turn.parity()};
#pragma unroll 1
    for (; turn.head < chunk.num_heads; turn.head += NUM_GROUPS) {
      const HeadColumns columns(turn.head);
      ReadSums read = {};
      if (chunk.lengths.is_active() && chunk.lengths.is_flush()) {
        fold_head(tensors, shared, buffer, columns, rest, turn, read);
      } else {
        read_head(tensors, shared, buffer, columns, rest, turn, read);
      }
      finish_head(tensors, buffer, columns, read);
    }
    turn.head -= chunk.num_heads;
    arrive_as_warp(shared.is_chunk_free(chunk_turn.index()));
  }
}

}  // namespace replay
