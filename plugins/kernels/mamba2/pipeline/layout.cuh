// What the warps of the pipelined step share: the memory of a thread block.
//
// The heads of a chunk share B and C. A *tile* is TILE_ROWS neighbouring state rows of one head: those of one product,
// and the work of one warp. Tile i of a thread block stands in stage i % NUM_STAGES and belongs to consumer warp
// i % NUM_CONSUMERS.
#pragma once
#include "common/pipeline/memory.cuh"
#include "common/types.cuh"
#include "mamba2/params.h"

namespace replay {

constexpr int WINDOW = 1 + MAX_DRAFT_LEN;
constexpr int HEADS_PER_GROUP = N_HEADS / N_GROUPS;
constexpr bool IS_STATE_FP32 = sizeof(STATE_TYPE) == 4;
constexpr int MMA_TOKENS = 16;  // token rows that one product takes
constexpr int ROW_GROUPS = (HISTORY + MMA_TOKENS - 1) / MMA_TOKENS;  // of so many rows
constexpr int TILE_ROWS = 16;
constexpr int TILES_PER_HEAD = HEAD_DIM / TILE_ROWS;
constexpr int STATE_ROW_BYTES = D_STATE * static_cast<int>(sizeof(STATE_TYPE));
constexpr int TILE_BYTES = TILE_ROWS * STATE_ROW_BYTES;
constexpr int NUM_WEIGHERS = COEFFICIENT_TEAMS * TEAM_WARPS;
constexpr int TOKEN_ROWS = HISTORY + WINDOW;
// 16 bytes between rows: eight of them, read at once, then stand in different shared-memory banks.
constexpr int ROW_PADDING_BYTES = 16;
constexpr int X_ROW_BYTES = CHUNK_HEADS * HEAD_DIM * 2 + ROW_PADDING_BYTES;
constexpr int BC_ROW_BYTES = D_STATE * 2 + ROW_PADDING_BYTES;
// The weights of one (head, token) as B operands of mma_bf16: for each group of rows, per q four words, high parts then
// low parts.
constexpr int GROUP_WEIGHT_BYTES = 4 * 16;
constexpr int FOLD_DECAY = ROW_GROUPS * MMA_TOKENS;  // the checkpoint's, after the weights of the pending rows
// Loader warps, by what each brings: dt and the heads' constants A, D and dt_bias; x; B and C.
enum Loader : int { TIMES_LOADER, X_LOADER, BC_LOADER, NUM_LOADERS };
constexpr int NUM_CONSTANTS = 3;
// Do x, B and C come raw, before their convolution?
constexpr bool HAS_CONVOLUTION = IS_RAW != 0;

static_assert(sizeof(ACTIVATION_TYPE) == 2 && D_STATE == 128, "the fragments are laid out for these");
static_assert(ROW_GROUPS <= 2 && WINDOW <= 8, "pending rows fill two products' depth, tokens their columns");
static_assert(HEAD_DIM % TILE_ROWS == 0, "tiles cover a head exactly");
static_assert(HEADS_PER_GROUP % CHUNK_HEADS == 0, "chunks do not cross groups");
static_assert(CHUNK_HEADS <= 2 * TEAM_WARPS, "a team weighs all heads of a chunk at once");
static_assert(NUM_STAGES % NUM_CONSUMERS == 0, "a stage has the same warp each time, else waits skip a phase");
static_assert(BLOCK_THREADS == (NUM_CONSUMERS + NUM_WEIGHERS + NUM_LOADERS + 1) * WARP_SIZE,
              "specializations/mamba2_pipeline.py counts other warps");

// Offsets in a chunk buffer: token rows of x, B and C and dt, then what the coefficient warps make of them.
struct ChunkOffsets {
  static constexpr int X = 0;
  static constexpr int B = X + TOKEN_ROWS * X_ROW_BYTES;
  static constexpr int C = B + TOKEN_ROWS * BC_ROW_BYTES;
  static constexpr int WEIGHTS = C + WINDOW * BC_ROW_BYTES;
  static constexpr int TIMES = WEIGHTS + CHUNK_HEADS * WINDOW * ROW_GROUPS * GROUP_WEIGHT_BYTES;
  static constexpr int RAW_TIMES = TIMES + CHUNK_HEADS * HISTORY * 4;
  static constexpr int CONSTANTS = RAW_TIMES + CHUNK_HEADS * WINDOW * 4;
  static constexpr int DECAYS = CONSTANTS + NUM_CONSTANTS * CHUNK_HEADS * 4;
  static constexpr int FOLD = DECAYS + CHUNK_HEADS * WINDOW * 4;
  static constexpr int CHUNK = whole_vectors(FOLD + CHUNK_HEADS * (FOLD_DECAY + 1) * 4);
  static constexpr int BYTES = (CHUNK + static_cast<int>(sizeof(Chunk)) + 127) / 128 * 128;
};

struct ChunkBuffer : BufferAddress<ChunkOffsets::CHUNK> {
  static constexpr int BYTES = ChunkOffsets::BYTES;

  __device__ float* pending_times(int head) const { return at<float>(ChunkOffsets::TIMES) + head * HISTORY; }
  // Of one window token: the aligned word in which its dt stands.
  __device__ uint32_t* raw_time(int head, int token) const {
    return at<uint32_t>(ChunkOffsets::RAW_TIMES) + head * WINDOW + token;
  }
  __device__ float* constants(int which) const { return at<float>(ChunkOffsets::CONSTANTS) + which * CHUNK_HEADS; }
  __device__ float* decays(int head) const { return at<float>(ChunkOffsets::DECAYS) + head * WINDOW; }
  __device__ float* fold_weights(int head) const { return at<float>(ChunkOffsets::FOLD) + head * (FOLD_DECAY + 1); }
  __device__ unsigned char* weights(int head, int token, int group) const {
    return base + ChunkOffsets::WEIGHTS + ((head * WINDOW + token) * ROW_GROUPS + group) * GROUP_WEIGHT_BYTES;
  }
  __device__ unsigned char* x(int row) const { return base + ChunkOffsets::X + row * X_ROW_BYTES; }
  __device__ unsigned char* B(int row) const { return base + ChunkOffsets::B + row * BC_ROW_BYTES; }
  __device__ unsigned char* C(int token) const { return base + ChunkOffsets::C + token * BC_ROW_BYTES; }
};

using HeadPlan = ChunkPlan<N_HEADS>;
constexpr int NUM_CONVOLVED = HAS_CONVOLUTION ? 2 : 0;
using Memory = PipelineMemory<ChunkBuffer, TILE_BYTES, 1, NUM_LOADERS, NUM_CONVOLVED>;

struct PipelineShared : Memory {
  using Memory::Memory;

  // What a loader brings is as the step needs it: dt when it is there, x, B and C when they are convolved as well.
  __device__ uint32_t is_ready(Loader loader, int buffer) const {
    return HAS_CONVOLUTION && loader >= X_LOADER ? further_barrier(loader - X_LOADER, buffer) : is_loaded(loader, buffer);
  }
};

}  // namespace replay
