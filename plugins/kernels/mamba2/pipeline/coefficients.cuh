// The coefficient warps: what each token row counts for in each output and in the fold; and the window's ring rows.
//
// With D(j, t) the sum of dt over the rows after j up to t, row j weighs exp(A D(j, t)) dt_j (B_j . C_t) in token t, and
// exp(A D(j, last pending)) dt_j in the fold. D is a sum of positive numbers and never a difference. A half warp
// computes one head at a time: lane i has the i-th row that the outputs see, and the i-th pending row. Rows that are
// not there have dt 0 and are chosen away, so no dead memory reaches a weight.
#pragma once
#include "common/mma.cuh"
#include "common/pipeline/loading.cuh"
#include "common/softplus.cuh"
#include "common/suffix_sums.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

// Scores B_i . C_t of the rows i that the outputs see, which the heads of a group share; in the order of a product's
// sums, with i down and t across. What stands in rows that are not there, NaN even, stays in its row or column.
struct Scores {
  float sums[ROW_GROUPS][4];

  __device__ Scores(const RowLengths& lengths, ChunkBuffer buffer) {
    const int lane = threadIdx.x % WARP_SIZE, part = lane / 8;
    const uint32_t tokens = buffer.address + ChunkOffsets::C + min(lane % 8, WINDOW - 1) * BC_ROW_BYTES + part * 16;
    uint32_t rows[ROW_GROUPS];
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const int row = min(lengths.first() + group * MMA_TOKENS + lane % 8 + part % 2 * 8, TOKEN_ROWS - 1);
      rows[group] = buffer.address + ChunkOffsets::B + row * BC_ROW_BYTES + part / 2 * 16;
    }
    float halves[ROW_GROUPS][2][4] = {};  // so that products need not wait for each other
#pragma unroll
    for (int m = 0; m < D_STATE / 32; ++m) {
      uint32_t c[4];
      ptx::load_matrices(c, tokens + m * 64);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group) {
          uint32_t b[4];
          ptx::load_matrices(b, rows[group] + m * 64 + k * 32);
          ptx::mma_bf16(halves[group][k], b, c[2 * k], c[2 * k + 1]);
        }
      }
    }
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[group][i] = halves[group][0][i] + halves[group][1][i];
    }
  }

  // Of the half warp's lane's row in a group.
  __device__ float of(int group, int token) const {
    const int row = threadIdx.x % HALF_WARP, source = row % 8 * 4 + token / 2;
    const float upper = __shfl_sync(FULL_WARP, sums[group][token % 2], source);
    const float lower = __shfl_sync(FULL_WARP, sums[group][2 + token % 2], source);
    return row < 8 ? upper : lower;
  }
};

// dt of a window token, after softplus.
__device__ inline float window_time(const ChunkTensors& tensors, ChunkBuffer buffer, int head, int token) {
  const float raw = number_in(*buffer.raw_time(head, token), tensors.raw_dt(token, head));
  return softplus(raw + buffer.constants(2)[head]);
}

// What a lane knows of one head before the scores: in each group, dt of its row among those that the outputs see, and
// the sums over the pending rows.
struct HeadTimes {
  float A, D;  // A for powers of 2
  float pending[ROW_GROUPS], seen[ROW_GROUPS];
  SuffixSums sums[ROW_GROUPS];

  __device__ HeadTimes(const ChunkTensors& tensors, ChunkBuffer buffer, int head) {
    const RowLengths& lengths = tensors.chunk.lengths;
    constexpr float LOG2_E = 1.44269504f;
    A = buffer.constants(0)[head] * LOG2_E;
    D = buffer.constants(1)[head];
    float beyond = 0.0f;
#pragma unroll
    for (int group = ROW_GROUPS - 1; group >= 0; --group) {
      const int row = group * MMA_TOKENS + threadIdx.x % HALF_WARP, token = row - lengths.live();
      // Read in any case, and then chosen: branches take longer.
      const float time = window_time(tensors, buffer, head, min(max(token, 0), WINDOW - 1));
      const float ring_time = buffer.pending_times(head)[min(row, HISTORY - 1)];
      pending[group] = row < lengths.pending ? ring_time : 0.0f;
      seen[group] = token < 0 ? pending[group] : token < lengths.num_tokens ? time : 0.0f;
      sums[group] = suffix_sums(pending[group], beyond);
      if (group > 0) beyond = __shfl_sync(FULL_WARP, sums[group].from, 0, HALF_WARP);
    }
  }

  // Of a row that the outputs see.
  __device__ float seen_at(int row) const {
    float time = __shfl_sync(FULL_WARP, seen[0], row, HALF_WARP);
    if constexpr (ROW_GROUPS == 2) {
      const float later = __shfl_sync(FULL_WARP, seen[1], row, HALF_WARP);
      time = row < MMA_TOKENS ? time : later;
    }
    return time;
  }
};

// The weights of one head's window tokens, in two bfloat16 parts, and what is left of the checkpoint at each token. D
// is added to a token's weight on its own row. `is_head` is false where the half warp has no head of the chunk.
__device__ inline void weigh_outputs(const RowLengths& lengths, ChunkBuffer buffer, const Scores& scores,
                                     const HeadTimes& times, int head, bool is_head) {
  const int place = threadIdx.x % HALF_WARP;
  // Over the live pending rows; the window's dt are added token by token.
  const float pending_time = __shfl_sync(FULL_WARP, times.sums[0].from, 0, HALF_WARP);
  float since_checkpoint = lengths.is_flush() ? 0.0f : pending_time;
  float since_row[ROW_GROUPS];
#pragma unroll
  for (int group = 0; group < ROW_GROUPS; ++group) {
    since_row[group] = group * MMA_TOKENS + place < lengths.live() ? times.sums[group].after : 0.0f;
  }
#pragma unroll
  for (int token = 0; token < WINDOW; ++token) {
    const int last = lengths.live() + token;
    const float dt = times.seen_at(last);
    since_checkpoint += dt;
#pragma unroll
    for (int group = 0; group < ROW_GROUPS; ++group) {
      const int row = group * MMA_TOKENS + place;
      since_row[group] += row < last ? dt : 0.0f;
      const float of_row = ptx::exp2(times.A * since_row[group]) * times.seen[group] * scores.of(group, token);
      const float of_token = of_row + (row == last ? times.D : 0.0f);
      const float weight = row <= last && token < lengths.num_tokens ? of_token : 0.0f;
      const uint32_t high = pack_bf16(weight, 0.0f), low = pack_bf16(weight - low_bf16(high), 0.0f);
      if (is_head) {
        // The words of q are: high parts of rows 2q, 2q + 1; of rows 2q + 8, 2q + 9; and the same of the low parts.
        uint16_t* words = reinterpret_cast<uint16_t*>(buffer.weights(head, token, group) + place % 8 / 2 * 16);
        words[place / 8 * 2 + place % 2] = static_cast<uint16_t>(high);
        words[place / 8 * 2 + place % 2 + 4] = static_cast<uint16_t>(low);
      }
    }
    const float decay = ptx::exp2(times.A * since_checkpoint);
    if (is_head && place == 0) buffer.decays(head)[token] = decay;
  }
}

__device__ inline void weigh_fold(const RowLengths& lengths, ChunkBuffer buffer, const HeadTimes& times, int head) {
  const int place = threadIdx.x % HALF_WARP;
#pragma unroll
  for (int group = 0; group < ROW_GROUPS; ++group) {
    const int row = group * MMA_TOKENS + place;
    const float weight = ptx::exp2(times.A * times.sums[group].after) * times.pending[group];
    buffer.fold_weights(head)[row] = row < lengths.pending ? weight : 0.0f;
  }
  if (place == 0) buffer.fold_weights(head)[FOLD_DECAY] = ptx::exp2(times.A * times.sums[0].from);
}

// Write the window's dt to the ring, one lane a token: rows that this step does not read (R >= W + T).
__device__ inline void append_times(const ChunkTensors& tensors, const HeadTimes& times, int head) {
  const RowLengths& lengths = tensors.chunk.lengths;
#pragma unroll
  for (int group = 0; group < ROW_GROUPS; ++group) {
    const int token = group * MMA_TOKENS + threadIdx.x % HALF_WARP - lengths.live();
    if (token < 0 || token >= lengths.num_tokens) continue;
    *tensors.dt_ring(tensors.window_line(token), head) = times.seen[group];
  }
}

// The same of x and B. A group's B rows are written with the group's first head alone.
__device__ inline void append_rows(const ChunkTensors& tensors, ChunkBuffer buffer, int warp) {
  const Chunk& chunk = tensors.chunk;
  const int thread = warp * WARP_SIZE + threadIdx.x % WARP_SIZE;
  const bool is_group_start = chunk.first_head % HEADS_PER_GROUP == 0;
  const int x_pieces = chunk.num_heads * HEAD_DIM / 8, B_pieces = is_group_start ? D_STATE / 8 : 0;
#pragma unroll 1
  for (int token = 0; token < chunk.lengths.num_tokens; ++token) {
    const int line = tensors.window_line(token), row = chunk.lengths.pending + token;
#pragma unroll 1
    for (int piece = thread; piece < x_pieces + B_pieces; piece += TEAM_WARPS * WARP_SIZE) {
      const bool is_x = piece < x_pieces;
      const unsigned char* source = is_x ? buffer.x(row) + piece * 16 : buffer.B(row) + (piece - x_pieces) * 16;
      ACTIVATION_TYPE* target = is_x ? tensors.x_ring(line) + piece * 8 : tensors.B_ring(line) + (piece - x_pieces) * 8;
      *reinterpret_cast<Vector16*>(target) = *reinterpret_cast<const Vector16*>(source);
    }
  }
}

// One chunk, of which dt is there.
template <typename ConvolutionPart>
__device__ inline void weigh_chunk(const ChunkTensors& tensors, ConvolutionPart& convolution,
                                   const PipelineShared& shared, int warp, const Turn<CHUNK_BUFFERS>& turn) {
  const Chunk& chunk = tensors.chunk;
  const ChunkBuffer buffer = shared.buffer(turn.index());
  // A half warp without a head goes along: sums and products need all lanes.
  const int own_head = warp * 2 + threadIdx.x % WARP_SIZE / HALF_WARP, head = min(own_head, chunk.num_heads - 1);
  const bool is_head = own_head == head, is_active = chunk.lengths.is_active(), is_flush = chunk.lengths.is_flush();
  const HeadTimes times(tensors, buffer, head);
  if (is_active && is_flush && is_head) weigh_fold(chunk.lengths, buffer, times, head);
  convolution.make_B_and_C(shared, turn);
  ptx::barrier_wait(shared.is_ready(BC_LOADER, turn.index()), turn.parity());
  if (is_active) weigh_outputs(chunk.lengths, buffer, Scores(chunk.lengths, buffer), times, head, is_head);
  arrive_as_warp(shared.is_chunk_weighed(turn.index()));
  if (is_active && is_head) append_times(tensors, times, head);
}

// Teams of warps take the chunks in turn.
template <typename Convolution>
__device__ inline void weigh(const Mamba2Params& params, const Convolution& convolution, const PipelineShared& shared,
                             int weigher) {
  const int warp = weigher % TEAM_WARPS;
  Turn<CHUNK_BUFFERS> turn(weigher / TEAM_WARPS);
#pragma unroll 1
  for (;; turn.advance(COEFFICIENT_TEAMS)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const ChunkBuffer buffer = shared.buffer(turn.index());
    const Chunk chunk = buffer.chunk();
    if (chunk.num_heads == 0) return;
    typename Convolution::Part part(convolution, chunk, warp);
    ptx::barrier_wait(shared.is_loaded(TIMES_LOADER, turn.index()), turn.parity());
    weigh_chunk({params, chunk}, part, shared, warp, turn);
    part.make_x(shared, turn);
    ptx::barrier_wait(shared.is_ready(X_LOADER, turn.index()), turn.parity());
    if (chunk.lengths.is_active()) append_rows({params, chunk}, buffer, warp);
    arrive_as_warp(shared.is_chunk_free(turn.index()));
  }
}

}  // namespace replay
