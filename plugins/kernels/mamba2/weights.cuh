// Second room of a step: what each staged row counts for in each output, and in the fold.
//
// With D(j, t) the sum of dt over the rows after j up to t, row j weighs exp(A D(j, t)) dt_j (B_j . C_t) in token t and
// exp(A D(j, last pending)) dt_j in the fold. D is a sum of positive numbers, never a difference of prefix sums, so a
// large dt earlier in the ring costs no digits; A is negative, so only numbers <= 0 are exponentiated.
#pragma once
#include "mamba2/stage.cuh"

namespace replay {

// Lanes that share one (row, token) pair.
constexpr int PAIR_LANES = 8;
constexpr int PAIRS_PER_WARP = WARP_SIZE / PAIR_LANES;

// exp(A * sum of dt over rows first .. last); 1 when there is none. By all PAIR_LANES lanes of a pair.
__device__ inline float decay_over(const float* dt, int first, int last, float A, int lane) {
  float sum = 0.0f;
  for (int i = first + lane; i <= last; i += PAIR_LANES) sum += dt[i];
  return expf(A * sum_over_lanes<PAIR_LANES>(sum));
}

// B_row . C_token in fp32; the group of heads shares it. By all PAIR_LANES lanes of a pair.
__device__ inline float group_score(const ACTIVATION_TYPE* B_row, const ACTIVATION_TYPE* C_token, int lane) {
  constexpr int VECTOR = elements_per_vector<ACTIVATION_TYPE>;
  float sum = 0.0f;
#pragma unroll
  for (int column = lane * VECTOR; column < D_STATE; column += PAIR_LANES * VECTOR) {
    float b[VECTOR], c[VECTOR];
    load_as_float(B_row + column, b);
    load_as_float(C_token + column, c);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum += b[i] * c[i];
  }
  return sum_over_lanes<PAIR_LANES>(sum);
}

// shared.weights[token][0]: decay of the checkpoint; [token][1 + i]: weight of staged row first + i, i <= pending +
// token - first. D is added to a token's weight on its own x.
__device__ inline void compute_window_weights(const Row& row, const StepShared& shared, int first, float A, float D) {
  const int rows = 1 + row.pending + row.num_tokens - first, pairs = row.num_tokens * rows;
  const int lane = threadIdx.x % PAIR_LANES;
  // The bound depends on the warp alone: the sums over lanes need all of its lanes.
  for (int base = threadIdx.x / WARP_SIZE * PAIRS_PER_WARP; base < pairs; base += NUM_WARPS * PAIRS_PER_WARP) {
    const int pair = base + threadIdx.x % WARP_SIZE / PAIR_LANES;
    const bool is_pair = pair < pairs;
    const int token = is_pair ? pair / rows : 0, column = is_pair ? pair % rows : 0;
    const int last = row.pending + token, staged = first + column - 1;
    float weight = decay_over(shared.dt, staged + 1, last, A, lane);
    // Column 0 has no row of its own; its score is computed on row `first` and dropped.
    const int scored = max(first, min(staged, last));
    const float score = group_score(shared.B + scored * D_STATE, shared.C + token * D_STATE, lane);
    if (column > 0) weight *= shared.dt[scored] * score;
    if (staged == last) weight += D;
    if (is_pair && staged <= last && lane == 0) shared.weights[token * WEIGHTS_PER_TOKEN + column] = weight;
  }
}

// shared.fold_weights[0]: decay of the checkpoint over the pending rows; [1 + i]: weight of pending row i.
__device__ inline void compute_fold_weights(const Row& row, const StepShared& shared, float A) {
  const int lane = threadIdx.x % PAIR_LANES;
  for (int base = threadIdx.x / WARP_SIZE * PAIRS_PER_WARP; base <= row.pending; base += NUM_WARPS * PAIRS_PER_WARP) {
    const int column = base + threadIdx.x % WARP_SIZE / PAIR_LANES;
    float weight = decay_over(shared.dt, column, row.pending - 1, A, lane);
    if (column > 0 && column <= row.pending) weight *= shared.dt[column - 1];
    if (column <= row.pending && lane == 0) shared.fold_weights[column] = weight;
  }
}

}  // namespace replay
