// The coefficient warps: what each token counts for in what the window's keys and queries read, and in the fold; and
// the window's ring rows of k and g.
//
// With D(j, t) the sum of g over the rows after j up to t, token t's key reads of the checkpoint S and of the rows' u
//   exp(D(first, t)) S^T k_t + sum over j of exp(D(j, t)) (k_j . k_t) u_j, all k at length 1,
// its query likewise, and row j weighs exp(D(j, last pending)) k_j in the fold. For a pending row D(j, t) is in two
// parts, D(j, last pending) and the window's; so is its weight: the first part times k_j raw . k_t raw, with the factor
// of k_j's length; the second, with that of k_t's, scales all that the key reads. D is a sum of numbers <= 0 and never
// a difference. Rows that are not there are chosen away, so no dead memory reaches a weight.
#pragma once
#include "common/pipeline/loading.cuh"
#include "common/softplus.cuh"
#include "gated_delta_net/pipeline/products.cuh"

namespace replay {

constexpr float LOG2_E = 1.44269504f;

__device__ inline float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-LOG2_E * x)); }

// What a half warp knows of one head before the products: lane i of pending row i and of window token i.
struct HeadGates {
  float g, beta;         // of the token; g as the ring has it
  float window;          // the same for powers of 2; 0 where there is no token
  float kept, decay;     // what is left of the row, and of the checkpoint, at the last pending row; of no row 0

  __device__ HeadGates(const ChunkTensors& tensors, ChunkBuffer buffer, int head) {
    const RowLengths& lengths = tensors.chunk.lengths;
    const int row = threadIdx.x % HALF_WARP, token = min(row, WINDOW - 1);
    const float rate = -ptx::exp2(LOG2_E * buffer.constants(A_LOG)[head]);
    const float a = number_in(*buffer.raw_gate(GATE_A, head, token), tensors.raw_gate(GATE_A, token, head));
    const float b = number_in(*buffer.raw_gate(GATE_B, head, token), tensors.raw_gate(GATE_B, token, head));
    const float ring_g = buffer.g(head)[min(row, HISTORY - 1)];
    const SuffixSums sums = suffix_sums(row < lengths.pending ? LOG2_E * ring_g : 0.0f);
    kept = row < lengths.pending ? ptx::exp2(sums.after) : 0.0f;
    decay = ptx::exp2(sums.from);  // of lane 0
    g = rate * softplus(a + buffer.constants(DT_BIAS)[head]);
    beta = sigmoid(b);
    window = row < lengths.num_tokens ? LOG2_E * g : 0.0f;
  }
};

// The weights of the pending rows in what the window's keys and queries read of u, but for the columns' scales.
__device__ inline void weigh_pending(const RowLengths& lengths, ChunkBuffer buffer, const KeyProducts& products,
                                     float row_weight, int half, int head) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = g + 8 * i;
    const float of_row = __shfl_sync(FULL_WARP, row_weight, half * HALF_WARP + row);
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      const int token = q + TOKENS_PER_BLOCK * b;
      if (token >= WINDOW) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float weight = of_row * products.pending[b][2 * i + k];
        buffer.weights(head, 2 * token + k)[row % 4 * 4 + row / 4] = row < lengths.pending ? weight : 0.0f;
      }
    }
  }
}

// The scales of what the window's keys and queries read, and what they read of the window's own u.
__device__ inline void weigh_window(ChunkBuffer buffer, const KeyProducts& products, float window_g, int half,
                                    int head) {
  const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
  // Of tokens t = q (+ 4): sums of g up to it, and after tokens s = g / 2 (+ 4) up to it.
  float since_start[TOKEN_BLOCKS] = {}, since_token[TOKEN_BLOCKS][TOKEN_BLOCKS] = {};
#pragma unroll
  for (int r = 0; r < WINDOW; ++r) {
    const float of_token = __shfl_sync(FULL_WARP, window_g, half * HALF_WARP + r);
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      if (r <= q + TOKENS_PER_BLOCK * b) since_start[b] += of_token;
#pragma unroll
      for (int a = 0; a < TOKEN_BLOCKS; ++a) {
        const bool is_after = r > g / 2 + TOKENS_PER_BLOCK * a;
        if (is_after && r <= q + TOKENS_PER_BLOCK * b) since_token[a][b] += of_token;
      }
    }
  }
  float source_factors[TOKEN_BLOCKS];
#pragma unroll
  for (int a = 0; a < TOKEN_BLOCKS; ++a) source_factors[a] = products.column_factor(a, g / 2 * 2);
#pragma unroll
  for (int b = 0; b < TOKEN_BLOCKS; ++b) {
    const int t = q + TOKENS_PER_BLOCK * b;
    const float key_factor = products.column_factor(b, 2 * q);
    const float query_factor = products.column_factor(b, 2 * q + 1) * (1.0f / sqrtf(static_cast<float>(KEY_DIM)));
    TokenWeights& weights = buffer.token(head, min(t, WINDOW - 1));
    if (g == 0 && t < WINDOW) {
      const float decay = ptx::exp2(since_start[b]);
      weights.scales = {decay * key_factor, decay * query_factor};
    }
#pragma unroll
    for (int a = 0; a < TOKEN_BLOCKS; ++a) {
      const int s = g / 2 + TOKENS_PER_BLOCK * a;
      if (g % 2 == 1 || s > t || t >= WINDOW) continue;
      const float decay = ptx::exp2(since_token[a][b]) * source_factors[a];
      weights.pairs[s] = {decay * key_factor * products.window[b][2 * a],
                          decay * query_factor * products.window[b][2 * a + 1]};
    }
  }
}

// Write the window's g to the ring, one lane a token: rows that this step does not read (R >= W + T).
__device__ inline void append_g(const ChunkTensors& tensors, const HeadGates& gates, int head) {
  const int token = threadIdx.x % HALF_WARP;
  if (token < tensors.chunk.lengths.num_tokens) *tensors.g_ring(tensors.window_line(token), head) = gates.g;
}

// The same of k, as it came, with the key head's first head alone.
__device__ inline void append_keys(const ChunkTensors& tensors, ChunkBuffer buffer, int warp) {
  constexpr int PIECES = KEY_DIM / 8;
  const Chunk& chunk = tensors.chunk;
  if (chunk.first_head % HEADS_PER_KEY != 0) return;
  const int thread = warp * WARP_SIZE + threadIdx.x % WARP_SIZE;
#pragma unroll 1
  for (int i = thread; i < chunk.lengths.num_tokens * PIECES; i += TEAM_WARPS * WARP_SIZE) {
    const int token = i / PIECES, piece = i % PIECES;
    const unsigned char* source = buffer.window_key(token) + piece * 16;
    reinterpret_cast<Vector16*>(tensors.k_ring(tensors.window_line(token)))[piece] =
        *reinterpret_cast<const Vector16*>(source);
  }
}

// One chunk, of which g and gates are there.
__device__ inline void weigh_chunk(const ChunkTensors& tensors, const PipelineShared& shared, int warp,
                                   const Turn<CHUNK_BUFFERS>& turn) {
  const Chunk& chunk = tensors.chunk;
  const ChunkBuffer buffer = shared.buffer(turn.index());
  const int lane = threadIdx.x % WARP_SIZE, row = lane % HALF_WARP;
  // A half warp without a head goes along: sums and products need all lanes.
  const int own_head = warp * 2 + lane / HALF_WARP, head = min(own_head, chunk.num_heads - 1);
  const bool is_head = own_head == head, is_active = chunk.lengths.is_active();
  const HeadGates gates(tensors, buffer, head);
  if (is_active && is_head && row < WINDOW) buffer.token(head, row).beta = gates.beta;
  ptx::barrier_wait(shared.is_loaded(KEYS_LOADER, turn.index()), turn.parity());
  if (is_active) {
    const KeyProducts products(buffer);
    const float weighed = gates.kept * products.row_factor();
    const float row_weight = row < chunk.lengths.pending ? weighed : 0.0f;
    if (is_head) {
      buffer.row_weights(head)[row] = row_weight;
      if (row == 0) buffer.row_weights(head)[MMA_TOKENS] = gates.decay;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (warp * 2 + half >= chunk.num_heads) break;
      weigh_pending(chunk.lengths, buffer, products, row_weight, half, warp * 2 + half);
      weigh_window(buffer, products, gates.window, half, warp * 2 + half);
    }
  }
  arrive_as_warp(shared.is_chunk_weighed(turn.index()));
  if (is_active && is_head) append_g(tensors, gates, head);
  if (is_active) append_keys(tensors, buffer, warp);
}

// Teams of warps take the chunks in turn.
__device__ inline void weigh(const GatedDeltaNetParams& params, const PipelineShared& shared, int weigher) {
  const int warp = weigher % TEAM_WARPS;
  Turn<CHUNK_BUFFERS> turn(weigher / TEAM_WARPS);
#pragma unroll 1
  for (;; turn.advance(COEFFICIENT_TEAMS)) {
    ptx::barrier_wait(shared.is_chunk_known(turn.index()), turn.parity());
    const Chunk chunk = shared.buffer(turn.index()).chunk();
    if (chunk.num_heads == 0) return;
    ptx::barrier_wait(shared.is_loaded(GATES_LOADER, turn.index()), turn.parity());
    weigh_chunk({params, chunk}, shared, warp, turn);
    arrive_as_warp(shared.is_chunk_free(turn.index()));
  }
}

}  // namespace replay
