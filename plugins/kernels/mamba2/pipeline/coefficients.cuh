// The coefficient warps: what each token row counts for in each output and in the fold; and the window's ring rows.
//
// With D(j, t) the sum of dt over the rows after j up to t, row j weighs exp(A D(j, t)) dt_j (B_j . C_t) in token t, and
// exp(A D(j, last pending)) dt_j in the fold. As in the generic step, D is a sum of positive numbers and never a
// difference. A half warp computes one head at a time: lane i has the i-th row that the outputs see, and the i-th
// pending row. Rows that are not there have dt 0 and are chosen away, so no dead memory reaches a weight.
#pragma once
#include "common/mma.cuh"
#include "common/softplus.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int HALF_WARP = 16;
constexpr int HEADS_PER_PASS = 2 * COEFFICIENT_WARPS;
constexpr int HEAD_PASSES = (CHUNK_HEADS + HEADS_PER_PASS - 1) / HEADS_PER_PASS;

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

// dt of one lane's rows of one head.
struct LaneTimes {
  float seen = 0.0f;  // of the row that the outputs see
  float pending = 0.0f;
};

__device__ inline LaneTimes load_times(const ChunkTensors& tensors, const ChunkLengths& lengths, int head) {
  const int row = threadIdx.x % HALF_WARP, token = row - lengths.live();
  LaneTimes times;
  if (row < lengths.pending) times.pending = *tensors.dt_ring(tensors.line(lengths.first_pending_row, row), head);
  if (token < 0) times.seen = times.pending;
  if (token >= 0 && token < lengths.num_tokens) {
    times.seen = softplus(tensors.raw_dt(token, head) + tensors.params.dt_bias[head]);
  }
  return times;
}

// scores[t][i] = B_i . C_t for the rows i that the outputs see; the heads of a group share them. Each warp has its own.
__device__ inline void compute_scores(const ChunkLengths& lengths, ChunkBuffer buffer, float* scores) {
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
__device__ inline void weigh_outputs(const ChunkLengths& lengths, ChunkBuffer buffer, const float* scores, float seen,
                                     float A, float D, int head, bool is_head) {
  const int row = threadIdx.x % HALF_WARP;
#pragma unroll
  for (int token = 0; token < WINDOW; ++token) {
    const int last = lengths.live() + token;
    const SuffixSums sums = suffix_sums(row <= last ? seen : 0.0f);
    float weight = 0.0f;
    if (row <= last && token < lengths.num_tokens) {
      weight = __expf(A * sums.after) * seen * scores[token * MMA_TOKENS + row] + (row == last ? D : 0.0f);
    }
    const bfloat16 high = from_float<bfloat16>(weight);
    const bfloat16 low = from_float<bfloat16>(weight - to_float(high));
    if (is_head) {
      // The words of q are: high parts of rows 2q, 2q + 1; of rows 2q + 8, 2q + 9; and the same of the low parts.
      bfloat16* words = reinterpret_cast<bfloat16*>(buffer.weights(head, token) + row % 8 / 2 * 16);
      words[row / 8 * 2 + row % 2] = high;
      words[row / 8 * 2 + row % 2 + 4] = low;
      if (row == 0) buffer.decays(head)[token] = __expf(A * sums.from);
    }
  }
}

__device__ inline void weigh_fold(const ChunkLengths& lengths, ChunkBuffer buffer, float pending, float A, int head,
                                  bool is_head) {
  const int row = threadIdx.x % HALF_WARP;
  const SuffixSums sums = suffix_sums(pending);
  if (!is_head) return;
  buffer.fold_weights(head)[row] = row < lengths.pending ? __expf(A * sums.after) * pending : 0.0f;
  if (row == 0) buffer.fold_weights(head)[MMA_TOKENS] = __expf(A * sums.from);
}

// Write the window's x and B rows to their rings: rows that this step does not read (R >= W + T). A group's B rows are
// written with the group's first head alone. One lane a token.
__device__ inline void append_rows(const ChunkTensors& tensors, const ChunkLengths& lengths, int heads_per_chunk,
                                   ChunkBuffer buffer) {
  const int lane = threadIdx.x % WARP_SIZE;
  if (lane >= lengths.num_tokens) return;
  const int staged = lengths.pending + lane, line = tensors.line(lengths.first_window_row, lane);
  ptx::store_bulk(tensors.x_ring(line), buffer.address + ChunkOffsets::X + staged * X_ROW_BYTES,
                  heads_per_chunk * HEAD_DIM * 2);
  if (tensors.chunk.first_head % HEADS_PER_GROUP == 0) {
    ptx::store_bulk(tensors.B_ring(line), buffer.address + ChunkOffsets::B + staged * BC_ROW_BYTES, D_STATE * 2);
  }
  ptx::commit_stores();
}

__device__ inline void weigh_chunk(const ChunkTensors& tensors, const ChunkLengths& lengths, int heads_per_chunk,
                                   ChunkBuffer buffer, int warp) {
  const int row = threadIdx.x % HALF_WARP, half = threadIdx.x % WARP_SIZE / HALF_WARP;
  // The loads of all heads are under way before the first is used.
  LaneTimes times[HEAD_PASSES];
#pragma unroll
  for (int pass = 0; pass < HEAD_PASSES; ++pass) {
    const int head = pass * HEADS_PER_PASS + warp * 2 + half;
    if (head < heads_per_chunk) times[pass] = load_times(tensors, lengths, tensors.chunk.first_head + head);
  }
  if (warp == 0) append_rows(tensors, lengths, heads_per_chunk, buffer);
  float* scores = buffer.at<float>(ChunkOffsets::SCORES) + warp * WINDOW * MMA_TOKENS;
  compute_scores(lengths, buffer, scores);
#pragma unroll
  for (int pass = 0; pass < HEAD_PASSES; ++pass) {
    const int warp_head = pass * HEADS_PER_PASS + warp * 2;
    if (warp_head >= heads_per_chunk) break;  // for the warp as a whole: the sums need all of its lanes
    const bool is_head = warp_head + half < heads_per_chunk;
    const int head = is_head ? warp_head + half : warp_head, model_head = tensors.chunk.first_head + head;
    const float A = tensors.params.A[model_head], D = tensors.params.D[model_head];
    weigh_outputs(lengths, buffer, scores, times[pass].seen, A, D, head, is_head);
    if (lengths.is_flush()) weigh_fold(lengths, buffer, times[pass].pending, A, head, is_head);
    const int token = row - lengths.live();
    if (is_head && token >= 0 && token < lengths.num_tokens) {
      *tensors.dt_ring(tensors.line(lengths.first_window_row, token), model_head) = times[pass].seen;
    }
  }
}

__device__ inline void weigh(const Mamba2Params& params, const Schedule& schedule, const PipelineShared& shared,
                             int warp) {
  const bool is_first_lane = threadIdx.x % WARP_SIZE == 0;
  int turn = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < schedule.num_chunks; index += gridDim.x, ++turn) {
    const ChunkBuffer buffer = shared.buffer(turn);
    ptx::barrier_wait(shared.is_chunk_full(turn), parity_of(turn, CHUNK_BUFFERS));
    const ChunkLengths lengths = buffer.lengths();
    if (lengths.is_active()) {
      weigh_chunk({params, schedule.chunk(index), lengths.slot}, lengths, schedule.heads_per_chunk, buffer, warp);
    }
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_weighed(turn));
    ptx::wait_for_stored_reads();
    __syncwarp();
    if (is_first_lane) ptx::barrier_arrive(shared.is_chunk_free(turn));
  }
}

}  // namespace replay
