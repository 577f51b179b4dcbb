// What a consumer warp holds in registers: B and C of a chunk as operands, and how a tile's rows become operands.
//
// A lane reads the state 16 bytes at a time: vector m of rows g and g + 8, STATE_VECTOR columns from column
// m * 4 * STATE_VECTOR + q * STATE_VECTOR on. The products' columns are permuted to fit: they may come in any order as
// long as both operands agree.
#pragma once
#include "common/mma.cuh"
#include "mamba2/pipeline/work.cuh"

namespace replay {

constexpr int STATE_VECTOR = elements_per_vector<STATE_TYPE>;
constexpr int VECTORS = D_STATE / (4 * STATE_VECTOR);
constexpr int VECTOR_STRIDE_BYTES = 4 * 16;          // from a lane's vector to its next
constexpr int BLOCKS_PER_VECTOR = STATE_VECTOR / 2;  // a block: two columns of both rows, as a product gives them

// C_g at the lane's columns, in pairs: operand B of the product of state and C. Tokens that are not there are zero.
struct CPairs {
  static constexpr int COUNT = STATE_VECTOR / 2;
  struct alignas(4 * COUNT) Words {
    uint32_t words[COUNT];
  };

  // The pairs of vector m, from shared memory.
  __device__ static Words load(ChunkBuffer buffer, int num_tokens, int m) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    if (g >= num_tokens) return {};
    return *reinterpret_cast<const Words*>(buffer.C(g) + (m * 4 + q) * STATE_VECTOR * 2);
  }

  // Two words for the product number k of a vector. Pairs become fp32 only here: that is cheaper than the registers.
  __device__ static void operand(const Words& pairs, int k, uint32_t (&words)[2]) {
    if constexpr (IS_STATE_FP32) {
      words[0] = float_to_bits(low_bf16(pairs.words[k]));
      words[1] = float_to_bits(high_bf16(pairs.words[k]));
    } else {
      words[0] = pairs.words[2 * k];
      words[1] = pairs.words[2 * k + 1];
    }
  }
};

// C of a chunk, in registers.
struct WindowC {
  CPairs::Words vectors[VECTORS];

  __device__ WindowC(ChunkBuffer buffer, int num_tokens) {
#pragma unroll
    for (int m = 0; m < VECTORS; ++m) vectors[m] = CPairs::load(buffer, num_tokens, m);
  }
  __device__ CPairs::Words pairs(int m) const { return vectors[m]; }
};

// The same where registers are few: in shared memory.
struct StagedC {
  ChunkBuffer buffer;
  int num_tokens;

  __device__ CPairs::Words pairs(int m) const { return CPairs::load(buffer, num_tokens, m); }
};

// B of the pending rows: operand B of the product of weighted x and B. Rows that are not pending are zero.
struct PendingB {
  ChunkBuffer buffer;
  int pending;

  struct alignas(4 * BLOCKS_PER_VECTOR) Pairs {
    uint32_t words[BLOCKS_PER_VECTOR];
  };

  // The blocks of vector m, from shared memory: kept in registers they would leave too few for the rest.
  __device__ void load(int group, int m, uint32_t (&blocks)[BLOCKS_PER_VECTOR][2]) const {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    const uint32_t half = g % 2 == 0 ? 0x5410u : 0x7632u;  // the low, or the high, halves of two words
    const int offset = (m * 4 + g / 2) * STATE_VECTOR * 2;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = group * MMA_TOKENS + 2 * q + 8 * k;
      Pairs first{}, second{};
      if (row < pending) first = *reinterpret_cast<const Pairs*>(buffer.B(row) + offset);
      if (row + 1 < pending) second = *reinterpret_cast<const Pairs*>(buffer.B(row + 1) + offset);
#pragma unroll
      for (int i = 0; i < BLOCKS_PER_VECTOR; ++i) {
        blocks[i][k] = __byte_perm(first.words[i], second.words[i], half);
      }
    }
  }
};

// x^T of MMA_TOKENS token rows from `first` on, as operand A: 16 channels from `channel` of the chunk's rows. Rows
// from num_rows on are zeroed, bit by bit: what stands there may be NaN.
__device__ inline void load_x(ChunkBuffer buffer, int first, int num_rows, int channel, uint32_t (&words)[4]) {
  const int lane = threadIdx.x % WARP_SIZE, q = lane % 4;
  const int row = min(first + lane % 8 + lane / 16 * 8, TOKEN_ROWS - 1);
  ptx::load_transposed(words, buffer.address + ChunkOffsets::X + row * X_ROW_BYTES + (channel + lane / 8 % 2 * 8) * 2);
  const uint32_t near = pair_mask(2 * q, num_rows), far = pair_mask(2 * q + 8, num_rows);
  words[0] &= near;
  words[1] &= near;
  words[2] &= far;
  words[3] &= far;
}

// The sum of both sums += state . C over the columns of one vector of rows g and g + 8. C is exact in bfloat16 and in
// tf32; a state in fp32 is taken in two parts, each into a sum of its own.
__device__ inline void multiply_vector(const Vector16& upper, const Vector16& lower, const CPairs::Words& C,
                                       float (&sums)[2][4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t a[4] = {upper.words[2 * k], lower.words[2 * k], upper.words[2 * k + 1], lower.words[2 * k + 1]};
    uint32_t b[2];
    CPairs::operand(C, k, b);
    if constexpr (IS_STATE_FP32) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Tf32Parts parts(a[i]);
        high[i] = parts.high;
        low[i] = parts.low;
      }
      ptx::mma_tf32(sums[0], high, b[0], b[1]);
      ptx::mma_tf32(sums[1], low, b[0], b[1]);
    } else {
      ptx::mma_bf16(sums[k], a, b[0], b[1]);
    }
  }
}

}  // namespace replay
