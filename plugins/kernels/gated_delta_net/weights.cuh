// Second room of a step: what each staged row counts for in what a token's key and query read, and in the fold.
//
// With D(j, t) the sum of g over the rows after j up to t, row j weighs exp(D(j, t)) k_j . k_t in what token t predicts,
// exp(D(j, t)) k_j . q_t in its output, and exp(D(j, last pending)) in the fold. D is a sum of numbers <= 0, never a
// difference of prefix sums, so a strong decay earlier in the ring costs no digits.
#pragma once
#include "gated_delta_net/stage.cuh"

namespace replay {

// Lanes that share one (row, token) pair.
constexpr int PAIR_LANES = 8;
constexpr int PAIRS_PER_WARP = WARP_SIZE / PAIR_LANES;

// exp(sum of g over rows first .. last); 1 when there is none. By all PAIR_LANES lanes of a pair.
__device__ inline float decay_over(const float* g, int first, int last, int lane) {
  float sum = 0.0f;
  for (int i = first + lane; i <= last; i += PAIR_LANES) sum += g[i];
  return expf(sum_over_lanes<PAIR_LANES>(sum));
}

// a . b over K numbers in shared memory. By all PAIR_LANES lanes of a pair.
__device__ inline float dot(const float* a, const float* b, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int column = 4 * lane; column < KEY_DIM; column += 4 * PAIR_LANES) {
    float left[4], right[4];
    load_as_float(a + column, left);
    load_as_float(b + column, right);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += left[i] * right[i];
  }
  return sum_over_lanes<PAIR_LANES>(sum);
}

// decay[token] of the state, and the weights of the staged rows first + i, i <= pending + token - first; the last one,
// the token's own, counts for its query alone.
__device__ inline void compute_window_weights(const Row& row, const StepShared& shared, int first) {
  const int columns = 1 + row.pending + row.num_tokens - first, pairs = row.num_tokens * columns;
  const int lane = threadIdx.x % PAIR_LANES;
  for (int base = static_cast<int>(threadIdx.x) / WARP_SIZE * PAIRS_PER_WARP; base < pairs;
       base += NUM_WARPS * PAIRS_PER_WARP) {
    const int pair = base + static_cast<int>(threadIdx.x) % WARP_SIZE / PAIR_LANES;
    const int token = pair < pairs ? pair / columns : 0, column = pair < pairs ? pair % columns : 0;
    const int own = row.pending + token, staged = first + column - 1;
    // Lanes without a row to weigh compute one that is there, for the sums over lanes, and drop it.
    const bool is_state = column == 0, is_seen = pair < pairs && staged <= own;
    const float* key = shared.keys + (is_state || !is_seen ? own : staged) * KEY_DIM;
    const float decay = decay_over(shared.g, is_state ? first : staged + 1, own, lane);
    const float with_key = dot(key, shared.keys + own * KEY_DIM, lane);
    const float with_query = dot(key, shared.queries + token * KEY_DIM, lane);
    if (lane != 0 || !is_seen) continue;
    if (is_state) {
      shared.decay[token] = decay;
    } else {
      shared.key_weights[token * HISTORY + column - 1] = decay * with_key;
      shared.query_weights[token * HISTORY + column - 1] = decay * with_query;
    }
  }
}

// fold_weights[0]: decay of the checkpoint; [1 + i]: of pending row i.
__device__ inline void compute_fold_weights(const Row& row, const StepShared& shared) {
  for (int i = threadIdx.x; i <= row.pending; i += BLOCK_THREADS) {
    float sum = 0.0f;
    for (int j = i; j < row.pending; ++j) sum += shared.g[j];
    shared.fold_weights[i] = expf(sum);
  }
}

}  // namespace replay
