// What a consumer warp multiplies: the window's keys and queries as operands, and how a tile's rows become operands.
//
// A lane reads LANE_COLUMNS neighbouring columns of the state at once, from column g * LANE_COLUMNS of the warp's on,
// in rows of part q. Each two columns are rows g and g + 8 of a product of their own; PRODUCT_ROWS rows of each part are
// its depth. Depth and rows may come in any order as long as both operands agree.
#pragma once
#include "common/mma.cuh"
#include "gated_delta_net/pipeline/work.cuh"

namespace replay {

constexpr int COLUMN_PAIRS = LANE_COLUMNS / 2;
constexpr int PRODUCT_ROWS = IS_STATE_FP32 ? 2 : 4;
// Of each part, folded at once: as many as registers allow.
constexpr int FOLD_ROWS = IS_STATE_FP32 ? 4 : 8;
constexpr int PAIRS_PER_VECTOR = 4;  // two neighbouring rows' numbers of a key: of a vector of 16 bytes

// A lane's columns of one row.
struct alignas(LANE_COLUMNS * sizeof(STATE_TYPE)) StateVector {
  uint32_t words[LANE_COLUMNS * static_cast<int>(sizeof(STATE_TYPE)) / 4];
};

// S^T times a block of the window's keys and queries, by pairs of columns: lane (g, q) has what key and query of token
// q read at the columns 2i (at 0 and 1) and 2i + 1 (at 2 and 3) of its vector.
struct ReadSums {
  float sums[TOKEN_BLOCKS][COLUMN_PAIRS][4];
};

struct ProductPairs {
  uint32_t words[PRODUCT_ROWS / 2];
};

struct alignas(2 * FOLD_ROWS) FoldPairs {
  uint32_t words[FOLD_ROWS / 2];
};

// Column g of a block of keys and queries, at the lane's part of the rows, in pairs: operand B.
struct ColumnPart {
  const unsigned char* base;

  __device__ ColumnPart(ChunkBuffer buffer, int block) {
    const int g = threadIdx.x % WARP_SIZE / 4, q = threadIdx.x % 4;
    base = buffer.base + buffer.column_offset(8 * block + g) + q * PART_ROWS * 2;
  }
  // Of eight rows.
  __device__ Vector16 pairs(int vector) const { return reinterpret_cast<const Vector16*>(base)[vector]; }
  // Of FOLD_ROWS rows.
  __device__ FoldPairs fold_pairs(int first_row) const {
    return *reinterpret_cast<const FoldPairs*>(base + first_row * 2);
  }
};

// The window's keys and queries at the rows of one tile, in registers.
struct TileColumns {
  Vector16 vectors[TOKEN_BLOCKS][TILE_ROWS / 8];

  __device__ TileColumns(ChunkBuffer buffer, int tile) {
#pragma unroll
    for (int b = 0; b < TOKEN_BLOCKS; ++b) {
      const ColumnPart part(buffer, b);
#pragma unroll
      for (int v = 0; v < TILE_ROWS / 8; ++v) vectors[b][v] = part.pairs(tile * (TILE_ROWS / 8) + v);
    }
  }
};

// sums += S^T x over PRODUCT_ROWS rows; x: a column's pairs of them. Keys and queries are exact in bfloat16 and in
// tf32; a state in fp32 is taken in two parts, of which `low` has the second one's sums.
__device__ inline void multiply_rows(const StateVector (&rows)[PRODUCT_ROWS], const ProductPairs& x,
                                     float (&sums)[COLUMN_PAIRS][4], float (&low)[COLUMN_PAIRS][4]) {
#pragma unroll
  for (int i = 0; i < COLUMN_PAIRS; ++i) {
    if constexpr (IS_STATE_FP32) {
      const uint32_t words[4] = {rows[0].words[2 * i], rows[0].words[2 * i + 1], rows[1].words[2 * i],
                                 rows[1].words[2 * i + 1]};
      uint32_t highs[4], lows[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Tf32Parts parts(words[k]);
        highs[k] = parts.high;
        lows[k] = parts.low;
      }
      const uint32_t first = float_to_bits(low_bf16(x.words[0])), second = float_to_bits(high_bf16(x.words[0]));
      ptx::mma_tf32(sums[i], highs, first, second);
      ptx::mma_tf32(low[i], lows, first, second);
    } else {
      const uint32_t a[4] = {__byte_perm(rows[0].words[i], rows[1].words[i], 0x5410),
                             __byte_perm(rows[0].words[i], rows[1].words[i], 0x7632),
                             __byte_perm(rows[2].words[i], rows[3].words[i], 0x5410),
                             __byte_perm(rows[2].words[i], rows[3].words[i], 0x7632)};
      ptx::mma_bf16(sums[i], a, x.words[0], x.words[1]);
    }
  }
}

// The pending rows of u, as operand A of a tf32 product of eight of them: rows `first` + q and `first` + q + 4 at the
// columns of pair i. For rows from `live` on stands the last one before: they weigh zero.
struct UVectors {
  float values[2][LANE_COLUMNS];

  __device__ UVectors(const unsigned char* u, int first, int live) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int row = min(first + q + 4 * k, live - 1);
      load_as_float(reinterpret_cast<const float*>(u + row * U_ROW_BYTES), values[k]);
    }
  }
};

}  // namespace replay
