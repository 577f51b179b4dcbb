// What all heads that share a key head have in common: products of the raw keys and queries, and their lengths.
//
// The columns of the products are the window's keys and queries by turns, in blocks of eight; rows are the pending
// keys, and the columns once more. What stands in rows that are not there, NaN even, stays in its row or column.
#pragma once
#include "common/mma.cuh"
#include "common/suffix_sums.cuh"
#include "gated_delta_net/pipeline/work.cuh"

namespace replay {

// Added to the sum of squares, as the models' prefill does it.
constexpr float NORM_EPS = 1e-6f;

// The factor that brings a row to length 1.
__device__ inline float unit_factor(float squares) { return ptx::rsqrt(squares + NORM_EPS); }

// The lane that has element (i, i) of a product of eight rows with themselves; it is the (i % 2)-th of the lane's two.
__device__ inline int diagonal_lane(int i) { return i * 4 + i / 2; }

struct KeyProducts {
  float pending[TOKEN_BLOCKS][4];  // pending rows down, a block of columns across
  float window[TOKEN_BLOCKS][4];   // the columns of both blocks down, a block of columns across
  // On the lanes of the diagonal: factors of pending rows g and g + 8, and of column g of each block.
  float row_factors[2], column_factors[TOKEN_BLOCKS];

  __device__ explicit KeyProducts(ChunkBuffer buffer) : pending(), window() {
    const int lane = threadIdx.x % WARP_SIZE, part = lane / 8, row = lane % 8 + part % 2 * 8;
    const uint32_t rows = buffer.address + ChunkOffsets::KEYS + row * KEY_ROW_BYTES + part / 2 * 16;
    uint32_t columns[TOKEN_BLOCKS];
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      columns[b] = buffer.address + buffer.column_offset(8 * b + lane % 8) + part * 16;
    }
    float squares[2][4] = {};
#pragma unroll
    for (int m = 0; m < KEY_DIM / 32; ++m) {
      uint32_t c[TOKEN_BLOCKS][4];
#pragma unroll
      for (int b = 0; b < TOKEN_BLOCKS; ++b) ptx::load_matrices(c[b], columns[b] + m * 64);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t r[4];
        ptx::load_matrices(r, rows + m * 64 + k * 32);
        const uint32_t (&last)[4] = c[TOKEN_BLOCKS - 1];
        const uint32_t w[4] = {c[0][2 * k], last[2 * k], c[0][2 * k + 1], last[2 * k + 1]};
#pragma unroll
        for (int b = 0; b < TOKEN_BLOCKS; ++b) {
          ptx::mma_bf16(pending[b], r, c[b][2 * k], c[b][2 * k + 1]);
          ptx::mma_bf16(window[b], w, c[b][2 * k], c[b][2 * k + 1]);
        }
        ptx::mma_bf16(squares[0], r, r[0], r[2]);
        ptx::mma_bf16(squares[1], r, r[1], r[3]);
      }
    }
    const bool is_odd = lane / 4 % 2 == 1;
    row_factors[0] = unit_factor(is_odd ? squares[0][1] : squares[0][0]);
    row_factors[1] = unit_factor(is_odd ? squares[1][3] : squares[1][2]);
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      column_factors[b] = unit_factor(is_odd ? window[b][2 * b + 1] : window[b][2 * b]);
    }
  }

  // Of the half warp's lane's pending row.
  __device__ float row_factor() const {
    const int row = threadIdx.x % HALF_WARP, source = diagonal_lane(row % 8);
    const float upper = __shfl_sync(FULL_WARP, row_factors[0], source);
    const float lower = __shfl_sync(FULL_WARP, row_factors[1], source);
    return row < 8 ? upper : lower;
  }
  // Of any column of a block, by its number there.
  __device__ float column_factor(int block, int column) const {
    return __shfl_sync(FULL_WARP, column_factors[block], diagonal_lane(column));
  }
};

}  // namespace replay
