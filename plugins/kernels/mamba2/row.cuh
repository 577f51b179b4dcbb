// What a thread block works on: one head of one row of the step, its lengths, and the addresses of its tensors.
#pragma once
#include "common/copy.cuh"
#include "common/step_row.cuh"
#include "mamba2/params.h"

namespace replay {

constexpr int WINDOW = 1 + MAX_DRAFT_LEN;
constexpr int HEADS_PER_GROUP = N_HEADS / N_GROUPS;

struct Row : StepRow {
  int head;

  __device__ Row(const Mamba2Params& params, int max_pending, int head)
      : StepRow(params, blockIdx.y, max_pending), head(head) {}

  __device__ int group() const { return head / HEADS_PER_GROUP; }
};

// Base addresses of one (row, head); the functions take a window token or an absolute position.
struct Tensors {
  const Mamba2Params& params;
  const Row& row;

  __device__ const ACTIVATION_TYPE* x(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.x) + row.index * params.x_stride_batch +
           token * params.x_stride_token + row.head * params.x_stride_head;
  }
  __device__ const ACTIVATION_TYPE* B(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.B) + row.index * params.B_stride_batch +
           token * params.B_stride_token + row.group() * params.B_stride_group;
  }
  __device__ const ACTIVATION_TYPE* C(int token) const {
    return static_cast<const ACTIVATION_TYPE*>(params.C) + row.index * params.C_stride_batch +
           token * params.C_stride_token + row.group() * params.C_stride_group;
  }
  __device__ const DT_TYPE* raw_dt_address(int token) const {
    return static_cast<const DT_TYPE*>(params.dt) + row.index * params.dt_stride_batch +
           token * params.dt_stride_token + row.head;
  }
  __device__ float raw_dt(int token) const { return to_float(*raw_dt_address(token)); }
  __device__ ACTIVATION_TYPE* y(int token) const {
    const int64_t line = (static_cast<int64_t>(row.index) * params.seq_len + token) * N_HEADS + row.head;
    return static_cast<ACTIVATION_TYPE*>(params.y) + line * HEAD_DIM;
  }
  __device__ STATE_TYPE* state() const {
    return static_cast<STATE_TYPE*>(params.ssm_state) + row.slot * params.ssm_state_stride_slot +
           static_cast<int64_t>(row.head) * HEAD_DIM * D_STATE;
  }
  __device__ ACTIVATION_TYPE* x_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_HEADS + row.head;
    return static_cast<ACTIVATION_TYPE*>(params.x_ring) + row.slot * params.x_ring_stride_slot + line * HEAD_DIM;
  }
  __device__ ACTIVATION_TYPE* B_ring(int position) const {
    const int64_t line = static_cast<int64_t>(ring_row(position, params.ring_rows)) * N_GROUPS + row.group();
    return static_cast<ACTIVATION_TYPE*>(params.B_ring) + row.slot * params.B_ring_stride_slot + line * D_STATE;
  }
  __device__ float* dt_ring(int position) const {
    const int64_t line = ring_row(position, params.ring_rows);
    return params.dt_ring + row.slot * params.dt_ring_stride_slot + line * N_HEADS + row.head;
  }

  __device__ bool is_x_aligned() const {
    constexpr int SIZE = sizeof(ACTIVATION_TYPE);
    return is_aligned<16>(params.x, (params.x_stride_batch | params.x_stride_token | params.x_stride_head) * SIZE);
  }
  __device__ bool is_B_aligned() const {
    constexpr int SIZE = sizeof(ACTIVATION_TYPE);
    return is_aligned<16>(params.B, (params.B_stride_batch | params.B_stride_token | params.B_stride_group) * SIZE);
  }
  __device__ bool is_C_aligned() const {
    constexpr int SIZE = sizeof(ACTIVATION_TYPE);
    return is_aligned<16>(params.C, (params.C_stride_batch | params.C_stride_token | params.C_stride_group) * SIZE);
  }
};

// Outputs beyond the row's tokens, and all outputs of a padding row, are zero: CHANNELS of them from first_channel on.
template <int CHANNELS = HEAD_DIM>
__device__ inline void zero_unused_outputs(const Tensors& tensors, int first_channel = 0) {
  const int first = tensors.row.num_tokens, count = tensors.params.seq_len - first;
  for (int i = threadIdx.x; i < count * CHANNELS; i += BLOCK_THREADS) {
    tensors.y(first + i / CHANNELS)[first_channel + i % CHANNELS] = from_float<ACTIVATION_TYPE>(0.0f);
  }
}

}  // namespace replay
