// Which heads a thread block works on, in which chunks, and where a chunk's tensors are.
//
// Chunks are taken by thread blocks as they come to them. Equal shares would end far apart: a flush writes what others
// only read, a row without a checkpoint reads none, and multiprocessors do not all get the same part of the bandwidth.
#pragma once
#include "common/dependent_launch.cuh"
#include "mamba2/pipeline/layout.cuh"

namespace replay {

// When lengths are read: after wait_for_previous(), or before it as a guess of what they will be.
enum class Reading { FINAL, GUESS };

// ring_row() of many positions: the division is done once, before anything is waited for.
struct RingRows {
  uint32_t num_rows, reciprocal;  // of 2^32, rounded down

  __device__ explicit RingRows(int ring_rows)
      : num_rows(static_cast<uint32_t>(ring_rows)), reciprocal(0xffffffffu / num_rows) {}

  __device__ int row_of(int position) const {
    const uint32_t place = static_cast<uint32_t>(position);
    // The quotient or one less, since positions are below 2^31.
    const uint32_t rest = place - __umulhi(place, reciprocal) * num_rows;
    return static_cast<int>(rest < num_rows ? rest : rest - num_rows);
  }
};

// Lengths and slot of one row as they stand in memory.
struct RawLengths {
  int slot, past, checkpoint, num_tokens;

  template <Reading READING>
  __device__ static RawLengths read(const Mamba2Params& params, int row) {
    if constexpr (READING == Reading::FINAL) {
      return {params.slot_ids[row], params.past_lengths[row], params.checkpoint_lengths[row], params.num_tokens[row]};
    }
    const int slot = ptx::load_from_l2(params.slot_ids + row);
    return {slot < params.num_slots ? slot : -1, ptx::load_from_l2(params.past_lengths + row),
            ptx::load_from_l2(params.checkpoint_lengths + row), ptx::load_from_l2(params.num_tokens + row)};
  }

  __device__ RowLengths clamped(const Mamba2Params& params, const RingRows& ring) const {
    RowLengths lengths;
    lengths.slot = slot;
    lengths.checkpoint = max(0, checkpoint);
    lengths.pending = max(0, min(past - checkpoint, HISTORY));
    lengths.num_tokens = slot < 0 ? 0 : max(0, min(num_tokens, min(params.seq_len, WINDOW)));
    lengths.first_pending_row = ring.row_of(max(0, checkpoint));
    lengths.first_window_row = ring.row_of(max(0, past));
    return lengths;
  }
};

// How the heads of all rows are cut into chunks, by their number: whole chunks first, then, for thread blocks to end at
// about the same time, some of a TAIL_PARTS-th. Where whole ones are fewer than the blocks all are as small as it takes
// to give each block one. The first gridDim.x chunks are the blocks' own; the others are taken as blocks come to them.
struct ChunkPlan {
  int num_whole, small_heads, num_chunks;
  RingRows ring;

  __device__ explicit ChunkPlan(const Mamba2Params& params) : ring(params.ring_rows) {
    const int num_heads = params.num_rows * N_HEADS, num_blocks = gridDim.x;
    const int most_whole = num_heads / CHUNK_HEADS;
    if (most_whole >= num_blocks) {
      num_whole = max(num_blocks, most_whole - TAIL_CHUNKS * num_blocks);
      small_heads = CHUNK_HEADS / TAIL_PARTS;
    } else {
      num_whole = 0;
      small_heads = CHUNK_HEADS;
      while (small_heads * num_blocks > num_heads) small_heads /= 2;
    }
    num_chunks = num_whole + (num_heads - num_whole * CHUNK_HEADS) / small_heads;
  }

  __device__ int row_of(int index) const { return first_head_of(index) / N_HEADS; }

  __device__ Chunk at(int index, const RowLengths& lengths) const {
    Chunk chunk;
    chunk.lengths = lengths;
    chunk.row = row_of(index);
    chunk.first_head = first_head_of(index) % N_HEADS;
    chunk.num_heads = index < num_whole ? CHUNK_HEADS : small_heads;
    return chunk;
  }

 private:
  // In the line of all rows' heads.
  __device__ int first_head_of(int index) const {
    const int whole = min(index, num_whole);
    return whole * CHUNK_HEADS + (index - whole) * small_heads;
  }
};

// The chunks of a thread block, for the one warp that takes them. They are drawn two ahead, and lengths are read one
// ahead: both take long behind the tiles that are on their way. Blocks draw until they draw a chunk that is not there,
// num_chunks draws in all, which take params.num_taken round to 0 again. When there is nothing left to draw the next
// kernel may start: it prepares itself while this one finishes.
class ChunkTaker {
 public:
  __device__ ChunkTaker(const Mamba2Params& params, const ChunkPlan& plan)
      : params(params), plan(plan), index(blockIdx.x), is_drawing(plan.num_chunks > static_cast<int>(gridDim.x)) {
    raw = RawLengths::read<Reading::FINAL>(params, plan.row_of(index));
    draw_or_end();
  }

  // Its num_heads is 0 after the last one.
  __device__ Chunk chunk() const {
    if (index >= plan.num_chunks) return {{}, 0, 0, 0};
    return plan.at(index, raw.clamped(params, plan.ring));
  }

  __device__ void advance() {
    if (!is_drawing) {
      index = plan.num_chunks;
      return;
    }
    index = static_cast<int>(gridDim.x) + __shfl_sync(FULL_WARP, drawn, 0);
    is_drawing = index < plan.num_chunks;
    if (is_drawing) raw = RawLengths::read<Reading::FINAL>(params, plan.row_of(index));
    draw_or_end();
  }

 private:
  const Mamba2Params& params;
  const ChunkPlan& plan;
  int index, drawn = 0;
  bool is_drawing;
  RawLengths raw;

  __device__ void draw_or_end() {
    if (!is_drawing) {
      let_next_start();
    } else if (threadIdx.x % WARP_SIZE == 0) {
      drawn = static_cast<int>(ptx::increment_to(params.num_taken, plan.num_chunks - 1));
    }
  }
};

// Addresses of a chunk's tensors; x and the x ring at its first head, whose neighbours follow.
struct ChunkTensors {
  const Mamba2Params& params;
  const Chunk& chunk;

  __device__ const ACTIVATION_TYPE* x(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.x) + chunk.row * params.x_stride_batch +
           token * params.x_stride_token + chunk.first_head * params.x_stride_head;
  }
  __device__ const ACTIVATION_TYPE* B(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.B) + chunk.row * params.B_stride_batch +
           token * params.B_stride_token + chunk.group() * params.B_stride_group;
  }
  __device__ const ACTIVATION_TYPE* C(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.C) + chunk.row * params.C_stride_batch +
           token * params.C_stride_token + chunk.group() * params.C_stride_group;
  }
  __device__ const DT_TYPE* raw_dt(int token, int head) const {
    return static_cast<const DT_TYPE*>(params.dt) + chunk.row * params.dt_stride_batch +
           token * params.dt_stride_token + chunk.first_head + head;
  }
  __device__ ACTIVATION_TYPE* y(int token) const {
    const int64_t line = (static_cast<int64_t>(chunk.row) * params.seq_len + token) * N_HEADS + chunk.first_head;
    return static_cast<ACTIVATION_TYPE*>(params.y) + line * HEAD_DIM;
  }
  // All heads of a chunk and all of their state rows are neighbours.
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + chunk.lengths.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(chunk.first_head) * HEAD_DIM * D_STATE;
  }
  // The rows of the rings: pending ones by their number, the window's by their token. They wrap once at most.
  __device__ int pending_line(int row) const { return wrap(chunk.lengths.first_pending_row + row); }
  __device__ int window_line(int token) const { return wrap(chunk.lengths.first_window_row + token); }
  __device__ ACTIVATION_TYPE* x_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_HEADS + chunk.first_head) * HEAD_DIM;
    return static_cast<ACTIVATION_TYPE*>(params.x_ring) + chunk.lengths.slot * params.x_ring_stride_slot + first;
  }
  __device__ ACTIVATION_TYPE* B_ring(int line) const {
    const int64_t first = (static_cast<int64_t>(line) * N_GROUPS + chunk.group()) * D_STATE;
    return static_cast<ACTIVATION_TYPE*>(params.B_ring) + chunk.lengths.slot * params.B_ring_stride_slot + first;
  }
  __device__ float* dt_ring(int line, int head) const {
    const int64_t first = static_cast<int64_t>(line) * N_HEADS + chunk.first_head + head;
    return params.dt_ring + chunk.lengths.slot * params.dt_ring_stride_slot + first;
  }

 private:
  __device__ int wrap(int line) const { return line < params.ring_rows ? line : line - params.ring_rows; }
};

}  // namespace replay
