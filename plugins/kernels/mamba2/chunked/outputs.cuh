// Outputs of a chunk: y_t = state_decay_t S C_t + sum over j <= t of weight_{j,t} x_j, D x_t inside the weight of t.
//
// Rows of the products are state rows, columns are tokens. Each warp has a part of S C_t for every token; it gives away
// what belongs to other splits' tokens, adds up what it is given for its own, and finishes those.
#pragma once
#include "mamba2/chunked/scores.cuh"
#include "mamba2/chunked/state.cuh"

namespace replay {

// Slot of the partial sums that the split `distance` before the owner gives: 0 .. COLUMN_SPLITS - 2.
__device__ inline void give_partials(const ChunkShared& shared, const WarpPart& part,
                                     const float (&sums)[CHUNK_TILES][2][4]) {
#pragma unroll
  for (int i = OWN_TILES; i < CHUNK_TILES; ++i) {
    float4* target = shared.partials(part.row_tile, part.token_tile(i), i / OWN_TILES - 1) + part.lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&values)[4] = sums[i][half];
      target[half * WARP_SIZE] = make_float4(values[0], values[1], values[2], values[3]);
    }
  }
}

// Add up S C_t of an own tile and let it decay.
__device__ inline void take_partials(const ChunkShared& shared, const WarpPart& part, int token_tile,
                                     float (&sums)[2][4]) {
#pragma unroll
  for (int source = 0; source < COLUMN_SPLITS - 1; ++source) {
    const float4* given = shared.partials(part.row_tile, token_tile, source) + part.lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 values = given[half * WARP_SIZE];
      sums[half][0] += values.x;
      sums[half][1] += values.y;
      sums[half][2] += values.z;
      sums[half][3] += values.w;
    }
  }
  const float* state_decay = shared.decays().state_decay + token_tile * MMA_TILE + 2 * part.q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 decay = *reinterpret_cast<const float2*>(state_decay + 8 * half);
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[half][k] *= k % 2 ? decay.y : decay.x;
  }
}

__device__ inline bool is_finite(bfloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }

// What was cleared from a tile spoils the outputs of its own token and of those after it.
__device__ inline void spoil_outputs(const ChunkShared& shared, const WarpPart& part, int tile, float (&sums)[2][4]) {
#pragma unroll 1
  for (int j = 0; j < MMA_TILE; ++j) {
    const bfloat16* x = shared.x(tile * MMA_TILE + j) + part.row_tile * MMA_TILE + part.g;
    const bool is_spoilt[2] = {!is_finite(x[0]), !is_finite(x[8])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (is_spoilt[k / 2] && j <= 8 * half + 2 * part.q + k % 2) sums[half][k] = bits_to_float(0x7fc00000u);
      }
    }
  }
}

// sums += x W^T for the own tiles, over the tokens j of the tiles up to each. In its last tile a token must not reach
// those before it, and zero times what is not finite would: that goes by another way.
__device__ inline void multiply_tokens(const ChunkShared& shared, const WarpPart& part,
                                       float (&sums)[CHUNK_TILES][2][4]) {
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES; ++tile) {
    uint32_t x[4];
    load_x(shared, part, tile, x);
#pragma unroll
    for (int i = OWN_TILES - 1; i >= 0; --i) {
      const int token_tile = part.token_tile(i);
      if (tile > token_tile) continue;
      uint32_t high[4], low[4];
      const uint32_t weights = shared.address + ChunkShared::weights_offset(token_tile, tile) + part.lane * 16;
      ptx::load_matrices(high, weights);
      ptx::load_matrices(low, weights + PART_BYTES);
      const bool is_spoilt = tile == token_tile && __any_sync(FULL_WARP, has_non_finite(x));
      uint32_t finite_x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) finite_x[k] = x[k];
      if (is_spoilt) clear_non_finite(finite_x);
#pragma unroll
      for (int half = 0; half < 2; ++half) ptx::mma_bf16(sums[i][half], finite_x, low[2 * half], low[2 * half + 1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) ptx::mma_bf16(sums[i][half], finite_x, high[2 * half], high[2 * half + 1]);
      if (is_spoilt) spoil_outputs(shared, part, tile, sums[i]);
    }
  }
}

// Write the outputs of an own tile, rounded once. `y` is the slice's output of the chunk's first row.
__device__ inline void store_outputs(ACTIVATION_TYPE* y, const WarpPart& part, int token_tile, int first, int count,
                                     const float (&sums)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = token_tile * MMA_TILE + 8 * half + part.g;
    const uint32_t words[2] = {ptx::transpose(pack_bf16(sums[half][0], sums[half][1])),
                               ptx::transpose(pack_bf16(sums[half][2], sums[half][3]))};
    if (i < first || i >= count) continue;
    uint32_t* target = reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(i) * (N_HEADS * HEAD_DIM) +
                                                   part.row_tile * MMA_TILE) + part.q;
    target[0] = words[0];
    target[4] = words[1];
  }
}

__device__ inline void finish_outputs(const Tensors& tensors, int first_channel, const Chunk& chunk,
                                      const ChunkShared& shared, const WarpPart& part,
                                      float (&sums)[CHUNK_TILES][2][4]) {
#pragma unroll
  for (int i = 0; i < OWN_TILES; ++i) take_partials(shared, part, part.token_tile(i), sums[i]);
  multiply_tokens(shared, part, sums);
  ACTIVATION_TYPE* y = tensors.y(chunk.token(tensors.row, 0)) + first_channel;
#pragma unroll
  for (int i = 0; i < OWN_TILES; ++i) {
    const int token_tile = part.token_tile(i);
    store_outputs(y, part, token_tile, chunk.num_ring, chunk.count, sums[i]);
  }
}

}  // namespace replay
