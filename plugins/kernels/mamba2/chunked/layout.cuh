// How a chunk of tokens lies in shared memory, and which part of the products is whose.
//
// A thread block has SLICE_ROWS state rows of one head. Its warps share them out by 16 rows (a row tile) and by columns
// (a column split): the state never leaves its registers. Shared memory, bytes in this order:
//   C  [CHUNK_SIZE, D_STATE]  bfloat16, rows in 16-byte pieces, piece i of row r at place i ^ (r % 8)
//   B  the same, two buffers
//   x  [CHUNK_SIZE, X_STRIDE] bfloat16, two buffers
//   weights  score tiles j <= t of 16 x 16, the high and the low parts: [tile, part, t / 8, j / 8, t % 8, j % 8] bfloat16
//   partial products of state and C, on their way from the warp that has the columns to the one that adds them up
//   decays  two buffers of five floats a token
// Rows of B and x start in different banks for the eight rows that an instruction reads at a time.
#pragma once
#include "common/lanes.cuh"
#include "common/mma.cuh"
#include "mamba2/row.cuh"

namespace replay {

constexpr int MMA_TILE = 16;
constexpr int CHUNK_TILES = CHUNK_SIZE / MMA_TILE;
constexpr int SLICE_ROWS = HEAD_DIM / HEAD_SLICES;
constexpr int ROW_TILES = SLICE_ROWS / MMA_TILE;
constexpr int WARP_COLUMNS = D_STATE / COLUMN_SPLITS;
constexpr int COLUMN_BLOCKS = WARP_COLUMNS / 8;
constexpr int NUM_WARPS = ROW_TILES * COLUMN_SPLITS;
// Tokens whose outputs a warp adds up and writes, in tiles.
constexpr int OWN_TILES = CHUNK_TILES / COLUMN_SPLITS;
constexpr int SCORE_TILES = CHUNK_TILES * (CHUNK_TILES + 1) / 2;
constexpr int X_STRIDE = SLICE_ROWS + 8;
constexpr int BC_ROW_BYTES = D_STATE * 2;
constexpr int X_ROW_BYTES = X_STRIDE * 2;
constexpr int BC_TILE_BYTES = MMA_TILE * BC_ROW_BYTES;
constexpr int DECAY_FLOATS = 5;
constexpr int PART_BYTES = MMA_TILE * MMA_TILE * 2;
static_assert(NUM_WARPS * WARP_SIZE == BLOCK_THREADS, "specializations/mamba2_chunks.py counts warps differently");
static_assert(OWN_TILES * COLUMN_SPLITS == CHUNK_TILES, "every split writes equally many outputs");
static_assert(BC_ROW_BYTES % 128 == 0, "eight pieces trade places");

struct ChunkOffsets {
  static constexpr int BC_BYTES = CHUNK_SIZE * BC_ROW_BYTES;
  static constexpr int X_BYTES = CHUNK_SIZE * X_ROW_BYTES;
  static constexpr int C = 0;
  static constexpr int B = C + BC_BYTES;
  static constexpr int X = B + 2 * BC_BYTES;
  static constexpr int WEIGHTS = X + 2 * X_BYTES;
  static constexpr int PARTIALS = WEIGHTS + SCORE_TILES * 2 * PART_BYTES;
  // A tile of 16 rows and 16 tokens in fp32, from every other split.
  static constexpr int PARTIAL_BYTES = MMA_TILE * MMA_TILE * 4;
  static constexpr int DECAYS = PARTIALS + ROW_TILES * CHUNK_TILES * (COLUMN_SPLITS - 1) * PARTIAL_BYTES;
  static constexpr int END = DECAYS + 2 * DECAY_FLOATS * CHUNK_SIZE * 4;
};
static_assert(ChunkOffsets::END == DYNAMIC_SHARED_BYTES, "specializations/mamba2_chunks.py counts shared memory differently");

// What the tokens of a chunk weigh, see decays.cuh.
struct ChunkDecays {
  float* decay_to;
  float* decay_from;
  float* dt;
  float* state_decay;
  float* fold_weight;
};

struct ChunkShared {
  unsigned char* base;
  uint32_t address;
  int buffer;

  __device__ ChunkShared(Vector16* base, int buffer)
      : base(reinterpret_cast<unsigned char*>(base)), address(ptx::shared_address(base)), buffer(buffer) {}

  // Of a piece of a row, from the first row of B or C on.
  __device__ static int piece_offset(int row, int piece) { return row * BC_ROW_BYTES + ((piece ^ (row % 8)) << 4); }
  __device__ int B_offset() const { return ChunkOffsets::B + buffer * ChunkOffsets::BC_BYTES; }
  __device__ int x_offset() const { return ChunkOffsets::X + buffer * ChunkOffsets::X_BYTES; }
  __device__ const bfloat16* x(int token) const {
    return reinterpret_cast<const bfloat16*>(base + x_offset()) + token * X_STRIDE;
  }
  __device__ static int weights_offset(int token_tile, int source_tile) {
    return ChunkOffsets::WEIGHTS + (token_tile * (token_tile + 1) / 2 + source_tile) * 2 * PART_BYTES;
  }
  __device__ float4* partials(int row_tile, int token_tile, int source) const {
    const int index = (row_tile * CHUNK_TILES + token_tile) * (COLUMN_SPLITS - 1) + source;
    return reinterpret_cast<float4*>(base + ChunkOffsets::PARTIALS + index * ChunkOffsets::PARTIAL_BYTES);
  }
  __device__ ChunkDecays decays() const {
    float* first = reinterpret_cast<float*>(base + ChunkOffsets::DECAYS) + buffer * DECAY_FLOATS * CHUNK_SIZE;
    return {first, first + CHUNK_SIZE, first + 2 * CHUNK_SIZE, first + 3 * CHUNK_SIZE, first + 4 * CHUNK_SIZE};
  }
};

// A warp's part, and a lane's place in its products (common/mma.cuh).
struct WarpPart {
  int row_tile;
  int split;
  int lane, g, q;

  __device__ WarpPart()
      : row_tile(threadIdx.x / WARP_SIZE / COLUMN_SPLITS),
        split(threadIdx.x / WARP_SIZE % COLUMN_SPLITS),
        lane(threadIdx.x % WARP_SIZE),
        g(lane / 4),
        q(lane % 4) {}

  __device__ int first_column() const { return split * WARP_COLUMNS; }

  // The i-th token tile in this warp's order: first its own ones, then those of the next split, and so on. Late tiles
  // have more tokens before them, so a split's second tile is counted from the end.
  __device__ int token_tile(int i) const {
    const int owner = (split + i / OWN_TILES) % COLUMN_SPLITS, turn = i % OWN_TILES;
    return turn % 2 ? (turn + 1) * COLUMN_SPLITS - 1 - owner : turn * COLUMN_SPLITS + owner;
  }

  // A lane's offset for load_matrices() of 16 rows by two pieces of B or C: matrices in the order of rows first, or of
  // pieces first. The next two pieces are at the offset ^ 32, ^ 64, ^ 96, ...: rows start at multiples of 256 bytes.
  __device__ int rows_first() const { return ChunkShared::piece_offset(lane % 16, lane / 16); }
  __device__ int pieces_first() const { return ChunkShared::piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2); }
  // The same of 8 rows by four pieces, the first or the second half of a tile's rows.
  __device__ int half_tile(int half) const { return ChunkShared::piece_offset(half * 8 + lane % 8, lane / 8); }
};

}  // namespace replay
