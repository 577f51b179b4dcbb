// Rooms of the prefill: a chunk of tokens in shared memory, and the recurrence over it with the state in registers.
//
// The tokens are the pending rows of the ring and then the window, one sequence; pending rows have no output.
// Shared memory, two such buffers:  B, C [CHUNK_SIZE, D_STATE]  x [CHUNK_SIZE, HEAD_DIM]  activation type
//                                   dt, decay [CHUNK_SIZE]  fp32
#pragma once
#include "common/softplus.cuh"
#include "mamba2/fold.cuh"

namespace replay {

struct ChunkShared {
  ACTIVATION_TYPE* B;
  ACTIVATION_TYPE* C;
  ACTIVATION_TYPE* x;
  float* dt;
  float* decay;

  static constexpr int BYTES =
      CHUNK_SIZE * (2 * D_STATE + HEAD_DIM) * static_cast<int>(sizeof(ACTIVATION_TYPE)) +
      2 * CHUNK_SIZE * static_cast<int>(sizeof(float));

  __device__ ChunkShared(void* base, int buffer)
      : B(reinterpret_cast<ACTIVATION_TYPE*>(static_cast<char*>(base) + buffer * BYTES)),
        C(B + CHUNK_SIZE * D_STATE),
        x(C + CHUNK_SIZE * D_STATE),
        dt(reinterpret_cast<float*>(x + CHUNK_SIZE * HEAD_DIM)),
        decay(dt + CHUNK_SIZE) {}
};
static_assert(ChunkShared::BYTES % 16 == 0, "the second buffer is aligned for 16-byte copies");

// A run of tokens; token i < pending is ring row checkpoint + i, the others are window tokens.
struct Chunk {
  int first;
  int count;
};

// Start copying a chunk's B, C and x; wait_for_copies() and a barrier complete it.
__device__ inline void stage_chunk(const Tensors& tensors, Chunk chunk, const ChunkShared& shared) {
  const int pending = tensors.row.pending, base = tensors.row.checkpoint + chunk.first;
  const int num_ring = max(0, min(chunk.count, pending - chunk.first)), num_window = chunk.count - num_ring;
  const int token = chunk.first + num_ring - pending;
  stage_rows<D_STATE, D_STATE>(shared.B, num_ring, true, [&](int i) { return tensors.B_ring(base + i); });
  stage_rows<HEAD_DIM, HEAD_DIM>(shared.x, num_ring, true, [&](int i) { return tensors.x_ring(base + i); });
  stage_rows<D_STATE, D_STATE>(shared.B + num_ring * D_STATE, num_window, tensors.is_B_aligned(),
                               [&](int i) { return tensors.B(token + i); });
  stage_rows<D_STATE, D_STATE>(shared.C + num_ring * D_STATE, num_window, tensors.is_C_aligned(),
                               [&](int i) { return tensors.C(token + i); });
  stage_rows<HEAD_DIM, HEAD_DIM>(shared.x + num_ring * HEAD_DIM, num_window, tensors.is_x_aligned(),
                                 [&](int i) { return tensors.x(token + i); });
}

// This thread's token's dt as it stands in memory (thread i has token i of the chunk): raw, or from the ring.
__device__ inline float load_dt(const Tensors& tensors, Chunk chunk) {
  const int i = chunk.first + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) >= chunk.count) return 0.0f;
  return i < tensors.row.pending ? *tensors.dt_ring(tensors.row.checkpoint + i)
                                 : tensors.raw_dt(i - tensors.row.pending);
}

__device__ inline void store_dt(const Tensors& tensors, Chunk chunk, float dt, const ChunkShared& shared) {
  const int i = threadIdx.x, head = tensors.row.head;
  if (i >= chunk.count) return;
  if (chunk.first + i >= tensors.row.pending) dt = softplus(dt + tensors.params.dt_bias[head]);
  shared.dt[i] = dt;
  shared.decay[i] = expf(tensors.params.A[head] * dt);
}

// S = exp(A dt) S + dt x B^T, and y = S C + D x for window tokens.
__device__ inline void scan_chunk(const Tensors& tensors, Chunk chunk, const ChunkShared& shared,
                                  TilePosition position, float D, StateValues& state) {
  // One token at a time: unrolled, two tokens' operands and the state do not fit in the registers.
#pragma unroll 1
  for (int i = 0; i < chunk.count; ++i) {
    const ACTIVATION_TYPE* x = shared.x + i * HEAD_DIM;
    scale_state(state, shared.decay[i]);
    add_outer_product(state, position, shared.dt[i], x, shared.B + i * D_STATE);
    const int token = chunk.first + i - tensors.row.pending;
    if (token < 0) continue;
    float partial[PASSES] = {};
    multiply_state(state, position, shared.C + i * D_STATE, partial);
    if (position.lane == 0) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) partial[pass] += D * to_float(x[position.row(pass)]);
    }
    store_output(tensors.y(token), position, partial);
  }
}

}  // namespace replay
