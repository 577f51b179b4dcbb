// Bring a chunk's rows of k, q and v to its stage, and its gates to registers, by one solver warp. Rows that are not there
// become zeros: a product would spread what stands there.
#pragma once
#include "gated_delta_net/chunked/layout.cuh"

namespace replay {

// Of one tensor's rows of the window, what the lane copies: PIECES 16-byte pieces are a row, ROW_BYTES apart in the stage,
// where piece i of row r has place i ^ (r % 8) if pieces trade places, else i.
template <int PIECES, int ROW_BYTES, bool TRADE_PLACES>
struct LaneRows {
  static constexpr int ROWS_PER_PASS = WARP_SIZE / PIECES, MASK = TRADE_PLACES ? 7 : 0;
  static_assert(ROWS_PER_PASS * PIECES == WARP_SIZE, "a lane keeps its piece from row to row");

  const ACTIVATION_TYPE* first;  // of the next chunk
  int64_t stride;
  bool is_aligned;  // every row to 16 bytes

  __device__ LaneRows(const ACTIVATION_TYPE* first_row, int64_t stride, bool is_aligned)
      : first(first_row + row() * stride + piece() * 8), stride(stride), is_aligned(is_aligned) {}

  __device__ static int piece() { return threadIdx.x % PIECES; }
  __device__ static int row() { return threadIdx.x % WARP_SIZE / PIECES; }

  // Start copying eight rows of the next chunk, from row `start` on, a multiple of eight, and clear those that are not
  // there: `count` is the chunk's.
  __device__ void copy_eight(const Stage& stage, int offset, int start, int count) const {
    const uint32_t target = stage.address + offset + row() * ROW_BYTES + ((piece() ^ (row() & MASK)) << 4);
    const ACTIVATION_TYPE* source = first + start * stride;
#pragma unroll
    for (int passed = 0; passed < 8; passed += ROWS_PER_PASS) {
      ptx::copy_async_or_zero((target ^ ((passed & MASK) << 4)) + (start + passed) * ROW_BYTES, source,
                              start + passed + row() < count);
      source += ROWS_PER_PASS * stride;
    }
  }

  // All rows of the next chunk, element by element: for rows that are not aligned.
  __device__ void copy_elements(const Stage& stage, int offset, int count) const {
#pragma unroll 1
    for (int i = row(); i < CHUNK_SIZE; i += ROWS_PER_PASS) {
      unsigned char* target = stage.base + offset + i * ROW_BYTES + ((piece() ^ (i & MASK)) << 4);
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        reinterpret_cast<ACTIVATION_TYPE*>(target)[j] = i < count ? first[(i - row()) * stride + j] : ACTIVATION_TYPE{};
      }
    }
  }

  __device__ void advance() { first += NUM_SOLVERS * CHUNK_SIZE * stride; }

  // Bring the next chunk's row of the lane's number to the L2 cache; nothing waits for it.
  __device__ void prefetch() const {
    const int lane = threadIdx.x % WARP_SIZE;
    const ACTIVATION_TYPE* source = first + (lane - row()) * stride - piece() * 8;
#pragma unroll
    for (int i = 0; i < PIECES; i += 8) ptx::prefetch_line(source + i * 8);
  }
};

// Start copying a chunk's rows of a ring, PIECES 16-byte pieces each, and clear those that it has not. They are aligned,
// and the ring's end may be between any two of them.
template <int PIECES, typename SourceOf, typename TargetOf>
__device__ inline void load_ring_rows(const Stage& stage, int count, SourceOf source_of, TargetOf target_of) {
#pragma unroll 1
  for (int i = threadIdx.x % WARP_SIZE; i < CHUNK_SIZE * PIECES; i += WARP_SIZE) {
    const int row = i / PIECES, piece = i % PIECES;
    const unsigned char* source = reinterpret_cast<const unsigned char*>(source_of(row)) + piece * 16;
    ptx::copy_async_or_zero(stage.address + target_of(row, piece), source, row < count);
  }
}

template <int BYTES>
struct UnsignedOf {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<2> {
  using Type = uint16_t;
};
using GateBits = UnsignedOf<sizeof(GATE_TYPE)>::Type;

// A token's gates as they stand in memory: converting them at the load, even composing them of halves, would mean to wait
// for it; a load may just widen them. `g` is a ring row's.
struct RawGates {
  uint32_t a_bits, b_bits;
  float g;

  __device__ static GATE_TYPE value(uint32_t bits) {
    const GateBits narrow = static_cast<GateBits>(bits);
    GATE_TYPE gate;
    memcpy(&gate, &narrow, sizeof(gate));
    return gate;
  }
};

// A solver's way through its chunks; addresses only grow.
struct ChunkLoader {
  const Tensors& tensors;
  LaneRows<KEY_DIM / 8, KEY_ROW_BYTES, true> k, q;
  LaneRows<SLICE / 8, V_ROW_BYTES, false> v;
  const GATE_TYPE *a, *b;

  // `token` is the first one of the solver's first chunk of the window.
  __device__ ChunkLoader(const Tensors& tensors, int token)
      : tensors(tensors),
        k(tensors.k(token), tensors.params.k_stride_token, tensors.is_k_aligned()),
        q(tensors.q(token), tensors.params.q_stride_token, tensors.is_q_aligned()),
        v(tensors.v(token), tensors.params.v_stride_token, tensors.is_v_aligned()),
        a(tensors.a(token + threadIdx.x % WARP_SIZE)),
        b(tensors.b(token + threadIdx.x % WARP_SIZE)) {}

  __device__ RawGates load_gates(const Chunk& chunk) {
    const int lane = threadIdx.x % WARP_SIZE;
    RawGates gates = {};
    if (__builtin_expect(chunk.is_ring, false)) {
      if (lane < chunk.count) gates.g = *tensors.g_ring(tensors.row.checkpoint + chunk.first + lane);
      return gates;
    }
    if (lane < chunk.count) {
      gates.a_bits = *reinterpret_cast<const GateBits*>(a);
      gates.b_bits = *reinterpret_cast<const GateBits*>(b);
    }
    a += NUM_SOLVERS * CHUNK_SIZE * tensors.params.a_stride_token;
    b += NUM_SOLVERS * CHUNK_SIZE * tensors.params.b_stride_token;
    return gates;
  }

  // wait_for_copies() and a barrier of the warp complete it.
  __device__ void load(const Stage& stage, const Chunk& chunk) {
    if (__builtin_expect(chunk.is_ring, false)) return load_ring(stage, chunk);
    if (__builtin_expect(k.is_aligned && q.is_aligned && v.is_aligned, true)) {
#pragma unroll 1
      for (int start = 0; start < CHUNK_SIZE; start += 8) {
        k.copy_eight(stage, StageOffsets::K, start, chunk.count);
        q.copy_eight(stage, StageOffsets::Q, start, chunk.count);
        v.copy_eight(stage, StageOffsets::V, start, chunk.count);
      }
    } else {
      k.copy_elements(stage, StageOffsets::K, chunk.count);
      q.copy_elements(stage, StageOffsets::Q, chunk.count);
      v.copy_elements(stage, StageOffsets::V, chunk.count);
    }
    k.advance();
    q.advance();
    v.advance();
  }

  __device__ void load_ring(const Stage& stage, const Chunk& chunk) const {
    const int position = tensors.row.checkpoint + chunk.first;
    load_ring_rows<KEY_DIM / 8>(
        stage, chunk.count, [&](int row) { return tensors.k_ring(position + row); },
        [](int row, int piece) { return StageOffsets::K + Stage::piece_offset(row, piece); });
    load_ring_rows<SLICE / 4>(
        stage, chunk.count, [&](int row) { return tensors.u_ring(position + row); },
        [](int row, int piece) { return StageOffsets::RING_U + row * SLICE * 4 + piece * 16; });
  }

  // Bring the rows of the chunk that load() is to bring next to the L2 cache.
  __device__ void prefetch(const Chunk& chunk) const {
    if (chunk.is_ring || static_cast<int>(threadIdx.x) % WARP_SIZE >= chunk.count) return;
    k.prefetch();
    q.prefetch();
    v.prefetch();
  }
};

}  // namespace replay
