// What the warps of the pipelined step share: the memory of a thread block.
//
// A head's state has K rows of V neighbouring columns, and a product contracts its rows. So the rows of a head are cut
// into PARTS parts, and a *tile* is TILE_ROWS neighbouring rows of each: a lane that asks for rows of its part finds
// them in other shared-memory banks than its neighbours find theirs, since each part stands 32 bytes further from a
// multiple of 128 than the one before. A head is the work of a *group* of consumer warps, each with WARP_COLUMNS columns
// of it: columns never meet. Head i of a thread block belongs to group i % NUM_GROUPS, and each group has stages of its
// own.
#pragma once
#include "common/pipeline/memory.cuh"
#include "common/types.cuh"
#include "gated_delta_net/params.h"

namespace replay {

constexpr int WINDOW = 1 + MAX_DRAFT_LEN;
constexpr int HEADS_PER_KEY = N_VALUE_HEADS / N_KEY_HEADS;
constexpr bool IS_STATE_FP32 = sizeof(STATE_TYPE) == 4;
constexpr int MMA_TOKENS = 16;  // token rows that one product takes

constexpr int PARTS = 4;  // lane q of each four has part q
constexpr int PART_ROWS = KEY_DIM / PARTS;
constexpr int TILES_PER_HEAD = PART_ROWS / TILE_ROWS;
constexpr int STATE_ROW_BYTES = VALUE_DIM * static_cast<int>(sizeof(STATE_TYPE));
constexpr int PART_BYTES = TILE_ROWS * STATE_ROW_BYTES;  // of one copy
constexpr int PART_STRIDE = PART_BYTES + 32;
constexpr int STAGE_BYTES = PARTS * PART_STRIDE;

constexpr int LANE_COLUMNS = 4;
constexpr int WARP_COLUMNS = 8 * LANE_COLUMNS;
constexpr int GROUP_WARPS = VALUE_DIM / WARP_COLUMNS;
constexpr int NUM_GROUPS = NUM_CONSUMERS / GROUP_WARPS;
constexpr int GROUP_STAGES = NUM_STAGES / NUM_GROUPS;
constexpr int NUM_WEIGHERS = COEFFICIENT_TEAMS * TEAM_WARPS;

// A product has eight columns: of four tokens key and query side by side.
constexpr int TOKENS_PER_BLOCK = 4;
constexpr int TOKEN_BLOCKS = (WINDOW + TOKENS_PER_BLOCK - 1) / TOKENS_PER_BLOCK;
// 16 bytes between rows: eight of them, read at once, then stand in different shared-memory banks. 32 between those of
// which four are read at once, 32 bytes of each.
constexpr int KEY_ROW_BYTES = KEY_DIM * 2 + 16;
constexpr int U_ROW_BYTES = CHUNK_HEADS * VALUE_DIM * 4 + 32;
constexpr int V_ROW_BYTES = CHUNK_HEADS * VALUE_DIM * 2 + 16;
// The weights of the pending rows in one column: of q four numbers, rows q, q + 4, q + 8 and q + 12.
constexpr int COLUMN_WEIGHTS = MMA_TOKENS;
constexpr int ROW_WEIGHTS = MMA_TOKENS + 1;  // one a pending row, then the checkpoint's decay
// Loader warps, by what each brings: g and the raw gates with their constants; keys and queries; u and v.
enum Loader : int { GATES_LOADER, KEYS_LOADER, VALUES_LOADER, NUM_LOADERS };
enum Gate : int { GATE_A, GATE_B, NUM_GATES };
enum Constant : int { A_LOG, DT_BIAS, NUM_CONSTANTS };

static_assert(sizeof(ACTIVATION_TYPE) == 2 && KEY_DIM % 64 == 0, "the fragments are laid out for these");
static_assert(HISTORY <= MMA_TOKENS && WINDOW <= 8, "pending rows fill one product's rows, tokens two blocks");
static_assert(TILES_PER_HEAD * TILE_ROWS == PART_ROWS && TILE_ROWS % 8 == 0, "tiles cover a head exactly");
static_assert(GROUP_WARPS * WARP_COLUMNS == VALUE_DIM, "a group covers a head's columns exactly");
static_assert(NUM_GROUPS * GROUP_WARPS == NUM_CONSUMERS, "groups are equal");
static_assert(GROUP_STAGES * NUM_GROUPS == NUM_STAGES, "a stage has the same warps each time, else waits skip a phase");
static_assert(GROUP_STAGES >= TILES_PER_HEAD, "a turn advances by a head at once");
static_assert(HEADS_PER_KEY % CHUNK_HEADS == 0, "chunks do not cross key heads");
static_assert(CHUNK_HEADS <= 2 * TEAM_WARPS, "a team weighs all heads of a chunk at once");
static_assert(BLOCK_THREADS == (NUM_CONSUMERS + NUM_WEIGHERS + NUM_LOADERS + 1) * WARP_SIZE,
              "the shape of the pipeline counts other warps");

// What a window token of one head needs: its key and query count for so much of what they read, its beta, and of each
// token before it the weights in what key and query read; of its own u the query's.
struct TokenWeights {
  struct alignas(8) Pair {
    float key, query;
  };
  Pair scales;
  float beta, unused;
  Pair pairs[(WINDOW + 1) / 2 * 2];
};

// Offsets in a chunk buffer: token rows, then what the coefficient warps make of them.
struct ChunkOffsets {
  static constexpr int KEYS = 0;
  static constexpr int QUERIES = KEYS + (MMA_TOKENS + WINDOW) * KEY_ROW_BYTES;
  static constexpr int U = QUERIES + WINDOW * KEY_ROW_BYTES;
  static constexpr int V = U + HISTORY * U_ROW_BYTES;
  static constexpr int WEIGHTS = V + WINDOW * V_ROW_BYTES;
  static constexpr int TOKENS = WEIGHTS + CHUNK_HEADS * 2 * WINDOW * COLUMN_WEIGHTS * 4;
  static constexpr int ROWS = TOKENS + CHUNK_HEADS * WINDOW * static_cast<int>(sizeof(TokenWeights));
  static constexpr int G = ROWS + CHUNK_HEADS * ROW_WEIGHTS * 4;
  static constexpr int RAW_GATES = G + CHUNK_HEADS * HISTORY * 4;
  static constexpr int CONSTANTS = RAW_GATES + NUM_GATES * CHUNK_HEADS * WINDOW * 4;
  static constexpr int CHUNK = whole_vectors(CONSTANTS + NUM_CONSTANTS * CHUNK_HEADS * 4);
  static constexpr int BYTES = (CHUNK + static_cast<int>(sizeof(Chunk)) + 127) / 128 * 128;
};

struct ChunkBuffer : BufferAddress<ChunkOffsets::CHUNK> {
  static constexpr int BYTES = ChunkOffsets::BYTES;

  // Of a pending row. In a flush rows from `pending` on are zero, up to MMA_TOKENS.
  __device__ unsigned char* key(int row) const { return base + ChunkOffsets::KEYS + row * KEY_ROW_BYTES; }
  __device__ unsigned char* window_key(int token) const { return key(MMA_TOKENS + token); }
  // The offset of column i of the products: keys and queries of the window by turns. Columns of tokens beyond the
  // window repeat its last one.
  __device__ static int column_offset(int column) {
    const int row = min(column / 2, WINDOW - 1) + (column % 2 == 0 ? MMA_TOKENS : MMA_TOKENS + WINDOW);
    return ChunkOffsets::KEYS + row * KEY_ROW_BYTES;
  }
  __device__ unsigned char* u(int row, int head) const {
    return base + ChunkOffsets::U + row * U_ROW_BYTES + head * VALUE_DIM * 4;
  }
  __device__ unsigned char* v(int token, int head) const {
    return base + ChunkOffsets::V + token * V_ROW_BYTES + head * VALUE_DIM * 2;
  }
  __device__ float* weights(int head, int column) const {
    return at<float>(ChunkOffsets::WEIGHTS) + (head * 2 * WINDOW + column) * COLUMN_WEIGHTS;
  }
  __device__ TokenWeights& token(int head, int token) const {
    return at<TokenWeights>(ChunkOffsets::TOKENS)[head * WINDOW + token];
  }
  __device__ float* row_weights(int head) const { return at<float>(ChunkOffsets::ROWS) + head * ROW_WEIGHTS; }
  __device__ float* g(int head) const { return at<float>(ChunkOffsets::G) + head * HISTORY; }
  // Of one window token: the aligned word in which its a or b stands.
  __device__ uint32_t* raw_gate(Gate gate, int head, int token) const {
    return at<uint32_t>(ChunkOffsets::RAW_GATES) + (gate * CHUNK_HEADS + head) * WINDOW + token;
  }
  __device__ float* constants(Constant which) const {
    return at<float>(ChunkOffsets::CONSTANTS) + which * CHUNK_HEADS;
  }
};

static_assert(ChunkOffsets::WEIGHTS % 16 == 0 && ChunkOffsets::TOKENS % 16 == 0 && sizeof(TokenWeights) % 16 == 0,
              "lanes read four numbers at once");

using HeadPlan = ChunkPlan<N_VALUE_HEADS>;
using PipelineShared = PipelineMemory<ChunkBuffer, STAGE_BYTES, GROUP_WARPS, NUM_LOADERS>;

}  // namespace replay
