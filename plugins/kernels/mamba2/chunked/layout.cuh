// What the warps of the chunked prefill share: how a chunk of tokens lies in shared memory, and the barriers.
//
// A thread block has SLICE_ROWS state rows of one head. Its state warps share them out by 16 rows (a row tile) and by
// WARP_COLUMNS columns (a column split): the state never leaves their registers. An output warp has a tile of tokens.
// One more warp brings the chunks to their stages: chunk i to stage i % NUM_STAGES. Shared memory, in this order; a
// stage:
//   C, B    [CHUNK_SIZE, D_STATE] bfloat16 each, rows in 16-byte pieces, piece i of row r at place i ^ (r % 8)
//   x       [CHUNK_SIZE, X_STRIDE] bfloat16; eight rows start in different banks
//   decays  ChunkDecays, floats of each token
// then the state before a chunk for the output warps, as operand B: [row tile, 16 columns, part, lane] of 16 bytes,
// which are what the lane takes of the tile's rows g, then of its rows g + 8; values of the block; of each stage, what
// the chunk leaves of the state; the barriers.
#pragma once
#include "common/warp_barrier.cuh"
#include "mamba2/row.cuh"

namespace replay {

constexpr int MMA_TILE = 16;
constexpr int CHUNK_TILES = CHUNK_SIZE / MMA_TILE;
constexpr int SLICE_ROWS = HEAD_DIM / HEAD_SLICES;
constexpr int ROW_TILES = SLICE_ROWS / MMA_TILE;
constexpr int K_STEPS = D_STATE / MMA_TILE;
constexpr int COLUMN_BLOCKS = WARP_COLUMNS / 8;
constexpr int COLUMN_SPLITS = D_STATE / WARP_COLUMNS;
constexpr int NUM_STATE_WARPS = ROW_TILES * COLUMN_SPLITS;
constexpr int NUM_OUTPUT_WARPS = CHUNK_TILES;
constexpr int X_STRIDE = SLICE_ROWS + 8;
constexpr int BC_ROW_BYTES = D_STATE * 2;
constexpr int X_ROW_BYTES = X_STRIDE * 2;
constexpr int BC_TILE_BYTES = MMA_TILE * BC_ROW_BYTES;
static_assert((NUM_STATE_WARPS + NUM_OUTPUT_WARPS + 1) * WARP_SIZE == BLOCK_THREADS, "the shape counts other warps");
static_assert(SLICE_ROWS % MMA_TILE == 0 && D_STATE % WARP_COLUMNS == 0, "a state warp has whole products");
static_assert(BC_ROW_BYTES % 128 == 0, "eight pieces trade places");

// What the tokens of a chunk weigh, see decays.cuh.
struct ChunkDecays {
  float decay_to[CHUNK_SIZE];
  float dt[CHUNK_SIZE];
  float tile_weight[CHUNK_SIZE];
  float fold_weight[CHUNK_SIZE];
};

struct StageOffsets {
  static constexpr int C = 0;
  static constexpr int B = C + CHUNK_SIZE * BC_ROW_BYTES;
  static constexpr int X = B + CHUNK_SIZE * BC_ROW_BYTES;
  static constexpr int DECAYS = X + CHUNK_SIZE * X_ROW_BYTES;
  static constexpr int BYTES = DECAYS + static_cast<int>(sizeof(ChunkDecays));
};
static_assert(StageOffsets::BYTES % (BC_ROW_BYTES < 128 ? 128 : BC_ROW_BYTES) == 0,
              "pieces are found by flipping bits of an address");

// One stage, by its address in either form.
struct Stage {
  unsigned char* base;
  uint32_t address;

  // Of a piece of a row, from the first row of B or C on.
  __device__ static int piece_offset(int row, int piece) { return row * BC_ROW_BYTES + ((piece ^ (row % 8)) << 4); }
  __device__ const bfloat16* x(int token) const {
    return reinterpret_cast<const bfloat16*>(base + StageOffsets::X) + token * X_STRIDE;
  }
  __device__ ChunkDecays& decays() const { return *reinterpret_cast<ChunkDecays*>(base + StageOffsets::DECAYS); }
};

// What warps ask for once a chunk: in registers it would be in the way of products.
struct alignas(16) BlockValues {
  int num_ring;   // pending rows of the ring
  int num_total;  // and with the window's tokens
  float D;
};

struct ChunkShared {
  unsigned char* base;
  uint32_t address;

  static constexpr int SNAPSHOT = NUM_STAGES * StageOffsets::BYTES;
  static constexpr int VALUES = SNAPSHOT + ROW_TILES * K_STEPS * 2 * WARP_SIZE * 16;
  static constexpr int CHUNK_DECAYS = VALUES + static_cast<int>(sizeof(BlockValues));
  static constexpr int BARRIERS = CHUNK_DECAYS + 8 * NUM_STAGES;
  static constexpr int BYTES = (BARRIERS + 8 * (2 * NUM_STAGES + 2) + 15) / 16 * 16;

  __device__ explicit ChunkShared(void* memory)
      : base(static_cast<unsigned char*>(memory)), address(ptx::shared_address(memory)) {}

  __device__ Stage stage(int index) const {
    return {base + index * StageOffsets::BYTES, address + index * StageOffsets::BYTES};
  }
  // A lane's words of 16 columns of a row tile; its low part is WARP_SIZE further.
  __device__ Vector16* snapshot(int row_tile, int k_step, int lane) const {
    return reinterpret_cast<Vector16*>(base + SNAPSHOT) + (row_tile * K_STEPS + k_step) * 2 * WARP_SIZE + lane;
  }
  __device__ BlockValues& values() const { return *reinterpret_cast<BlockValues*>(base + VALUES); }
  __device__ float& chunk_decay(int stage) const { return reinterpret_cast<float*>(base + CHUNK_DECAYS)[stage]; }

  __device__ uint32_t barrier(int index) const { return address + BARRIERS + 8 * index; }
  __device__ uint32_t is_full(int stage) const { return barrier(stage); }
  __device__ uint32_t is_free(int stage) const { return barrier(NUM_STAGES + stage); }
  __device__ uint32_t is_given() const { return barrier(2 * NUM_STAGES); }      // the state before the chunk
  __device__ uint32_t is_taken() const { return barrier(2 * NUM_STAGES + 1); }  // by all output warps

  __device__ void init_barriers() const {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      ptx::barrier_init(is_full(stage), WARP_SIZE + ARRIVALS_OF_WARP);  // each lane's copies, and the decays
      init_for_warps(is_free(stage), NUM_STATE_WARPS + NUM_OUTPUT_WARPS);
    }
    init_for_warps(is_given(), NUM_STATE_WARPS);
    init_for_warps(is_taken(), NUM_OUTPUT_WARPS);
    ptx::fence_barrier_init();
  }
};
static_assert(ChunkShared::BYTES == DYNAMIC_SHARED_BYTES,
              "specializations/mamba2_chunks.py counts shared memory differently");

// A chunk's place in line: its stage, and the parity of the phases that the barriers are in. In one register.
struct ChunkPlace {
  uint32_t index = 0;

  __device__ int first() const { return index * CHUNK_SIZE; }
  __device__ int stage() const { return index % NUM_STAGES; }
  __device__ uint32_t parity() const { return index / NUM_STAGES % 2; }
  __device__ uint32_t snapshot_parity() const { return index % 2; }
  __device__ void advance() { ++index; }
};

// A number that is new to the compiler where two blocks share an SM's registers: what is made of it is made anew there.
// Kept from before a loop it would lie on the stack.
__device__ inline uint32_t fresh(uint32_t number) {
  if (MIN_BLOCKS > 1) ptx::make_opaque(number);
  return number;
}

__device__ inline int first_channel_of(uint32_t block) { return block % HEAD_SLICES * SLICE_ROWS; }

// A lane's place in products (common/mma.cuh).
struct LanePlace {
  int lane, g, q;

  __device__ explicit LanePlace(uint32_t thread) : lane(thread % WARP_SIZE), g(lane / 4), q(lane % 4) {}

  // Its offset for load_matrices() of 16 rows by two pieces of B or C: matrices in the order of rows first, or of
  // pieces first. The next two pieces are at the offset ^ 32, ^ 64, ^ 96, ...
  __device__ int rows_first() const { return Stage::piece_offset(lane % 16, lane / 16); }
  __device__ int pieces_first() const { return Stage::piece_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2); }
};

}  // namespace replay
