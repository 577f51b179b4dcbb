// What a thread block works on: a slice of one value head of one row of the step, and the addresses of its tensors.
#pragma once
#include "common/copy.cuh"
#include "common/softplus.cuh"
#include "common/step_row.cuh"
#include "gated_delta_net/params.h"

namespace replay {

constexpr int WINDOW = 1 + MAX_DRAFT_LEN;
constexpr int HEADS_PER_KEY = N_VALUE_HEADS / N_KEY_HEADS;
constexpr int SLICE = SLICE_DIM;  // columns of a head's state that a thread block has
constexpr int NUM_SLICES = VALUE_DIM / SLICE;
static_assert(NUM_SLICES * SLICE == VALUE_DIM, "the blocks of a head cover its columns exactly");
// Added to the sum of squares of a key or a query, as the models' prefill does it.
constexpr float NORM_EPS = 1e-6f;

__device__ inline float query_scale() { return 1.0f / sqrtf(static_cast<float>(KEY_DIM)); }

struct Row : StepRow {
  int head;
  int slice;

  __device__ Row(const GatedDeltaNetParams& params, int max_pending)
      : StepRow(params, blockIdx.y, max_pending),
        head(static_cast<int>(blockIdx.x) / NUM_SLICES),
        slice(static_cast<int>(blockIdx.x) % NUM_SLICES) {}

  __device__ int key_head() const { return head / HEADS_PER_KEY; }
};

// Base addresses of one (row, head, slice); the functions take a window token or an absolute position.
struct Tensors {
  const GatedDeltaNetParams& params;
  const Row& row;

  __device__ const ACTIVATION_TYPE* q(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.q) + row.index * params.q_stride_batch +
           token * params.q_stride_token + row.key_head() * params.q_stride_head;
  }
  __device__ const ACTIVATION_TYPE* k(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.k) + row.index * params.k_stride_batch +
           token * params.k_stride_token + row.key_head() * params.k_stride_head;
  }
  __device__ const ACTIVATION_TYPE* v(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.v) + row.index * params.v_stride_batch +
           token * params.v_stride_token + row.head * params.v_stride_head + row.slice * SLICE;
  }
  __device__ const GATE_TYPE* a(int token) const {
    return static_cast<const GATE_TYPE*>(params.a) + row.index * params.a_stride_batch + token * params.a_stride_token +
           row.head;
  }
  __device__ const GATE_TYPE* b(int token) const {
    return static_cast<const GATE_TYPE*>(params.b) + row.index * params.b_stride_batch + token * params.b_stride_token +
           row.head;
  }
  // Of a window token.
  __device__ float g(int token) const;
  __device__ float beta(int token) const;
  __device__ ACTIVATION_TYPE* o(int token) const {
    const int64_t line = (static_cast<int64_t>(row.index) * params.seq_len + token) * N_VALUE_HEADS + row.head;
    return static_cast<ACTIVATION_TYPE*>(params.o) + line * VALUE_DIM + row.slice * SLICE;
  }
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + row.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(row.head) * KEY_DIM * VALUE_DIM + row.slice * SLICE;
  }
  __device__ ACTIVATION_TYPE* k_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_KEY_HEADS + row.key_head();
    return static_cast<ACTIVATION_TYPE*>(params.k_ring) + row.slot * params.k_ring_stride_slot + line * KEY_DIM;
  }
  __device__ float* u_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_VALUE_HEADS + row.head;
    return params.u_ring + row.slot * params.u_ring_stride_slot + line * VALUE_DIM + row.slice * SLICE;
  }
  __device__ float* g_ring(int position) const {
    const int64_t line = ring_row(position, params.ring_rows);
    return params.g_ring + row.slot * params.g_ring_stride_slot + line * N_VALUE_HEADS + row.head;
  }

  // Do all rows of q, k or v start at multiples of 16 bytes?
  __device__ bool is_q_aligned() const {
    return are_rows_aligned(params.q, params.q_stride_batch | params.q_stride_token | params.q_stride_head);
  }
  __device__ bool is_k_aligned() const {
    return are_rows_aligned(params.k, params.k_stride_batch | params.k_stride_token | params.k_stride_head);
  }
  __device__ bool is_v_aligned() const {
    return are_rows_aligned(params.v, params.v_stride_batch | params.v_stride_token | params.v_stride_head);
  }
  __device__ static bool are_rows_aligned(const void* first, int64_t strides) {
    return is_aligned<16>(first, strides * static_cast<int>(sizeof(ACTIVATION_TYPE)));
  }
};

// What the head makes of raw gates.
struct GateWeights {
  float rate, bias;

  __device__ explicit GateWeights(const Tensors& tensors)
      : rate(-expf(tensors.params.A_log[tensors.row.head])), bias(tensors.params.dt_bias[tensors.row.head]) {}

  // The log decay, <= 0.
  __device__ float g(GATE_TYPE a) const { return rate * softplus(to_float(a) + bias); }
  __device__ static float beta(GATE_TYPE b) { return 1.0f / (1.0f + expf(-to_float(b))); }
};

__device__ inline float Tensors::g(int token) const { return GateWeights(*this).g(*a(token)); }
__device__ inline float Tensors::beta(int token) const { return GateWeights::beta(*b(token)); }

// Outputs beyond the row's tokens, and all outputs of a padding row, are zero.
__device__ inline void zero_unused_outputs(const Tensors& tensors) {
  const int first = tensors.row.num_tokens, count = tensors.params.seq_len - first;
  for (int i = threadIdx.x; i < count * SLICE; i += BLOCK_THREADS) {
    tensors.o(first + i / SLICE)[i % SLICE] = from_float<ACTIVATION_TYPE>(0.0f);
  }
}

}  // namespace replay
