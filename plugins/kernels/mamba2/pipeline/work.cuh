// Which heads a thread block works on, in which chunks, and where a chunk's tensors are.
//
// All heads of all rows stand in one line, each as long as the bytes that it must move: a flush writes what others only
// read, a row without a checkpoint reads none. The thread blocks cut the line into equal parts.
#pragma once
#include "mamba2/pipeline/layout.cuh"

namespace replay {

// When lengths are read: after wait_for_previous(), or before it as a guess of what they will be.
enum class Reading { FINAL, GUESS };

template <Reading READING>
__device__ inline RowLengths read_lengths(const Mamba2Params& params, int row) {
  int slot, past, checkpoint, num_tokens;
  if constexpr (READING == Reading::FINAL) {
    slot = params.slot_ids[row];
    past = params.past_lengths[row];
    checkpoint = params.checkpoint_lengths[row];
    num_tokens = params.num_tokens[row];
  } else {
    slot = ptx::load_from_l2(params.slot_ids + row);
    past = ptx::load_from_l2(params.past_lengths + row);
    checkpoint = ptx::load_from_l2(params.checkpoint_lengths + row);
    num_tokens = ptx::load_from_l2(params.num_tokens + row);
    if (slot >= params.num_slots) slot = -1;
  }
  RowLengths lengths;
  lengths.slot = slot;
  lengths.checkpoint = max(0, checkpoint);
  lengths.pending = max(0, min(past - checkpoint, HISTORY));
  lengths.num_tokens = slot < 0 ? 0 : max(0, min(num_tokens, min(params.seq_len, WINDOW)));
  lengths.first_pending_row = ring_row(max(0, checkpoint), params.ring_rows);
  lengths.first_window_row = ring_row(max(0, past), params.ring_rows);
  return lengths;
}

// All threads: bring the lengths, which everything waits for, to the cache.
__device__ inline void prefetch_lengths(const Mamba2Params& params) {
  constexpr int ROWS = 128 / static_cast<int>(sizeof(int32_t));
  for (int row = threadIdx.x * ROWS; row < params.num_rows; row += BLOCK_THREADS * ROWS) {
    ptx::prefetch_line(params.slot_ids + row);
    ptx::prefetch_line(params.past_lengths + row);
    ptx::prefetch_line(params.checkpoint_lengths + row);
    ptx::prefetch_line(params.num_tokens + row);
  }
}

// The length of one head in the line, in rows of x; at least 1, for outputs are written in any case.
__device__ inline int cost_of_head(const Mamba2Params& params, const RowLengths& lengths) {
  constexpr int STATE_COST = D_STATE * static_cast<int>(sizeof(STATE_TYPE) / sizeof(ACTIVATION_TYPE));
  if (!lengths.is_active() || params.num_rows == 1) return 1;
  // Of the window: x read, its ring row and y written.
  const int rows = lengths.pending + 3 * lengths.num_tokens + 1;
  return rows + (lengths.has_state() ? STATE_COST : 0) + (lengths.is_flush() ? STATE_COST * FLUSH_PERCENT / 100 : 0);
}

// A thread block's part of the line: the heads that begin in it.
struct Share {
  int64_t begin, end;
  int row;            // where `begin` is
  int64_t row_begin;  // of that row
};

// Neighbours compute a border that they share alike: in fractions of 2^-32, which need no 64-bit division.
__device__ inline Share part_of_line(int64_t length, int row, int64_t row_begin) {
  const uint64_t part = 0xffffffffu / gridDim.x;
  const auto border = [=](unsigned block) {
    return block == gridDim.x ? length : static_cast<int64_t>(__umul64hi(length, part * block << 32));
  };
  return {border(blockIdx.x), border(blockIdx.x + 1), row, row_begin};
}

// All threads of the block: one part of the rows each, then a sum over them. The heads of a single row are as long as
// each other; nothing needs to be read for that.
template <Reading READING>
__device__ inline Share find_share(const Mamba2Params& params, const PipelineShared& shared) {
  if (params.num_rows == 1) return part_of_line(N_HEADS, 0, 0);
  constexpr int NUM_WARPS = BLOCK_THREADS / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  int64_t* found = reinterpret_cast<int64_t*>(shared.base + PipelineShared::SHARE);
  int* warp_costs = reinterpret_cast<int*>(found + 2);
  const int rows_per_thread = (params.num_rows + BLOCK_THREADS - 1) / BLOCK_THREADS;
  const int first = min(static_cast<int>(threadIdx.x) * rows_per_thread, params.num_rows);
  const int last = min(first + rows_per_thread, params.num_rows);
  int cost = 0;
#pragma unroll 1
  for (int row = first; row < last; ++row) cost += cost_of_head(params, read_lengths<READING>(params, row));

  int up_to = cost;  // of this thread's rows and those before them
#pragma unroll
  for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
    const int other = __shfl_up_sync(FULL_WARP, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  if (lane == WARP_SIZE - 1) warp_costs[warp] = up_to;
  __syncthreads();
  int before = up_to - cost, all = 0;
#pragma unroll
  for (int i = 0; i < NUM_WARPS; ++i) {
    if (i < warp) before += warp_costs[i];
    all += warp_costs[i];
  }
  Share share = part_of_line(static_cast<int64_t>(all) * N_HEADS, 0, 0);
  int64_t row_begin = static_cast<int64_t>(before) * N_HEADS;
  if (row_begin <= share.begin && share.begin < row_begin + static_cast<int64_t>(cost) * N_HEADS) {
    int row = first;
    while (row + 1 < last) {
      const int row_cost = cost_of_head(params, read_lengths<READING>(params, row));
      const int64_t next = row_begin + static_cast<int64_t>(row_cost) * N_HEADS;
      if (share.begin < next) break;
      row_begin = next;
      ++row;
    }
    found[0] = row_begin;
    found[1] = row;
  }
  __syncthreads();
  share.row_begin = found[0];
  share.row = static_cast<int>(found[1]);
  return share;
}

// The chunks of a share, one after the other. Each warp that walks does so by itself, to the same chunks.
template <Reading READING>
class ChunkWalk {
 public:
  __device__ ChunkWalk(const Mamba2Params& params, const Share& share)
      : params(params), end(share.end), row_begin(share.row_begin), row(share.row) {
    enter_row(share.begin);
  }

  // What is left, of the row it is in.
  __device__ Chunk rest_of_row() const { return {lengths, row, head, last_head - head}; }
  __device__ int last_head_of_row() const { return last_head; }

  // The next chunk; its num_heads is 0 after the last one.
  __device__ Chunk next() {
    while (head >= last_head && row_end() < end && row + 1 < params.num_rows) {
      row_begin = row_end();
      ++row;
      enter_row(row_begin);
    }
    Chunk chunk;
    chunk.lengths = lengths;
    chunk.row = row;
    chunk.first_head = head;
    // Ends where chunks from the row's first head on would end.
    chunk.num_heads = max(0, min(CHUNK_HEADS - head % CHUNK_HEADS, last_head - head));
    head += chunk.num_heads;
    return chunk;
  }

 private:
  const Mamba2Params& params;
  int64_t end, row_begin;
  int row, head, last_head, cost;
  RowLengths lengths;

  __device__ int64_t row_end() const { return row_begin + static_cast<int64_t>(cost) * N_HEADS; }

  __device__ void enter_row(int64_t begin) {
    lengths = read_lengths<READING>(params, row);
    cost = cost_of_head(params, lengths);
    head = heads_before(begin);
    last_head = heads_before(end);
  }

  // Heads of the row that begin before a place in the line.
  __device__ int heads_before(int64_t place) const {
    const int64_t distance = place - row_begin;
    if (distance >= static_cast<int64_t>(cost) * N_HEADS) return N_HEADS;
    return (static_cast<int>(distance) + cost - 1) / cost;
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
