// What the warps of the pipelined step share: the memory of a thread block and its barriers.
//
// A *chunk* is up to CHUNK_HEADS neighbouring heads of one (row of the step, group): they share B and C. A *tile* is
// TILE_ROWS neighbouring state rows of one head: those of one product, and the work of one warp. Chunks go through the
// chunk buffers in turn; tile i of a thread block stands in stage i % NUM_STAGES and belongs to consumer warp
// i % NUM_CONSUMERS.
#pragma once
#include "common/barrier.cuh"
#include "common/lanes.cuh"
#include "common/protocol.h"
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
constexpr int HALF_WARP = 16;  // has one head at a time

static_assert(sizeof(ACTIVATION_TYPE) == 2 && D_STATE == 128, "the fragments are laid out for these");
static_assert(ROW_GROUPS <= 2 && WINDOW <= 8, "pending rows fill two products' depth, tokens their columns");
static_assert(HEAD_DIM % TILE_ROWS == 0, "tiles cover a head exactly");
static_assert(HEADS_PER_GROUP % CHUNK_HEADS == 0, "chunks do not cross groups");
static_assert(CHUNK_HEADS <= 2 * TEAM_WARPS, "a team weighs all heads of a chunk at once");
static_assert(NUM_STAGES % NUM_CONSUMERS == 0, "a stage has the same warp each time, else waits skip a phase");
static_assert(CHUNK_HEADS % TAIL_PARTS == 0, "the last chunks are equal parts of whole ones");
static_assert(CHUNK_BUFFERS >= 2, "a chunk is brought while another is consumed");
static_assert(BLOCK_THREADS == (NUM_CONSUMERS + NUM_WEIGHERS + NUM_LOADERS + 1) * WARP_SIZE,
              "pipeline_shape.py counts other warps");

// Lengths of one row of the step, clamped: lengths that break the protocol must not lead outside of shared memory or
// of a slot's rings.
struct RowLengths {
  int slot;  // -1: padding
  int checkpoint;
  int pending;
  int num_tokens;
  int first_pending_row;  // of the rings: where position `checkpoint` stands
  int first_window_row;   // of the rings: where the window goes

  __device__ bool is_flush() const { return needs_flush(pending, 0, HISTORY, MAX_DRAFT_LEN); }
  // By bits: branches would take longer.
  __device__ bool is_active() const { return (slot >= 0) & ((num_tokens > 0) | is_flush()); }
  // A checkpoint at position 0 is zero whatever the memory holds.
  __device__ bool has_state() const { return checkpoint > 0; }
  __device__ bool is_state_read() const { return is_active() && has_state(); }
  // Outputs see the token rows first() .. first() + live() + num_tokens - 1: a flush has put the pending ones into
  // the state. Without a flush pending + WINDOW <= HISTORY, so they are at most ROW_GROUPS * MMA_TOKENS either way.
  __device__ int first() const { return is_flush() ? pending : 0; }
  __device__ int live() const { return is_flush() ? 0 : pending; }
};

// Written to its buffer by the loader warp that took it, read by everybody else.
struct Chunk {
  RowLengths lengths;
  int row;  // of the step
  int first_head;
  int num_heads;  // 0: the thread block has no more chunks

  __device__ int group() const { return first_head / HEADS_PER_GROUP; }
  __device__ int num_tiles() const { return num_heads * TILES_PER_HEAD; }
};

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
  static constexpr int CHUNK = FOLD + CHUNK_HEADS * (FOLD_DECAY + 1) * 4;
  static constexpr int BYTES = (CHUNK + static_cast<int>(sizeof(Chunk)) + 127) / 128 * 128;
};

// One chunk buffer, by its address in either form.
struct ChunkBuffer {
  unsigned char* base;
  uint32_t address;

  template <typename T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  __device__ Chunk& chunk() const { return *at<Chunk>(ChunkOffsets::CHUNK); }
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

// The dynamic shared memory: NUM_STAGES tiles, CHUNK_BUFFERS chunk buffers, the barriers.
struct PipelineShared {
  unsigned char* base;
  uint32_t address;

  static constexpr int BUFFERS = NUM_STAGES * TILE_BYTES;
  static constexpr int BARRIERS = BUFFERS + CHUNK_BUFFERS * ChunkOffsets::BYTES;
  static constexpr int NUM_BARRIERS = 2 * NUM_STAGES + (3 + NUM_LOADERS) * CHUNK_BUFFERS;
  static constexpr int BYTES = (BARRIERS + 8 * NUM_BARRIERS + 15) / 16 * 16;

  __device__ explicit PipelineShared(void* memory)
      : base(static_cast<unsigned char*>(memory)), address(ptx::shared_address(memory)) {}

  __device__ ChunkBuffer buffer(int index) const {
    const int offset = BUFFERS + index * ChunkOffsets::BYTES;
    return {base + offset, address + offset};
  }
  __device__ uint32_t barrier(int index) const { return address + BARRIERS + 8 * index; }
  __device__ uint32_t is_stage_full(int stage) const { return barrier(stage); }
  __device__ uint32_t is_stage_free(int stage) const { return barrier(NUM_STAGES + stage); }
  // The description of the chunk is there; what a loader brings is too; its weights are; everybody is through with it.
  // Of those who then free it some must have waited for each loader: none may fall a chunk buffer's turn behind.
  __device__ uint32_t is_chunk_known(int buffer) const { return chunk_barrier(0, buffer); }
  __device__ uint32_t is_chunk_weighed(int buffer) const { return chunk_barrier(1, buffer); }
  __device__ uint32_t is_chunk_free(int buffer) const { return chunk_barrier(2, buffer); }
  __device__ uint32_t is_loaded(Loader loader, int buffer) const { return chunk_barrier(3 + loader, buffer); }

  __device__ void init_barriers() const {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      ptx::barrier_init(is_stage_full(stage), 1);
      ptx::barrier_init(is_stage_free(stage), 1);
    }
    for (int buffer = 0; buffer < CHUNK_BUFFERS; ++buffer) {
      ptx::barrier_init(is_chunk_known(buffer), 1);
      // Each lane of a loader warp when its copies have come.
      for (int loader = 0; loader < NUM_LOADERS; ++loader) {
        ptx::barrier_init(is_loaded(static_cast<Loader>(loader), buffer), WARP_SIZE);
      }
      ptx::barrier_init(is_chunk_weighed(buffer), TEAM_WARPS);
      ptx::barrier_init(is_chunk_free(buffer), NUM_CONSUMERS + TEAM_WARPS);
    }
    ptx::fence_barrier_init();
  }

 private:
  __device__ uint32_t chunk_barrier(int kind, int buffer) const {
    return barrier(2 * NUM_STAGES + kind * CHUNK_BUFFERS + buffer);
  }
};

static_assert(PipelineShared::BYTES == DYNAMIC_SHARED_BYTES, "pipeline_shape.py counts shared memory differently");

// A place in a ring of PERIOD stages or buffers, and the parity of the phase that its barriers are in; in one register.
template <int PERIOD>
struct Turn {
  int place;  // in two rounds

  __device__ explicit Turn(int first = 0) : place(first) {}
  __device__ int index() const { return place < PERIOD ? place : place - PERIOD; }
  __device__ uint32_t parity() const { return place < PERIOD ? 0 : 1; }
  // For who waits until a place is free, as all places are at first: of the phase before.
  __device__ uint32_t parity_before() const { return place < PERIOD ? 1 : 0; }
  // By at most PERIOD.
  __device__ void advance(int steps) {
    place += steps;
    if (place >= 2 * PERIOD) place -= 2 * PERIOD;
  }
};

}  // namespace replay
