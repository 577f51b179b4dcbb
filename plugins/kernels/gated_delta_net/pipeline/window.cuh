// From what keys and queries read of the state to u and outputs, by each lane for its columns of tokens q and q + 4.
//
// The u of a window build on each other: forward substitution, in fp32. The lane of a token shows its u to the lanes of
// the same columns.
#pragma once
#include "gated_delta_net/pipeline/fragments.cuh"

namespace replay {

// A lane's columns of a head: in the buffer, and of the chunk's rows of v, o and u.
struct HeadColumns {
  int head;    // of the chunk
  int column;  // of the head, the first of the lane's

  __device__ explicit HeadColumns(int head)
      : head(head), column(static_cast<int>(threadIdx.x) % (GROUP_WARPS * WARP_SIZE) / 4 * LANE_COLUMNS) {}

  __device__ int of_chunk() const { return head * VALUE_DIM + column; }
  __device__ const unsigned char* u(ChunkBuffer buffer) const { return buffer.u(0, head) + column * 4; }
};

// sums += what the columns read of the live pending rows. Weights and u are taken in two parts of tf32 each; the
// product of both second ones would be too small to count.
__device__ inline void add_pending(ChunkBuffer buffer, const HeadColumns& columns, int live, ReadSums& read) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
  Vector16 weights[TOKEN_BLOCKS];
#pragma unroll
  for (int b = 0; b < TOKEN_BLOCKS; ++b) {
    const int column = min(8 * b + g, 2 * WINDOW - 1);
    weights[b] = reinterpret_cast<const Vector16*>(buffer.weights(columns.head, column))[q];
  }
#pragma unroll
  for (int k = 0; k < (HISTORY + 7) / 8; ++k) {
    if (8 * k >= live) break;
    const UVectors u(columns.u(buffer), 8 * k, live);
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i) {
      uint32_t highs[4], lows[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Tf32Parts parts(float_to_bits(u.values[j / 2][2 * i + j % 2]));
        highs[j] = parts.high;
        lows[j] = parts.low;
      }
#pragma unroll
      for (int b = 0; b < TOKEN_BLOCKS; ++b) {
        const Tf32Parts first(weights[b].words[2 * k]), second(weights[b].words[2 * k + 1]);
        ptx::mma_tf32(read.sums[b][i], lows, first.high, second.high);
        ptx::mma_tf32(read.sums[b][i], highs, first.low, second.low);
        ptx::mma_tf32(read.sums[b][i], highs, first.high, second.high);
      }
    }
  }
}

// A lane's columns of its token of one block.
struct LaneToken {
  float v[LANE_COLUMNS], predicted[LANE_COLUMNS], output[LANE_COLUMNS], beta;

  __device__ void start(ChunkBuffer buffer, const HeadColumns& columns, int token,
                        const float (&read)[COLUMN_PAIRS][4]) {
    token = min(token, WINDOW - 1);
    const TokenWeights& weights = buffer.token(columns.head, token);
    const TokenWeights::Pair scales = weights.scales;
    beta = weights.beta;
    load_as_float(reinterpret_cast<const ACTIVATION_TYPE*>(buffer.v(token, columns.head)) + columns.column, v);
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) {
      predicted[c] = scales.key * read[c / 2][c % 2 * 2];
      output[c] = scales.query * read[c / 2][c % 2 * 2 + 1];
    }
  }
  __device__ float u(int c) const { return beta * (v[c] - predicted[c]); }
};

// Where a lane's columns of a token go.
struct OutputLane {
  const ChunkTensors& tensors;
  int offset;  // of the chunk's rows

  __device__ void store(int token, const float (&output)[LANE_COLUMNS]) const {
    const Chunk& chunk = tensors.chunk;
    if (token >= min(WINDOW, tensors.params.seq_len)) return;
    const bool is_token = token < chunk.lengths.num_tokens;
    struct alignas(2 * LANE_COLUMNS) Rounded {
      uint32_t pairs[COLUMN_PAIRS];
    } rounded;
#pragma unroll
    for (int i = 0; i < COLUMN_PAIRS; ++i) {
      rounded.pairs[i] = is_token ? pack_bf16(output[2 * i], output[2 * i + 1]) : 0;
    }
    ptx::store(reinterpret_cast<Rounded*>(tensors.o(token) + offset), rounded);
  }
  __device__ void append(int token, const LaneToken& values) const {
    if (token >= tensors.chunk.lengths.num_tokens) return;
    Vector16 u;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) u.words[c] = float_to_bits(values.u(c));
    ptx::store(reinterpret_cast<Vector16*>(tensors.u_ring(tensors.window_line(token)) + offset), u);
  }
};

// u and outputs of the window, from what its keys and queries read of the state and of pending rows.
__device__ inline void finish_head(const ChunkTensors& tensors, ChunkBuffer buffer, const HeadColumns& columns,
                                   const ReadSums& read) {
  const int q = threadIdx.x % 4;
  LaneToken tokens[TOKEN_BLOCKS];
#pragma unroll
  for (int b = 0; b < TOKEN_BLOCKS; ++b) tokens[b].start(buffer, columns, q + TOKENS_PER_BLOCK * b, read.sums[b]);
#pragma unroll
  for (int s = 0; s < WINDOW; ++s) {
    float u[LANE_COLUMNS];
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; ++c) {
      u[c] = tokens[s / TOKENS_PER_BLOCK].u(c);
      if (WINDOW > 1) u[c] = __shfl_sync(FULL_WARP, u[c], s % TOKENS_PER_BLOCK, TOKENS_PER_BLOCK);
    }
#pragma unroll
    for (int b = s / TOKENS_PER_BLOCK; b < TOKEN_BLOCKS; ++b) {
      const int token = q + TOKENS_PER_BLOCK * b;
      const TokenWeights::Pair weights = buffer.token(columns.head, min(token, WINDOW - 1)).pairs[s];
#pragma unroll
      for (int c = 0; c < LANE_COLUMNS; ++c) {
        // By selection: what a later token holds may be NaN.
        if (token > s) tokens[b].predicted[c] += weights.key * u[c];
        if (token >= s) tokens[b].output[c] += weights.query * u[c];
      }
    }
  }
  const OutputLane lane{tensors, columns.of_chunk()};
#pragma unroll
  for (int b = 0; b < TOKEN_BLOCKS; ++b) {
    lane.store(q + TOKENS_PER_BLOCK * b, tokens[b].output);
    lane.append(q + TOKENS_PER_BLOCK * b, tokens[b]);
  }
}

}  // namespace replay
