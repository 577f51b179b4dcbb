// The only argument of the Mamba-2 kernels. Shapes and symbols: contract/plugin_io.py.
// Packed from Python by plugins/params.py and from C++ by plugins/cpp; the size and offsets are compared by a test.
#pragma once
#include <cstdint>

struct Mamba2Params {
  const void* x;             // [B, S, H, P] activation type, head_dim contiguous
  const void* dt;            // [B, S, H] activation type or fp32, raw (before bias and softplus), heads contiguous
  const void* B;             // [B, S, G, N] activation type, d_state contiguous
  const void* C;             // [B, S, G, N] activation type, d_state contiguous
  const float* A;            // [H], negative
  const float* D;            // [H]
  const float* dt_bias;      // [H]
  void* ssm_state;           // [slots, H, P, N] state type, in-out; one slot contiguous
  void* x_ring;              // [slots, R, H, P] activation type, in-out; one slot contiguous
  void* B_ring;              // [slots, R, G, N] activation type, in-out; one slot contiguous
  float* dt_ring;            // [slots, R, H], in-out, after softplus; one slot contiguous
  const int32_t* past_lengths;        // [B]
  const int32_t* checkpoint_lengths;  // [B]
  const int32_t* num_tokens;          // [B]
  const int32_t* slot_ids;            // [B], -1: padding row
  void* y;                   // [B, S, H, P] activation type, out, contiguous
  uint32_t* num_taken;       // for persistent kernels, whose blocks share work out: 0 before and after each launch
  // Strides in elements.
  int64_t x_stride_batch, x_stride_token, x_stride_head;
  int64_t dt_stride_batch, dt_stride_token;
  int64_t B_stride_batch, B_stride_token, B_stride_group;
  int64_t C_stride_batch, C_stride_token, C_stride_group;
  int64_t ssm_state_stride_slot, x_ring_stride_slot, B_ring_stride_slot, dt_ring_stride_slot;
  int32_t seq_len;           // S
  int32_t ring_rows;         // R
  int32_t num_rows;          // B; for persistent kernels, whose grid does not tell
  int32_t num_slots;         // for prefetches, which may come before the slot ids are written
};
