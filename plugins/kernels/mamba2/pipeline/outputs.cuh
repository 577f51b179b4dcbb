// The consumer warps: per tile, fold if it is due, and the outputs of its channels.
//
// y_t = decay_t S C_t + sum over the rows j that token t sees of weight_{j,t} x_j, with D x_t in the weight of the
// token's own row.
#pragma once
#include "mamba2/pipeline/fold.cuh"

namespace replay {

// One lane's view of a tile: its first vectors of rows g and g + 8, in shared memory and in the pool.
struct TileRows {
  const unsigned char* staged;
  unsigned char* memory;

  __device__ TileRows(const ChunkTensors& tensors, const PipelineShared& shared, int tile, int stage) {
    const int lane = threadIdx.x % WARP_SIZE, offset = lane / 4 * STATE_ROW_BYTES + lane % 4 * 16;
    staged = shared.base + stage * TILE_BYTES + offset;
    memory = reinterpret_cast<unsigned char*>(tensors.state()) + static_cast<int64_t>(tile) * TILE_BYTES + offset;
  }
  __device__ Vector16 upper(int m) const { return *reinterpret_cast<const Vector16*>(staged + m * VECTOR_STRIDE_BYTES); }
  __device__ Vector16 lower(int m) const {
    return *reinterpret_cast<const Vector16*>(staged + 8 * STATE_ROW_BYTES + m * VECTOR_STRIDE_BYTES);
  }
  __device__ void store(int m, const Vector16& upper, const Vector16& lower) const {
    ptx::store(reinterpret_cast<Vector16*>(memory + m * VECTOR_STRIDE_BYTES), upper);
    ptx::store(reinterpret_cast<Vector16*>(memory + 8 * STATE_ROW_BYTES + m * VECTOR_STRIDE_BYTES), lower);
  }
};

// What all tiles of one head have in common for a lane: its part of the weights, and the decays of its two tokens.
struct HeadWeights {
  Vector16 rows[ROW_GROUPS]{};
  float decays[2] = {};

  __device__ HeadWeights(ChunkBuffer buffer, int head) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      if (g < WINDOW) rows[group] = *reinterpret_cast<const Vector16*>(buffer.weights(head, g, group) + q * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * q + i < WINDOW) decays[i] = buffer.decays(head)[2 * q + i];
    }
  }
};

// x^T times the weights of num_rows of the rows that the outputs see: 16 channels.
__device__ inline void multiply_rows(ChunkBuffer buffer, int first, int num_rows, const HeadWeights& weights,
                                     int channel, float (&sums)[4]) {
#pragma unroll
  for (int group = 0; group < ROW_GROUPS; ++group) {
    if (group > 0 && num_rows <= group * MMA_TOKENS) return;
    uint32_t x[4];
    load_x(buffer, first + group * MMA_TOKENS, num_rows - group * MMA_TOKENS, channel, x);
    const uint32_t(&words)[4] = weights.rows[group].words;
    ptx::mma_bf16(sums, x, words[2], words[3]);
    ptx::mma_bf16(sums, x, words[0], words[1]);
  }
}

// The same for all tokens; sums are zero before. Rows after a token weigh 0 in it, but 0 times what is not finite is
// not 0: then each token is made from the rows up to it alone.
__device__ inline void multiply_seen_rows(ChunkBuffer buffer, int first, int live, int num_tokens,
                                          const HeadWeights& weights, int channel, float (&sums)[4]) {
  multiply_rows(buffer, first, live + num_tokens, weights, channel, sums);
  if constexpr (WINDOW == 1) return;
  const int q = threadIdx.x % 4;
  const bool is_finite = fabsf(sums[0] + sums[1] + sums[2] + sums[3]) < bits_to_float(0x7f800000u);
  if (!__any_sync(FULL_WARP, !is_finite)) return;
#pragma unroll 1
  for (int token = 0; token < num_tokens; ++token) {
    float of_token[4] = {};
    multiply_rows(buffer, first, live + token + 1, weights, channel, of_token);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (2 * q + i % 2 == token) sums[i] = of_token[i];
    }
  }
}

// sums = S C, of the checkpoint as it stands.
__device__ inline void multiply_tile(const TileRows& rows, const WindowC& C, float (&sums)[2][4]) {
#pragma unroll
  for (int m = 0; m < VECTORS; ++m) {
    multiply_vector(rows.upper(m), rows.lower(m), C.pairs(m), sums);
    // For the compiler: with more than four vectors at once other things would leave the registers.
    if (m % 4 == 3) __syncwarp();
  }
}

// The same of the checkpoint that the fold makes, which is written to memory on the way.
__device__ inline void fold_and_multiply_tile(const TileRows& rows, bool has_state, const WeightedX& x,
                                              const PendingB& B, float decay, const StagedC& C, float (&sums)[2][4]) {
#pragma unroll 4  // all eight of an fp32 state at once leave too few registers
  for (int m = 0; m < VECTORS; ++m) {
    Vector16 upper{}, lower{};
    if (has_state) {
      upper = rows.upper(m);
      lower = rows.lower(m);
    }
    fold_vector(x, B, m, decay, upper, lower);
    rows.store(m, upper, lower);
    __syncwarp();  // for the compiler: it would load all vectors at once, for which registers are too few
    multiply_vector(upper, lower, C.pairs(m), sums);
  }
}

// Where a lane's outputs go: of tokens 2q and 2q + 1, at channels g and g + 8 of a tile.
struct OutputLane {
  ACTIVATION_TYPE* y;
  bool is_written[2];  // are outputs there
  bool is_token[2];    // else they are zero, as all outputs of a padding row

  __device__ explicit OutputLane(const ChunkTensors& tensors) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    y = tensors.y(2 * q) + g;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_written[i] = 2 * q + i < WINDOW && 2 * q + i < tensors.params.seq_len;
      is_token[i] = 2 * q + i < tensors.chunk.lengths.num_tokens;
    }
  }
  // decays times the sums over the state, and the sums over the rows.
  __device__ void store(int channel, const float (&state)[2][4], const float (&rows)[4],
                        const float (&decays)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_written[i]) continue;
      ACTIVATION_TYPE* target = y + i * N_HEADS * HEAD_DIM + channel;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = 2 * half + i;
        const float sum = (state[0][k] + state[1][k]) * decays[i] + rows[k];
        target[8 * half] = from_float<ACTIVATION_TYPE>(is_token[i] ? sum : 0.0f);
      }
    }
  }
};

// One warp's place among the tiles of its thread block.
struct ConsumerTurn {
  int tile;  // of the chunk
  Turn<NUM_STAGES> stage;

  __device__ bool is_first_of_chunk() const { return tile < NUM_CONSUMERS; }
  __device__ void wait(const PipelineShared& shared) const {
    ptx::barrier_wait(shared.is_stage_full(stage.index()), stage.parity());
  }
  // All lanes are through with the stage.
  __device__ void release(const PipelineShared& shared) const {
    arrive_as_warp(shared.is_stage_free(stage.index()));
  }
  __device__ void next() {
    tile += NUM_CONSUMERS;
    stage.advance(NUM_CONSUMERS);
  }
};

// What a consumer waits for after B and C.
struct ChunkWait {
  uint32_t is_weighed, is_x_ready, parity;

  __device__ void wait() const {
    ptx::barrier_wait(is_x_ready, parity);
    ptx::barrier_wait(is_weighed, parity);
  }
};

// The state is multiplied first, while x may still be on its way and the weights are made.
__device__ inline void consume_tiles(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                     const ChunkWait& rest, ConsumerTurn& turn) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const bool is_state_read = lengths.is_state_read();
  const WindowC C(buffer, lengths.num_tokens);
  const OutputLane output(tensors);
#pragma unroll 1
  for (; turn.tile < tensors.num_tiles(); turn.next()) {
    const int channel = turn.tile * TILE_ROWS;  // of the chunk's rows of x
    float rows[4] = {}, state[2][4] = {};
    turn.wait(shared);
    if (is_state_read) multiply_tile(TileRows(tensors, shared, turn.tile, turn.stage.index()), C, state);
    turn.release(shared);
    if (turn.is_first_of_chunk()) rest.wait();
    const HeadWeights weights(buffer, turn.tile / TILES_PER_HEAD);
    if (lengths.is_active()) multiply_seen_rows(buffer, 0, lengths.pending, lengths.num_tokens, weights, channel, rows);
    output.store(channel, state, rows, weights.decays);
  }
}

// The same in a flush. Two functions, for what the other keeps in registers this one has no room for.
__device__ inline void fold_tiles(const ChunkTensors& tensors, const PipelineShared& shared, ChunkBuffer buffer,
                                  ConsumerTurn& turn) {
  const RowLengths& lengths = tensors.chunk.lengths;
  const StagedC C{buffer, lengths.num_tokens};
  const PendingB B{buffer, lengths.pending};
#pragma unroll 1
  for (; turn.tile < tensors.num_tiles(); turn.next()) {
    const int channel = turn.tile * TILE_ROWS, head = turn.tile / TILES_PER_HEAD;
    const float* fold_weights = buffer.fold_weights(head);
    float rows[4] = {}, state[2][4] = {};
    turn.wait(shared);
    fold_and_multiply_tile(TileRows(tensors, shared, turn.tile, turn.stage.index()), lengths.has_state(),
                           WeightedX(buffer, lengths.pending, channel, fold_weights), B, fold_weights[FOLD_DECAY], C,
                           state);
    turn.release(shared);
    const HeadWeights weights(buffer, head);
    multiply_seen_rows(buffer, lengths.pending, 0, lengths.num_tokens, weights, channel, rows);
    OutputLane(tensors).store(channel, state, rows, weights.decays);
  }
}

__device__ inline void consume(const Mamba2Params& params, const PipelineShared& shared, int warp) {
  ConsumerTurn turn{warp, Turn<NUM_STAGES>(warp)};
  Turn<CHUNK_BUFFERS> chunk_turn;
#pragma unroll 1
  for (;; chunk_turn.advance(1)) {
    const ChunkBuffer buffer = shared.buffer(chunk_turn.index());
    ptx::barrier_wait(shared.is_chunk_known(chunk_turn.index()), chunk_turn.parity());
    const Chunk& chunk = buffer.chunk();  // where it stands: registers are few
    if (chunk.num_heads == 0) return;
    ptx::barrier_wait(shared.is_ready(BC_LOADER, chunk_turn.index()), chunk_turn.parity());
    const ChunkWait rest{shared.is_chunk_weighed(chunk_turn.index()), shared.is_ready(X_LOADER, chunk_turn.index()),
                         chunk_turn.parity()};
    const ChunkTensors tensors{params, chunk};
    if (chunk.lengths.is_active() && chunk.lengths.is_flush()) {
      rest.wait();
      fold_tiles(tensors, shared, buffer, turn);
    } else {
      consume_tiles(tensors, shared, buffer, rest, turn);
    }
    turn.tile -= tensors.num_tiles();
    arrive_as_warp(shared.is_chunk_free(chunk_turn.index()));
  }
}

}  // namespace replay
