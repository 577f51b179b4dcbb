// What a chunk's step sizes make of its tokens, by the warp that brings them. Lane i has TOKENS_PER_LANE neighbouring
// ones.
//
// fold_weight_j = exp(A * sum of dt after j) dt_j is what x_j B_j^T counts in the state behind the chunk, the chunk's
// decay = exp(A * sum of all dt) what is left there of the state before it. Both exponents are sums of positive
// numbers, so the checkpoint never meets a difference of prefix sums. Decays for the outputs alone are made of log2
// terms A dt log2(e) of the tokens: decay_to_t = sum over t's tile up to t, tile_weight_j = dt_j exp2(sum over j's tile
// after j). Between tiles these and the whole tiles between them are added or multiplied; within one tile the decay is
// a difference, of few tokens, none of which counts for more than LARGEST_STEP: a huge step forgets what was before it
// all the same, and does not blur its neighbours' decays.
#pragma once
#include "common/softplus.cuh"
#include "mamba2/chunked/stage.cuh"

namespace replay {

constexpr int TOKENS_PER_LANE = CHUNK_SIZE / WARP_SIZE;
static_assert(TOKENS_PER_LANE * WARP_SIZE == CHUNK_SIZE, "every lane has equally many tokens");
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LARGEST_STEP = -64.0f;
constexpr int LANES_PER_TILE = MMA_TILE / TOKENS_PER_LANE;

template <int BYTES>
struct UnsignedOf {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<2> {
  using Type = uint16_t;
};
using DtBits = UnsignedOf<sizeof(DT_TYPE)>::Type;

// As they stand in memory: the bits of a raw one, or of one from the ring. Converting a number, even composing it of
// halves, would mean to wait for it; a load may just widen it.
struct LaneTimes {
  uint32_t bits[TOKENS_PER_LANE];

  __device__ float raw(int k) const {
    const DtBits narrow = static_cast<DtBits>(bits[k]);
    DT_TYPE value;
    memcpy(&value, &narrow, sizeof(value));
    return to_float(value);
  }
};

__device__ inline LaneTimes load_times(const Tensors& tensors, const Chunk& chunk) {
  const int lane = threadIdx.x % WARP_SIZE;
  LaneTimes times;
#pragma unroll
  for (int k = 0; k < TOKENS_PER_LANE; ++k) {
    const int i = lane * TOKENS_PER_LANE + k;
    times.bits[k] = 0;
    if (i < chunk.num_ring) {
      times.bits[k] = float_to_bits(*tensors.dt_ring(tensors.row.checkpoint + chunk.first + i));
    } else if (i < chunk.count) {
      times.bits[k] = *reinterpret_cast<const DtBits*>(tensors.raw_dt_address(chunk.token(tensors.row, i)));
    }
  }
  return times;
}

// Sums over the lanes before this one and over those after it, among LANES neighbouring lanes.
template <int LANES>
__device__ inline float sum_before(float value) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int offset = 1; offset < LANES; offset *= 2) {
    const float other = __shfl_up_sync(FULL_WARP, value, offset);
    if (lane >= offset) value += other;
  }
  const float before = __shfl_up_sync(FULL_WARP, value, 1);
  return lane == 0 ? 0.0f : before;
}

template <int LANES>
__device__ inline float sum_after(float value) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int offset = 1; offset < LANES; offset *= 2) {
    const float other = __shfl_down_sync(FULL_WARP, value, offset);
    if (lane + offset < LANES) value += other;
  }
  const float after = __shfl_down_sync(FULL_WARP, value, 1);
  return lane == LANES - 1 ? 0.0f : after;
}

__device__ inline void store_decays(const Chunk& chunk, const LaneTimes& times, float A, float dt_bias,
                                    ChunkDecays& decays, float& chunk_decay) {
  const int first = threadIdx.x % WARP_SIZE * TOKENS_PER_LANE;
  float dt[TOKENS_PER_LANE], step[TOKENS_PER_LANE];
  float dt_sum = 0.0f, step_sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOKENS_PER_LANE; ++k) {
    const int i = first + k;
    dt[k] = i < chunk.num_ring ? bits_to_float(times.bits[k]) : softplus(times.raw(k) + dt_bias);
    if (i >= chunk.count) dt[k] = 0.0f;
    step[k] = fmaxf(A * dt[k] * LOG2_E, LARGEST_STEP);
    dt_sum += dt[k];
    step_sum += step[k];
  }
  float dt_after = sum_after<WARP_SIZE>(dt_sum);
  float decay_to = sum_before<LANES_PER_TILE>(step_sum), decay_from = sum_after<LANES_PER_TILE>(step_sum);
#pragma unroll
  for (int k = 0; k < TOKENS_PER_LANE; ++k) {
    decay_to += step[k];
    decays.decay_to[first + k] = decay_to;
    decays.dt[first + k] = dt[k];
  }
#pragma unroll
  for (int k = TOKENS_PER_LANE - 1; k >= 0; --k) {
    decays.tile_weight[first + k] = ptx::exp2(decay_from) * dt[k];
    decays.fold_weight[first + k] = expf(A * dt_after) * dt[k];
    dt_after += dt[k];
    decay_from += step[k];
  }
  if (first == 0) chunk_decay = expf(A * dt_after);
}

}  // namespace replay
