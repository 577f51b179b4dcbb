// The consumer warps: per tile, fold if it is due, and the outputs of its channels.
//
// y_t = decay_t S C_t + sum over the rows j that token t sees of weight_{j,t} x_j, with D x_t in the weight of the
// token's own row. The second part is computed first, while the tile may still be on its way.
#pragma once
#include "mamba2/pipeline/fold.cuh"

namespace replay {

// Sums that a block's products go to in turn, so that they overlap; of few blocks each needs more of its own.
constexpr int SUMS = TILE_BLOCKS >= 4 ? 1 : 2;

// One lane's view of a block of a tile: its first vectors of rows g and g + 8, in shared memory and in the pool.
struct BlockRows {
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

// What all tiles of one head have in common for a lane: its part of the weights, and the decays of its two tokens.
struct HeadWeights {
  Vector16 rows{};
  float decays[2] = {};

  __device__ HeadWeights(ChunkBuffer buffer, int head) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    if (g < WINDOW) rows = *reinterpret_cast<const Vector16*>(buffer.weights(head, g) + q * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * q + i < WINDOW) decays[i] = buffer.decays(head)[2 * q + i];
    }
  }
};

// x^T times the weights of the rows that the outputs see: 16 channels.
__device__ inline void multiply_rows(ChunkBuffer buffer, int first, int num_rows, const HeadWeights& weights,
                                     int channel, float (&sums)[4]) {
  uint32_t x[4];
  load_x(buffer, first, num_rows, channel, x);
  ptx::mma_bf16(sums, x, weights.rows.words[2], weights.rows.words[3]);
  ptx::mma_bf16(sums, x, weights.rows.words[0], weights.rows.words[1]);
}

// sums = S C, of the checkpoint as it stands.
__device__ inline void multiply_tile(const unsigned char* staged, const WindowC& C,
                                     float (&sums)[TILE_BLOCKS][SUMS][4]) {
#pragma unroll
  for (int m = 0; m < VECTORS; ++m) {
    uint32_t c[2][2];
#pragma unroll
    for (int k = 0; k < 2; ++k) C.operand(m, k, c[k]);
#pragma unroll
    for (int block = 0; block < TILE_BLOCKS; ++block) {
      const BlockRows rows{staged + block * BLOCK_BYTES, nullptr};
      const Vector16 upper = rows.upper(m), lower = rows.lower(m);
#pragma unroll
      for (int k = 0; k < 2; ++k) multiply_vector(upper, lower, k, c[k], sums[block][k % SUMS]);
    }
  }
}

// sums = S C of the checkpoint that the fold makes, which is written to memory on the way.
__device__ inline void fold_and_multiply_block(const BlockRows& rows, bool has_state, const WeightedX& x,
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
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t c[2];
      C.operand(m, k, c);
      multiply_vector(upper, lower, k, c, sums[k]);
    }
  }
}

// Where a lane's outputs go: of tokens 2q and 2q + 1, at channels g and g + 8 of a block.
struct OutputLane {
  ACTIVATION_TYPE* y;
  bool is_written[2];  // are outputs there
  bool is_token[2];    // else they are zero, as all outputs of a padding row

  __device__ OutputLane(const ChunkTensors& tensors) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    y = tensors.y(2 * q) + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_written[i] = 2 * q + i < WINDOW && 2 * q + i < tensors.params.seq_len;
      is_token[i] = 2 * q + i < tensors.chunk.lengths.num_tokens;
    }
  }
  __device__ void store(int channel, const float (&state)[4], const float (&rows)[4], const float (&decays)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_written[i]) continue;
      ACTIVATION_TYPE* target = y + i * N_HEADS * HEAD_DIM + channel;
      target[0] = from_float<ACTIVATION_TYPE>(is_token[i] ? state[i] * decays[i] + rows[i] : 0.0f);
      target[8] = from_float<ACTIVATION_TYPE>(is_token[i] ? state[2 + i] * decays[i] + rows[2 + i] : 0.0f);
    }
  }
};

// Both sums together.
__device__ inline void merge(float (&sums)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i];
}
__device__ inline void merge(float (&)[1][4]) {}

// One warp's place among the tiles of its thread block.
struct ConsumerTurn {
  int tile;  // of the chunk
  Turn<NUM_STAGES> stage;

  __device__ void next() {
    tile += NUM_CONSUMERS;
    stage.advance(NUM_CONSUMERS);
  }
};

__device__ inline void consume_tiles(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                     ConsumerTurn& turn) {
  const int lane = threadIdx.x % WARP_SIZE;
  const RowLengths& lengths = tensors.chunk.lengths;
  const bool is_active = lengths.is_active(), is_state_read = lengths.is_state_read();
  const int num_rows = is_active ? lengths.live() + lengths.num_tokens : 0;
  const WindowC C(buffer, lengths.num_tokens);
  const OutputLane output(tensors);
#pragma unroll 1
  for (; turn.tile < tensors.chunk.num_tiles(); turn.next()) {
    const int channel = turn.tile * TILE_ROWS;  // of the chunk's rows of x
    float rows[TILE_BLOCKS][4] = {}, state[TILE_BLOCKS][SUMS][4] = {};
    const HeadWeights weights(buffer, turn.tile / TILES_PER_HEAD);
#pragma unroll
    for (int block = 0; block < TILE_BLOCKS; ++block) {
      multiply_rows(buffer, lengths.first(), num_rows, weights, channel + block * MMA_ROWS, rows[block]);
    }
    ptx::barrier_wait(shared.is_stage_full(turn.stage.index), turn.stage.parity);
    if (is_state_read) {
      multiply_tile(shared.base + turn.stage.index * TILE_BYTES + lane / 4 * STATE_ROW_BYTES + lane % 4 * 16, C, state);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(shared.is_stage_free(turn.stage.index));
#pragma unroll
    for (int block = 0; block < TILE_BLOCKS; ++block) {
      merge(state[block]);
      output.store(channel + block * MMA_ROWS, state[block][0], rows[block], weights.decays);
    }
  }
}

// The same in a flush, block by block: what the fold needs leaves no registers for more.
__device__ inline void fold_tiles(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                  ConsumerTurn& turn) {
  const int lane = threadIdx.x % WARP_SIZE, lane_offset = lane / 4 * STATE_ROW_BYTES + lane % 4 * 16;
  const RowLengths& lengths = tensors.chunk.lengths;
  const WindowC C(buffer, lengths.num_tokens);
  PendingB B;
  B.load(buffer, lengths.pending);
#pragma unroll 1
  for (; turn.tile < tensors.chunk.num_tiles(); turn.next()) {
    const int head = turn.tile / TILES_PER_HEAD;
    unsigned char* memory =
        reinterpret_cast<unsigned char*>(tensors.state()) + static_cast<int64_t>(turn.tile) * TILE_BYTES + lane_offset;
    const unsigned char* staged = shared.base + turn.stage.index * TILE_BYTES + lane_offset;
    ptx::barrier_wait(shared.is_stage_full(turn.stage.index), turn.stage.parity);
#pragma unroll 1
    for (int block = 0; block < TILE_BLOCKS; ++block) {
      const int channel = turn.tile * TILE_ROWS + block * MMA_ROWS;
      uint32_t x[4];
      load_x(buffer, 0, lengths.pending, channel, x);
      const float* fold_weights = buffer.fold_weights(head);
      float state[2][4] = {}, rows[4] = {};
      fold_and_multiply_block({staged + block * BLOCK_BYTES, memory + block * BLOCK_BYTES}, lengths.has_state(),
                              WeightedX(x, fold_weights), B, fold_weights[MMA_TOKENS], C, state);
      merge(state);
      const HeadWeights weights(buffer, head);
      multiply_rows(buffer, lengths.pending, lengths.num_tokens, weights, channel, rows);
      OutputLane(tensors).store(channel, state[0], rows, weights.decays);
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(shared.is_stage_free(turn.stage.index));
  }
}

__device__ inline void consume(const Mamba2Params& params, const PipelineShared& shared, int warp) {
  ConsumerTurn turn{warp, Turn<NUM_STAGES>(warp)};
  Turn<CHUNK_BUFFERS> chunk_turn;
#pragma unroll 1
  for (;; chunk_turn.advance(1)) {
    const ChunkBuffer buffer = shared.buffer(chunk_turn.index);
    // Both: what the copies brought is known to be there only to those who waited for the copies.
    ptx::barrier_wait(shared.is_chunk_full(chunk_turn.index), chunk_turn.parity);
    const Chunk chunk = buffer.chunk();
    if (chunk.num_heads == 0) return;
    ptx::barrier_wait(shared.is_chunk_weighed(chunk_turn.index), chunk_turn.parity);
    const ChunkTensors tensors{params, chunk};
    if (chunk.lengths.is_active() && chunk.lengths.is_flush()) {
      fold_tiles(tensors, shared, buffer, turn);
    } else {
      consume_tiles(tensors, shared, buffer, turn);
    }
    turn.tile -= chunk.num_tiles();
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) ptx::barrier_arrive(shared.is_chunk_free(chunk_turn.index));
  }
}

}  // namespace replay
