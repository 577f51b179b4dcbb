// The consumer warps: per tile, fold if it is due, and the outputs of its channels.
//
// y_t = decay_t S C_t + sum over the rows j that token t sees of weight_{j,t} x_j, with D x_t in the weight of the
// token's own row. A warp has MMA_ROWS state rows of its group's tile.
#pragma once
#include "mamba2/pipeline/fold.cuh"

namespace replay {

// A warp's rows of a tile: this lane's first vectors of rows g and g + 8, in shared memory and in the pool.
struct TileRows {
  const unsigned char* staged;
  unsigned char* memory;

  __device__ Vector16 upper(int m) const { return *reinterpret_cast<const Vector16*>(staged + m * VECTOR_STRIDE_BYTES); }
  __device__ Vector16 lower(int m) const {
    return *reinterpret_cast<const Vector16*>(staged + 8 * STATE_ROW_BYTES + m * VECTOR_STRIDE_BYTES);
  }
  __device__ void store(int m, const Vector16& upper, const Vector16& lower) const {
    ptx::store_streaming(memory + m * VECTOR_STRIDE_BYTES, upper);
    ptx::store_streaming(memory + 8 * STATE_ROW_BYTES + m * VECTOR_STRIDE_BYTES, lower);
  }
};

// sums = S C, of the checkpoint as it stands.
__device__ inline void multiply_tile(const TileRows& rows, const WindowC& C, float (&sums)[2][4]) {
#pragma unroll
  for (int m = 0; m < VECTORS; ++m) multiply_vector(rows.upper(m), rows.lower(m), C, m, sums);
}

// The same of the checkpoint that the fold makes, which is written to memory on the way.
__device__ inline void fold_and_multiply_tile(const TileRows& rows, bool has_state, const WeightedX& x,
                                              const PendingB& B, float decay, const WindowC& C, float (&sums)[2][4]) {
#pragma unroll
  for (int m = 0; m < VECTORS; ++m) {
    Vector16 upper{}, lower{};
    if (has_state) {
      upper = rows.upper(m);
      lower = rows.lower(m);
    }
    fold_vector(x, B.words[m], decay, upper, lower);
    rows.store(m, upper, lower);
    __syncwarp();  // for the compiler: it would load all vectors at once, for which registers are too few
    multiply_vector(upper, lower, C, m, sums);
  }
}

// sums[0] = decay (sums[0] + sums[1]) + x^T times the weights of the rows that the outputs see.
__device__ inline void add_rows(ChunkBuffer buffer, int first, int num_rows, int head, int channel,
                                float (&sums)[2][4]) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
  const float* decays = buffer.decays(head);
  const float even = 2 * q < WINDOW ? decays[2 * q] : 0.0f, odd = 2 * q + 1 < WINDOW ? decays[2 * q + 1] : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[0][i] = (sums[0][i] + sums[1][i]) * (i % 2 == 0 ? even : odd);
  Vector16 weights{};
  if (g < WINDOW) weights = *reinterpret_cast<const Vector16*>(buffer.weights(head, g) + q * 16);
  uint32_t x[4];
  load_x(buffer, first, num_rows, channel, x);
  ptx::mma_bf16(sums[0], x, weights.words[2], weights.words[3]);
  ptx::mma_bf16(sums[0], x, weights.words[0], weights.words[1]);
}

// Outputs beyond the row's tokens, and all outputs of a padding row, are zero.
__device__ inline void store_outputs(const ChunkTensors& tensors, int num_tokens, int channel, const float (&sums)[4]) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * q + i;
    if (token < WINDOW && token < tensors.params.seq_len) {
      ACTIVATION_TYPE* y = tensors.y(token) + channel + g;
      y[0] = from_float<ACTIVATION_TYPE>(token < num_tokens ? sums[i] : 0.0f);
      y[8] = from_float<ACTIVATION_TYPE>(token < num_tokens ? sums[2 + i] : 0.0f);
    }
  }
}

// The tiles of one chunk that are this warp's group's; `count` is the block's number of the chunk's first tile. Two
// instances, so that the registers of B are taken in a flush alone.
template <bool IS_FLUSH>
__device__ inline void consume_tiles(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                     int warp, int count) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int group = warp / STAGE_WARPS, warp_row = warp % STAGE_WARPS * MMA_ROWS;
  const int first_tile = (group + CONSUMER_GROUPS - count % CONSUMER_GROUPS) % CONSUMER_GROUPS;
  const int lane_offset = (warp_row + lane / 4) * STATE_ROW_BYTES + lane % 4 * 16;
  const RowLengths& lengths = tensors.chunk.lengths;
  const bool is_active = IS_FLUSH || lengths.is_active(), has_state = lengths.has_state();
  const int pending = lengths.pending, num_tokens = lengths.num_tokens, num_tiles = tensors.chunk.num_tiles();
  const WindowC C(buffer, num_tokens);
  PendingB B;
  if (IS_FLUSH) B.load(buffer, pending);
#pragma unroll 1
  for (int tile = first_tile; tile < num_tiles; tile += CONSUMER_GROUPS) {
    const int stage = (count + tile) % NUM_STAGES;
    const int head = tile / TILES_PER_HEAD;            // of the chunk
    const int channel = tile * STAGE_ROWS + warp_row;  // of the chunk's rows of x
    TileRows rows{shared.base + stage * TILE_BYTES + lane_offset, nullptr};
    float sums[2][4] = {};
    ptx::barrier_wait(shared.is_stage_full(stage), parity_of(count + tile, NUM_STAGES));
    if constexpr (IS_FLUSH) {
      uint32_t x[4];
      load_x(buffer, 0, pending, channel, x);
      const float* weights = buffer.fold_weights(head);
      rows.memory = reinterpret_cast<unsigned char*>(tensors.state()) + static_cast<int64_t>(tile) * TILE_BYTES +
                    lane_offset;
      fold_and_multiply_tile(rows, has_state, WeightedX(x, weights), B, weights[MMA_TOKENS], C, sums);
    } else if (is_active && has_state) {
      multiply_tile(rows, C, sums);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(shared.is_stage_free(stage));
    if (is_active) {
      add_rows(buffer, IS_FLUSH ? pending : 0, IS_FLUSH ? num_tokens : pending + num_tokens, head, channel, sums);
    }
    store_outputs(tensors, num_tokens, channel, sums[0]);
  }
}

__device__ inline void consume(const Mamba2Params& params, const PipelineShared& shared, int warp) {
  int count = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const ChunkBuffer buffer = shared.buffer(turn);
    // Both: what the copies brought is known to be there only to those who waited for the copies.
    ptx::barrier_wait(shared.is_chunk_full(turn), parity_of(turn, CHUNK_BUFFERS));
    const Chunk chunk = buffer.chunk();
    if (chunk.num_heads == 0) return;
    ptx::barrier_wait(shared.is_chunk_weighed(turn), parity_of(turn, CHUNK_BUFFERS));
    const ChunkTensors tensors{params, chunk};
    if (chunk.lengths.is_active() && chunk.lengths.is_flush()) {
      consume_tiles<true>(tensors, shared, buffer, warp, count);
    } else {
      consume_tiles<false>(tensors, shared, buffer, warp, count);
    }
    count += chunk.num_tiles();
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) ptx::barrier_arrive(shared.is_chunk_free(turn));
  }
}

}  // namespace replay
