// Bring a chunk's rows of x, B and C to its stage, by one warp. The tokens are the pending rows of the ring and then
// the window, one sequence; pending rows have no C. Rows that are not there become zeros: a product would spread what
// stands there.
#pragma once
#include "mamba2/chunked/layout.cuh"

namespace replay {

// A run of tokens; token i < pending is ring row checkpoint + i, the others are window tokens.
struct Chunk {
  int first;
  int count;
  int num_ring;  // this many of them are ring rows

  __device__ Chunk(const Row& row, int first)
      : first(first),
        count(max(0, min(CHUNK_SIZE, row.pending + row.num_tokens - first))),
        num_ring(max(0, min(count, row.pending - first))) {}

  // The window token of a row of the chunk, negative for a ring row.
  __device__ int token(const Row& row, int i) const { return first + i - row.pending; }
  __device__ bool is_whole() const { return num_ring == 0 && count == CHUNK_SIZE; }
};

// What a lane copies of one tensor's rows of the window, PIECES 16-byte pieces each. In a stage they lie ROW_BYTES
// apart; if pieces trade places, piece i of row r has place i ^ (r % 8).
template <int PIECES, int ROW_BYTES, bool TRADE_PLACES>
struct LaneRows {
  // An instruction copies WIDTH neighbouring pieces of each of ROWS rows. A copy keeps the registers of its address for
  // as long as it is under way, so that addresses which follow each other through the same registers wait for the
  // copies, 110 clocks each. Therefore many pieces share an address, and addresses stay from chunk to chunk.
  static constexpr int WIDTH = PIECES % 4 == 0 ? 4 : 2, ROWS = WARP_SIZE / WIDTH, NUM_ADDRESSES = CHUNK_SIZE / ROWS;
  static_assert(PIECES % WIDTH == 0 && CHUNK_SIZE % ROWS == 0, "every lane has equally many pieces");
  static_assert(!TRADE_PLACES || WIDTH == 4, "trading places is flipping one bit of every other piece's address");

  const ACTIVATION_TYPE* addresses[NUM_ADDRESSES];  // of the lane's first piece in its rows of the next chunk

  __device__ LaneRows(const ACTIVATION_TYPE* first_row, int64_t stride) {
#pragma unroll
    for (int i = 0; i < NUM_ADDRESSES; ++i) addresses[i] = first_row + (i * ROWS + row()) * stride + piece() * 8;
  }

  // Eight lanes write to different banks: rows that are four apart, where pieces trade places.
  __device__ static int row() {
    const int lane = threadIdx.x % WARP_SIZE;
    return WIDTH == 4 ? lane / 4 % 2 * 4 + lane / 8 : lane / 2;
  }
  __device__ static int piece() { return threadIdx.x % WIDTH; }
  __device__ static int offset(int row, int piece) {
    return row * ROW_BYTES + ((TRADE_PLACES ? piece ^ (row % 8) : piece) << 4);
  }

  // Start copying all rows of the next chunk.
  __device__ void copy_whole(uint32_t rows) const {
    const uint32_t first = rows + offset(row(), piece()), second = TRADE_PLACES ? first ^ 64 : first + WIDTH * 16;
#pragma unroll
    for (int i = 0; i < NUM_ADDRESSES; ++i) {
#pragma unroll
      for (int k = 0; k < PIECES / WIDTH; ++k) {
        ptx::copy_async((k % 2 ? second : first) + i * ROWS * ROW_BYTES + k / 2 * 2 * WIDTH * 16,
                        addresses[i] + k * WIDTH * 8);
      }
    }
  }

  __device__ void advance(int64_t stride) {
#pragma unroll
    for (int i = 0; i < NUM_ADDRESSES; ++i) addresses[i] += CHUNK_SIZE * stride;
  }
};
using LaneX = LaneRows<SLICE_ROWS / 8, X_ROW_BYTES, false>;
using LaneBC = LaneRows<D_STATE / 8, BC_ROW_BYTES, true>;

// Copy the chunk's rows of the window one by one, and clear those after them. `source` is row 0 of the chunk. Rows that
// are aligned are under way afterwards, others are there.
template <typename Rows, int PIECES>
__device__ inline void copy_window(const Stage& stage, int offset, const ACTIVATION_TYPE* source, int64_t stride,
                                   bool is_aligned, const Chunk& chunk) {
#pragma unroll 1
  for (int i = chunk.num_ring * PIECES + threadIdx.x % WARP_SIZE; i < CHUNK_SIZE * PIECES; i += WARP_SIZE) {
    const int row = i / PIECES, piece = i % PIECES, target = offset + Rows::offset(row, piece);
    const ACTIVATION_TYPE* first = source + row * stride + piece * 8;
    if (is_aligned) {
      ptx::copy_async_or_zero(stage.address + target, first, row < chunk.count);
      continue;
    }
    ACTIVATION_TYPE* elements = reinterpret_cast<ACTIVATION_TYPE*>(stage.base + target);
#pragma unroll 1
    for (int j = 0; j < 8; ++j) elements[j] = row < chunk.count ? first[j] : ACTIVATION_TYPE{};
  }
}

// Start copying the chunk's rows of a ring; they are aligned.
template <typename Rows, int PIECES, typename SourceOf>
__device__ inline void copy_ring(uint32_t rows, const Chunk& chunk, SourceOf source_of) {
#pragma unroll 1
  for (int i = threadIdx.x % WARP_SIZE; i < chunk.num_ring * PIECES; i += WARP_SIZE) {
    const int row = i / PIECES, piece = i % PIECES;
    ptx::copy_async(rows + Rows::offset(row, piece), source_of(row) + piece * 8);
  }
}

// The way of the warp that brings them through all chunks.
struct ChunkLoader {
  static constexpr int X_PIECES = SLICE_ROWS / 8, BC_PIECES = D_STATE / 8;
  const Tensors& tensors;
  int first_channel;
  LaneBC C, B;
  LaneX x;

  __device__ ChunkLoader(const Tensors& tensors, int first_channel)
      : tensors(tensors),
        first_channel(first_channel),
        C(tensors.C(-tensors.row.pending), tensors.params.C_stride_token),
        B(tensors.B(-tensors.row.pending), tensors.params.B_stride_token),
        x(tensors.x(-tensors.row.pending) + first_channel, tensors.params.x_stride_token) {}

  // Start all copies of the next chunk; what is not aligned is there at once.
  __device__ void load(const Chunk& chunk, const Stage& stage) const {
    const bool is_aligned = tensors.is_x_aligned() && tensors.is_B_aligned() && tensors.is_C_aligned();
    if (__builtin_expect(is_aligned && chunk.is_whole(), true)) {
      B.copy_whole(stage.address + StageOffsets::B);
      C.copy_whole(stage.address + StageOffsets::C);
      x.copy_whole(stage.address + StageOffsets::X);
    } else {
      load_rows(chunk, stage, is_aligned);
    }
  }

  // To the chunk after it; some time after its copies have started.
  __device__ void advance() {
    C.advance(tensors.params.C_stride_token);
    B.advance(tensors.params.B_stride_token);
    x.advance(tensors.params.x_stride_token);
  }

  // A chunk with rows of the ring, or that is not full, or not aligned.
  __device__ void load_rows(const Chunk& chunk, const Stage& stage, bool is_aligned) const {
    const Mamba2Params& params = this->tensors.params;
    Row row = this->tensors.row;
    row.index = fresh(row.index);  // such chunks are few: no addresses are kept for them
    const Tensors tensors{params, row};
    const int token = chunk.token(tensors.row, 0), position = tensors.row.checkpoint + chunk.first;
    copy_window<LaneBC, BC_PIECES>(stage, StageOffsets::C, tensors.C(token), params.C_stride_token, is_aligned, chunk);
    copy_window<LaneBC, BC_PIECES>(stage, StageOffsets::B, tensors.B(token), params.B_stride_token, is_aligned, chunk);
    copy_window<LaneX, X_PIECES>(stage, StageOffsets::X, tensors.x(token) + first_channel, params.x_stride_token,
                                 is_aligned, chunk);
    copy_ring<LaneBC, BC_PIECES>(stage.address + StageOffsets::B, chunk,
                                 [&](int i) { return tensors.B_ring(position + i); });
    copy_ring<LaneX, X_PIECES>(stage.address + StageOffsets::X, chunk,
                               [&](int i) { return tensors.x_ring(position + i) + first_channel; });
  }
};

}  // namespace replay
