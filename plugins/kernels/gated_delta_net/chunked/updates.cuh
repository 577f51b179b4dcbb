// The u of a chunk: the inverse of I + A times beta (v - what the decayed state says of k), by a state warp for its columns.
#pragma once
#include "gated_delta_net/chunked/state.cuh"

namespace replay {

// The right side, beta (v - what is left of the state says of k). `reads` become it.
__device__ inline void subtract_reads(const Stage& stage, const WarpPart& part, TokenValues& reads) {
#pragma unroll
  for (int tile = 0; tile < TOKEN_TILES; ++tile) {
    const int row = tile * MMA_TILE + part.lane % 8 + part.lane / 16 * 8, piece = 2 * part.value_tile + part.lane / 8 % 2;
    uint32_t v[4];
    ptx::load_transposed(v, stage.address + StageOffsets::V + row * V_ROW_BYTES + piece * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile * MMA_TILE + half * 8 + 2 * part.q;
      const float2 beta = stage.coefficient_pair(BETA, token), weight = stage.coefficient_pair(READ_WEIGHT, token);
      float(&block)[4] = reads.blocks[2 * tile + half];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = v[2 * half + i];
        block[2 * i] = fmaf(-weight.x, block[2 * i], beta.x * low_bf16(pair));
        block[2 * i + 1] = fmaf(-weight.y, block[2 * i + 1], beta.y * high_bf16(pair));
      }
    }
  }
}

// u = T right: parts by parts, without those of two small ones, small ones first. Each tile of T has sums of its own, so
// that products of one sum are apart and overlap.
__device__ inline void multiply_inverse(const Stage& stage, const WarpPart& part, const TokenParts<STATE_PARTS>& right,
                                        TokenValues& u) {
  float sums[TILE_PAIRS][2][4] = {};
#pragma unroll
  for (int which = STATE_PARTS - 1; which >= 0; --which) {
    uint32_t T[TILE_PAIRS][4];
#pragma unroll
    for (int i = 0; i < TILE_PAIRS; ++i) {
      ptx::load_transposed(T[i], stage.inverse_address(i, which, part.lane));
    }
#pragma unroll
    for (int other = STATE_PARTS - 1 - which; other >= 0; --other) {
#pragma unroll
      for (int i = 0; i < TILE_PAIRS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_bf16(sums[i][half], right.words[other][Stage::source_tile(i)], T[i][2 * half], T[i][2 * half + 1]);
        }
      }
    }
  }
  u = {};
#pragma unroll
  for (int i = 0; i < TILE_PAIRS; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) u.blocks[2 * Stage::token_tile(i) + j / 4][j % 4] += sums[i][j / 4][j % 4];
  }
}

// Is any number of the warp's not finite? Zero times a finite number is zero; else it is NaN, which stays.
__device__ inline bool is_any_spoilt(const TokenValues& values) {
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j % 2] = fmaf(values.blocks[i][j], 0.0f, sums[j % 2]);
  }
  return __any_sync(FULL_WARP, sums[0] + sums[1] != 0.0f);
}

// Of columns g and g + 8: the first token whose value is not finite, CHUNK_SIZE if all are. It must not reach those before
// it, as it would where products take it times zero: it goes by another way.
struct FirstSpoilt {
  bool is_any = false;
  int tokens[2] = {CHUNK_SIZE, CHUNK_SIZE};

  // Find it, and replace what is not finite by zero.
  __device__ void take_out(const WarpPart& part, TokenValues& values) {
    is_any = true;
#pragma unroll
    for (int i = 0; i < TOKEN_BLOCKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (is_finite(values.blocks[i][j])) continue;
        values.blocks[i][j] = 0.0f;
        tokens[j / 2] = min(tokens[j / 2], 8 * i + 2 * part.q + j % 2);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        tokens[half] = min(tokens[half], __shfl_xor_sync(FULL_WARP, tokens[half], offset));
      }
    }
  }

  // Make what stands at its token and after it NaN; the blocks' first token is `first_token`.
  template <int BLOCKS>
  __device__ void put_back(const WarpPart& part, int first_token, float (&blocks)[BLOCKS][4]) const {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first_token + 8 * i + 2 * part.q + j % 2 >= tokens[j / 2]) blocks[i][j] = bits_to_float(0x7fc00000u);
      }
    }
  }
};

// From what the state says of the chunk's keys to u, but for what is not finite. Mostly all is; then there is one round.
__device__ inline void solve_for_u(const Stage& stage, const WarpPart& part, TokenValues& reads, FirstSpoilt& first,
                                   TokenValues& u) {
  subtract_reads(stage, part, reads);
#pragma unroll 1
  while (true) {
    multiply_inverse(stage, part, TokenParts<STATE_PARTS>(reads), u);
    if (__builtin_expect(!is_any_spoilt(u), true)) return;
    if (first.is_any) break;
    first.take_out(part, reads);
  }
  first.take_out(part, u);  // a sum of finite products that is none
}

// Of a chunk of pending rows: as it stands in the ring.
__device__ inline void load_u(const Stage& stage, const WarpPart& part, TokenValues& u) {
  const float* rows = reinterpret_cast<const float*>(stage.base + StageOffsets::RING_U) + part.column();
#pragma unroll
  for (int i = 0; i < TOKEN_BLOCKS; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) u.blocks[i][j] = rows[(8 * i + 2 * part.q + j % 2) * SLICE + j / 2 * 8];
  }
}

}  // namespace replay
