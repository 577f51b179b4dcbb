// The coefficient warps: what each token row counts for in each output and in the fold; and the window's ring rows.
//
// With D(j, t) the sum of dt over the rows after j up to t, row j weighs exp(A D(j, t)) dt_j (B_j . C_t) in token t, and
// exp(A D(j, last pending)) dt_j in the fold. D is a sum of positive numbers and never a difference. A half warp
// computes one head at a time: lane i has the i-th row that the outputs see, and the i-th pending row. Rows that are
// not there have dt 0 and are chosen away, so no dead memory reaches a weight.
#pragma once
#include "common/mma.cuh"
#include "common/softplus.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int HALF_WARP = 16;
constexpr int HEADS_PER_PASS = 2 * TEAM_WARPS;

struct SuffixSums {
  float from;   // over this row and those after it
  float after;  // over those after it
};

__device__ inline SuffixSums suffix_sums(float value) {
  const int row = threadIdx.x % HALF_WARP;
#pragma unroll
  for (int offset = 1; offset < HALF_WARP; offset *= 2) {
    const float other = __shfl_down_sync(FULL_WARP, value, offset, HALF_WARP);
    if (row + offset < HALF_WARP) value += other;
  }
  const float after = __shfl_down_sync(FULL_WARP, value, 1, HALF_WARP);
  return {value, row == HALF_WARP - 1 ? 0.0f : after};
}

// scores[t][i] = B_i . C_t for the rows i that the outputs see; the heads of a group share them. Each warp has its own.
__device__ inline void compute_scores(const RowLengths& lengths, ChunkBuffer buffer, float* scores) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
  const int first = lengths.first(), num_rows = lengths.live() + lengths.num_tokens;
  float sums[2][4] = {};  // of rows 0 .. 7 and 8 .. 15
  // Columns may be taken in any order as long as B and C agree: 16 neighbouring bytes serve two products.
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int offset = m * 64 + q * 16;
    Vector16 c{}, b[2] = {};
    if (g < lengths.num_tokens) c = *reinterpret_cast<const Vector16*>(buffer.C(g) + offset);
    if (g < num_rows) b[0] = *reinterpret_cast<const Vector16*>(buffer.B(first + g) + offset);
    if (g + 8 < num_rows) b[1] = *reinterpret_cast<const Vector16*>(buffer.B(first + g + 8) + offset);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t a[4] = {c.words[2 * k], 0, c.words[2 * k + 1], 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::mma_bf16(sums[half], a, b[half].words[2 * k], b[half].words[2 * k + 1]);
      }
    }
  }
  if (g < WINDOW) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[g * MMA_TOKENS + 8 * half + 2 * q] = sums[half][0];
      scores[g * MMA_TOKENS + 8 * half + 2 * q + 1] = sums[half][1];
    }
  }
  __syncwarp();
}

// The weights of one head's window tokens, in two bfloat16 parts, and what is left of the checkpoint at each token. D
// is added to a token's weight on its own row. `is_head` is false where the half warp has no head of the chunk.
// `before` is over the live pending rows; the window's dt are added token by token.
__device__ inline void weigh_outputs(const RowLengths& lengths, ChunkBuffer buffer, const float* scores, float seen,
                                     SuffixSums before, float A, float D, int head, bool is_head) {
  const int row = threadIdx.x % HALF_WARP;
  float since_checkpoint = __shfl_sync(FULL_WARP, before.from, 0, HALF_WARP);
  float since_row = row < lengths.live() ? before.after : 0.0f;
#pragma unroll
  for (int token = 0; token < WINDOW; ++token) {
    const int last = lengths.live() + token;
    const float dt = __shfl_sync(FULL_WARP, seen, last, HALF_WARP);
    since_checkpoint += dt;
    if (row < last) since_row += dt;
    float weight = 0.0f;
    if (row <= last && token < lengths.num_tokens) {
      weight = __expf(A * since_row) * seen * scores[token * MMA_TOKENS + row] + (row == last ? D : 0.0f);
    }
    const bfloat16 high = from_float<bfloat16>(weight);
    const bfloat16 low = from_float<bfloat16>(weight - to_float(high));
    if (is_head) {
      // The words of q are: high parts of rows 2q, 2q + 1; of rows 2q + 8, 2q + 9; and the same of the low parts.
      bfloat16* words = reinterpret_cast<bfloat16*>(buffer.weights(head, token) + row % 8 / 2 * 16);
      words[row / 8 * 2 + row % 2] = high;
      words[row / 8 * 2 + row % 2 + 4] = low;
      if (row == 0) buffer.decays(head)[token] = __expf(A * since_checkpoint);
    }
  }
}

// dt of a window token, after softplus.
__device__ inline float window_time(const ChunkTensors& tensors, ChunkBuffer buffer, int head, int token) {
  uint32_t word = *buffer.raw_time(head, token);
  // Of two 16-bit numbers in the word, the upper one?
  if (sizeof(DT_TYPE) == 2 && (reinterpret_cast<uintptr_t>(tensors.raw_dt(token, head)) & 2) != 0) word >>= 16;
  DT_TYPE raw;
  memcpy(&raw, &word, sizeof(raw));
  return softplus(to_float(raw) + buffer.constants(2)[head]);
}

__device__ inline void weigh_head(const ChunkTensors& tensors, ChunkBuffer buffer, const float* scores, int head,
                                  bool is_head) {
  const Chunk& chunk = tensors.chunk;
  const RowLengths& lengths = chunk.lengths;
  const int row = threadIdx.x % HALF_WARP;
  const float A = buffer.constants(0)[head], D = buffer.constants(1)[head];
  const float pending = row < lengths.pending ? buffer.pending_times(head)[row] : 0.0f;
  const int token = row - lengths.live();
  float seen = token < 0 ? pending : 0.0f;
  if (token >= 0 && token < lengths.num_tokens) {
    seen = window_time(tensors, buffer, head, token);
    if (is_head) *tensors.dt_ring(tensors.window_line(token), head) = seen;
  }
  const SuffixSums sums = suffix_sums(pending);
  const bool is_flush = lengths.is_flush();
  weigh_outputs(lengths, buffer, scores, seen, is_flush ? SuffixSums{} : sums, A, D, head, is_head);
  if (is_flush && is_head) {
    buffer.fold_weights(head)[row] = row < lengths.pending ? __expf(A * sums.after) * pending : 0.0f;
    if (row == 0) buffer.fold_weights(head)[MMA_TOKENS] = __expf(A * sums.from);
  }
}

// Write the window's x and B rows to their rings: rows that this step does not read (R >= W + T). A group's B rows are
// written with the group's first head alone.
__device__ inline void append_rows(const ChunkTensors& tensors, ChunkBuffer buffer, int warp) {
  const Chunk& chunk = tensors.chunk;
  const int thread = warp * WARP_SIZE + threadIdx.x % WARP_SIZE;
  const bool is_group_start = chunk.first_head % HEADS_PER_GROUP == 0;
  const int x_pieces = chunk.num_heads * HEAD_DIM / 8, B_pieces = is_group_start ? D_STATE / 8 : 0;
  for (int token = 0; token < chunk.lengths.num_tokens; ++token) {
    const int line = tensors.window_line(token), row = chunk.lengths.pending + token;
    for (int piece = thread; piece < x_pieces + B_pieces; piece += TEAM_WARPS * WARP_SIZE) {
      const bool is_x = piece < x_pieces;
      const unsigned char* source = is_x ? buffer.x(row) + piece * 16 : buffer.B(row) + (piece - x_pieces) * 16;
      ACTIVATION_TYPE* target = is_x ? tensors.x_ring(line) + piece * 8 : tensors.B_ring(line) + (piece - x_pieces) * 8;
      *reinterpret_cast<Vector16*>(target) = *reinterpret_cast<const Vector16*>(source);
    }
  }
}

// Teams of warps take the chunks in turn.
__device__ inline void weigh(const Mamba2Params& params, const PipelineShared& shared, int weigher) {
  const bool is_first_lane = threadIdx.x % WARP_SIZE == 0;
  const int warp = weigher % TEAM_WARPS, half = threadIdx.x % WARP_SIZE / HALF_WARP;
  Turn<CHUNK_BUFFERS> turn(weigher / TEAM_WARPS);
#pragma unroll 1
  for (;; turn.advance(COEFFICIENT_TEAMS)) {
    const ChunkBuffer buffer = shared.buffer(turn.index());
    ptx::barrier_wait(shared.is_chunk_full(turn.index()), turn.parity());
    const Chunk chunk = buffer.chunk();
    if (chunk.num_heads == 0) return;
    if (chunk.lengths.is_active()) {
      float* scores = buffer.at<float>(ChunkOffsets::SCORES) + warp * WINDOW * MMA_TOKENS;
      compute_scores(chunk.lengths, buffer, scores);
      // For the warp as a whole: the sums need all of its lanes.
      for (int warp_head = warp * 2; warp_head < chunk.num_heads; warp_head += HEADS_PER_PASS) {
        const bool is_head = warp_head + half < chunk.num_heads;
        weigh_head({params, chunk}, buffer, scores, is_head ? warp_head + half : warp_head, is_head);
      }
    }
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_weighed(turn.index()));
    if (chunk.lengths.is_active()) append_rows({params, chunk}, buffer, warp);
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_free(turn.index()));
  }
}

}  // namespace replay
