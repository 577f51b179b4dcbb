// What the warps of the chunked prefill share: how a chunk of tokens lies in shared memory, and the barriers.
//
// A thread block has SLICE columns of one head's state. Its state warps share them out by 16 columns (a value tile) and,
// with two KEY_SPLITS, by halves of the rows; the state never leaves their registers. A stage holds what belongs to one
// chunk: chunk i stands in stage i % NUM_STAGES and is brought there by solver warp i % NUM_SOLVERS. A stage:
//   k, q    [CHUNK_SIZE, KEY_DIM] bfloat16 as they came, rows in 16-byte pieces, piece i of row r at place i ^ (r % 8)
//   v       [CHUNK_SIZE, SLICE + padding] bfloat16
//   inverse of I + A, tiles j <= t of 16 x 16 in STATE_PARTS parts: [t / 8, part, j / 8, j % 8, t % 8] bfloat16, where j
//           of the first two t / 8 ends with the first tile; before that its makings in fp32: A^T, rows of A_STRIDE, and
//           the decays between the tokens of each block of eight, rows of DECAY_STRIDE
//   weights of the outputs, tiles j <= t in two parts: [tile, part, t / 8, j / 8, t % 8, j % 8] bfloat16
//   coefficients, an fp32 number per token each: Coefficient
#pragma once
#include "common/warp_barrier.cuh"
#include "common/bf16_parts.cuh"
#include "common/lanes.cuh"
#include "gated_delta_net/row.cuh"

namespace replay {

constexpr int MMA_TILE = 16;
constexpr int TOKEN_TILES = CHUNK_SIZE / MMA_TILE;
constexpr int TOKEN_BLOCKS = CHUNK_SIZE / 8;  // of eight tokens, the columns of one product
constexpr int TILE_PAIRS = TOKEN_TILES * (TOKEN_TILES + 1) / 2;
constexpr int VALUE_TILES = SLICE / MMA_TILE;
constexpr int NUM_STATE_WARPS = VALUE_TILES * KEY_SPLITS;
constexpr int WARP_KEYS = KEY_DIM / KEY_SPLITS;
constexpr int OWN_TILES = TOKEN_TILES / KEY_SPLITS;  // of tokens, whose outputs a state warp finishes
// Each part has 8 bits of a number: three for what goes into a state in fp32, two for one that is rounded to 11 or 8.
constexpr int STATE_PARTS = sizeof(STATE_TYPE) == 4 ? 3 : 2;
constexpr int KEY_ROW_BYTES = KEY_DIM * 2;
constexpr int KEY_TILE_BYTES = MMA_TILE * KEY_ROW_BYTES;
constexpr int V_ROW_BYTES = SLICE * 2 + 16;
constexpr int TILE_BYTES = MMA_TILE * MMA_TILE * 2;
// Strides that put what lanes access together in different shared-memory banks.
constexpr int A_STRIDE = CHUNK_SIZE + 4;
constexpr int DECAY_STRIDE = 12;
constexpr int A_BYTES = CHUNK_SIZE * A_STRIDE * 4;
constexpr int SOLVE_BYTES = A_BYTES + CHUNK_SIZE * DECAY_STRIDE * 4;
constexpr int INVERSE_BYTES = TILE_PAIRS * STATE_PARTS * TILE_BYTES;
static_assert(CHUNK_SIZE == WARP_SIZE, "a lane of a solver has one token");
static_assert(sizeof(ACTIVATION_TYPE) == 2, "operands are laid out for bfloat16");
static_assert(KEY_ROW_BYTES % 128 == 0, "eight pieces trade places");
static_assert(KEY_SPLITS == 1 || KEY_SPLITS == 2, "a split has one partner");
static_assert(TOKEN_TILES == 2, "a chunk's matrices of tokens are three tiles, and a split finishes two tiles or one");
static_assert((NUM_STATE_WARPS + NUM_SOLVERS) * WARP_SIZE == BLOCK_THREADS, "the shape counts other warps");
static_assert(NUM_SOLVERS <= NUM_STAGES, "a solver must not wait for a stage that is two phases behind");

enum Coefficient {
  BETA,           // of v in the right side of (I + A) u
  READ_WEIGHT,    // of what the state before the chunk says of k, there
  FOLD_WEIGHT,    // of u in the state behind the chunk
  OUTPUT_WEIGHT,  // of what the state before the chunk says of q
  ROW_WEIGHT,     // of a token's row of A
  KEY_SCALE,      // brings k to length 1
  QUERY_SCALE,    // brings q to length K^-1/2
  BLOCK_TO,       // the decay over the token's block of eight up to it
  BLOCK_FROM,     // the decay over its block after it
  DECAYS,         // no number per token: the decay over each block, then at CHUNK_DECAY that over the chunk
  NUM_COEFFICIENTS,
};
constexpr int CHUNK_DECAY = TOKEN_BLOCKS;

struct StageOffsets {
  static constexpr int K = 0;
  static constexpr int Q = K + CHUNK_SIZE * KEY_ROW_BYTES;
  static constexpr int V = Q + CHUNK_SIZE * KEY_ROW_BYTES;
  static constexpr int INVERSE = V + CHUNK_SIZE * V_ROW_BYTES;
  static constexpr int WEIGHTS = INVERSE + ((INVERSE_BYTES > SOLVE_BYTES ? INVERSE_BYTES : SOLVE_BYTES) + 255) / 256 * 256;
  static constexpr int COEFFICIENTS = WEIGHTS + TILE_PAIRS * 2 * TILE_BYTES;
  static constexpr int BYTES = COEFFICIENTS + NUM_COEFFICIENTS * CHUNK_SIZE * 4;
  // Pending rows have u, [CHUNK_SIZE, SLICE] fp32, and neither q nor v.
  static constexpr int RING_U = Q;
};
static_assert(StageOffsets::RING_U + CHUNK_SIZE * SLICE * 4 <= StageOffsets::INVERSE, "u takes the place of q and v");
static_assert(StageOffsets::BYTES % 256 == 0, "pieces are found by flipping bits of an address");

// One stage, by its address in either form.
struct Stage {
  unsigned char* base;
  uint32_t address;

  // Of a piece of a row, from the first row of k or q on.
  __device__ static int piece_offset(int row, int piece) { return row * KEY_ROW_BYTES + ((piece ^ (row % 8)) << 4); }
  // Column j of A, and exp(sum of g over (j, t]) for t of j's block.
  __device__ float* A_column(int j) const {
    return reinterpret_cast<float*>(base + StageOffsets::INVERSE) + j * A_STRIDE;
  }
  __device__ float* decays_from(int j) const {
    return reinterpret_cast<float*>(base + StageOffsets::INVERSE + A_BYTES) + j * DECAY_STRIDE;
  }
  // The tiles j <= t of a matrix of tokens in their order: (0, 0), (1, 0), (1, 1).
  __device__ static constexpr int tile_index(int token_tile, int source_tile) {
    return token_tile + source_tile;
  }
  __device__ static constexpr int token_tile(int index) { return index > 0; }
  __device__ static constexpr int source_tile(int index) { return index > 1; }
  // A part of the inverse at rows of one block of eight tokens and columns of another one.
  __device__ static constexpr int inverse_offset(int token_block, int source_block, int part) {
    const int before = token_block < 2 ? 2 * token_block : 4 * token_block - 4, sources = token_block < 2 ? 2 : 4;
    return StageOffsets::INVERSE + (before * STATE_PARTS + part * sources + source_block) * 128;
  }
  // The address that a lane gives for a tile of it: blocks t first, j within t, row j % 8.
  __device__ uint32_t inverse_address(int tile, int part, int lane) const {
    const int token_block = 2 * token_tile(tile), source_block = 2 * source_tile(tile);
    const int first = inverse_offset(token_block, source_block, part);
    return address + first + lane / 16 * (inverse_offset(token_block + 1, source_block, part) - first) + lane % 16 * 16;
  }
  __device__ static int weights_offset(int tile, int part) {
    return StageOffsets::WEIGHTS + (tile * 2 + part) * TILE_BYTES;
  }
  __device__ float* coefficients(Coefficient which) const {
    return reinterpret_cast<float*>(base + StageOffsets::COEFFICIENTS) + which * CHUNK_SIZE;
  }
  // Of two tokens, the first an even one.
  __device__ float2 coefficient_pair(Coefficient which, int token) const {
    return *reinterpret_cast<const float2*>(coefficients(which) + token);
  }
};

// The dynamic shared memory: the stages; of each value tile with two splits, what they give each other; the barriers.
struct ChunkShared {
  unsigned char* base;
  uint32_t address;

  // From one split: a float4 a lane for each block of tokens of the keys, and for those queries that it does not finish.
  static constexpr int GIVEN_VECTORS = TOKEN_BLOCKS + TOKEN_BLOCKS / 2;
  static constexpr int GIVEN_BYTES = KEY_SPLITS == 2 ? GIVEN_VECTORS * WARP_SIZE * 16 : 0;
  static constexpr int GIVEN = NUM_STAGES * StageOffsets::BYTES;
  static constexpr int BARRIERS = GIVEN + NUM_STATE_WARPS * GIVEN_BYTES;
  static constexpr int NUM_BARRIERS = 2 * NUM_STAGES;
  static constexpr int BYTES = (BARRIERS + 8 * NUM_BARRIERS + 15) / 16 * 16;

  __device__ explicit ChunkShared(void* memory)
      : base(static_cast<unsigned char*>(memory)), address(ptx::shared_address(memory)) {}

  __device__ Stage stage(int index) const {
    return {base + index * StageOffsets::BYTES, address + index * StageOffsets::BYTES};
  }
  __device__ float4* given(int state_warp) const {
    return reinterpret_cast<float4*>(base + GIVEN + state_warp * GIVEN_BYTES);
  }
  __device__ uint32_t barrier(int index) const { return address + BARRIERS + 8 * index; }
  __device__ uint32_t is_solved(int stage) const { return barrier(stage); }
  __device__ uint32_t is_free(int stage) const { return barrier(NUM_STAGES + stage); }

  __device__ void init_barriers() const {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      init_for_warps(is_solved(stage), 1);
      init_for_warps(is_free(stage), NUM_STATE_WARPS);
    }
    ptx::fence_barrier_init();
  }
};
static_assert(ChunkShared::BYTES == DYNAMIC_SHARED_BYTES, "specializations/gated_delta_net_chunks.py counts other bytes");

// A chunk's place in two rounds of the stages: its stage, and the parity of the phase that the stage's barriers are in.
struct Place {
  int place;

  __device__ explicit Place(int chunk = 0) : place(chunk % (2 * NUM_STAGES)) {}
  __device__ int stage() const { return place < NUM_STAGES ? place : place - NUM_STAGES; }
  __device__ uint32_t parity() const { return place < NUM_STAGES ? 0 : 1; }
  __device__ void advance() { place = place == 2 * NUM_STAGES - 1 ? 0 : place + 1; }
};

// A lane's number, new to the compiler each time: what is made of it in a loop is made anew, not kept from the start on.
// Whether a lane is this one or that would be kept in bits of a register, and getting at them costs more than asking.
__device__ inline int fresh_lane() {
  uint32_t thread = threadIdx.x;
  ptx::make_opaque(thread);
  return thread % WARP_SIZE;
}

// A run of up to CHUNK_SIZE tokens. First come the chunks of the pending ring rows, which have their u already and no
// output, then those of the window: a chunk never has both.
struct Chunk {
  bool is_ring;
  int first;  // ring rows: from the checkpoint on; else the window token
  int count;

  __device__ static int num_ring_chunks(const Row& row) { return (row.pending + CHUNK_SIZE - 1) / CHUNK_SIZE; }
  __device__ static int num_chunks(const Row& row) {
    return num_ring_chunks(row) + (row.num_tokens + CHUNK_SIZE - 1) / CHUNK_SIZE;
  }
  // Of a chunk behind the last one the count is not positive.
  __device__ Chunk(const Row& row, int index)
      : is_ring(index < num_ring_chunks(row)),
        first((is_ring ? index : index - num_ring_chunks(row)) * CHUNK_SIZE),
        count(min(CHUNK_SIZE, (is_ring ? row.pending : row.num_tokens) - first)) {}
};

}  // namespace replay
