// What a chunk's gates make of its tokens, by a solver warp; lane i has token i.
//
// Every exponent is a sum of log decays, numbers <= 0, over just the tokens that it spans. None is a difference of
// prefix sums: a strong decay anywhere in the chunk would cost the others their digits. Decays between two tokens of a
// block of eight stand in a table; between blocks they are products of what is left behind j's block of what j left, the
// decays of whole blocks, and what is left up to t of what stood before t's block.
#pragma once
#include "gated_delta_net/chunked/load.cuh"

namespace replay {

constexpr float LOG2_E = 1.4426950408889634f;

// A lane's token: beta and its log decay, with the sums of those up to it and of those after it, in the block and in the
// chunk.
struct LaneGates {
  float beta, g;
  float block_to, block_after;
  float to, after;

  // What no finite number stands for, a gate or a key, is a beta that is NaN: so u and all that builds on it will be.
  __device__ void spoil() { beta = bits_to_float(0x7fc00000u); }

  __device__ LaneGates(const GateWeights& weights, const Chunk& chunk, const RawGates& raw) {
    const int lane = fresh_lane(), block = lane / 8;
    g = chunk.is_ring ? raw.g : weights.g(RawGates::value(raw.a_bits));
    beta = ptx::reciprocal(1.0f + ptx::exp2(-LOG2_E * to_float(RawGates::value(raw.b_bits))));
    // Tokens that are not there change nothing, and have no u.
    if (lane >= chunk.count) g = beta = 0.0f;
    if (!(g <= 0.0f)) {
      g = 0.0f;
      spoil();
    }
    block_to = g;
    float from = g;
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) {
      const float before = __shfl_up_sync(FULL_WARP, block_to, offset, 8);
      const float behind = __shfl_down_sync(FULL_WARP, from, offset, 8);
      if (lane % 8 >= offset) block_to += before;
      if (lane % 8 + offset < 8) from += behind;
    }
    block_after = __shfl_down_sync(FULL_WARP, from, 1, 8);
    if (lane % 8 == 7) block_after = 0.0f;
    to = after = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_BLOCKS; ++i) {
      const float whole = __shfl_sync(FULL_WARP, block_to, 8 * i + 7);
      to += i < block ? whole : 0.0f;
      after += i > block ? whole : 0.0f;
    }
    to += block_to;
    after += block_after;
  }
};

// All that needs no key: decays within blocks, between them and to their ends. Afterwards __syncwarp().
__device__ inline void store_decays(const Stage& stage, const LaneGates& gates) {
  const int lane = fresh_lane();
  const float block_decay = ptx::exp2(gates.block_to * LOG2_E);
  stage.coefficients(BLOCK_TO)[lane] = block_decay;
  stage.coefficients(BLOCK_FROM)[lane] = ptx::exp2(gates.block_after * LOG2_E);
  if (lane % 8 == 7) stage.coefficients(DECAYS)[lane / 8] = block_decay;
  const float step = gates.g * LOG2_E;
  float* row = stage.decays_from(lane);
  float sum = 0.0f;
  row[lane % 8] = 1.0f;
#pragma unroll 1
  for (int i = 1; i < 8; ++i) {
    sum += __shfl_down_sync(FULL_WARP, step, i, 8);
    if (lane % 8 + i < 8) row[lane % 8 + i] = ptx::exp2(sum);
  }
}

// The coefficients, with the sums of squares of the tokens' k and q. Afterwards __syncwarp().
__device__ inline void store_coefficients(const Stage& stage, const LaneGates& gates, float k_squares, float q_squares) {
  const int lane = fresh_lane();
  const float key_scale = ptx::rsqrt(k_squares + NORM_EPS), scale = query_scale() * ptx::rsqrt(q_squares + NORM_EPS);
  const float decay = ptx::exp2(gates.to * LOG2_E);
  stage.coefficients(BETA)[lane] = gates.beta;
  stage.coefficients(READ_WEIGHT)[lane] = gates.beta * (decay * key_scale);
  // NaN where the token is spoilt: a pending row has its u already.
  stage.coefficients(FOLD_WEIGHT)[lane] = fmaf(gates.beta, 0.0f, ptx::exp2(gates.after * LOG2_E) * key_scale);
  stage.coefficients(OUTPUT_WEIGHT)[lane] = decay * scale;
  stage.coefficients(ROW_WEIGHT)[lane] = gates.beta >= 0.0f ? gates.beta * key_scale : 0.0f;
  stage.coefficients(KEY_SCALE)[lane] = key_scale;
  stage.coefficients(QUERY_SCALE)[lane] = scale;
  if (lane == WARP_SIZE - 1) stage.coefficients(DECAYS)[CHUNK_DECAY] = decay;
}

}  // namespace replay
