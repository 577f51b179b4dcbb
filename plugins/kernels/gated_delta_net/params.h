// The only argument of the Gated DeltaNet kernels. Shapes and symbols: contract/plugin_io.py.
// Packed from Python by plugins/params.py and from C++ by plugins/cpp; the size and offsets are compared by a test.
#pragma once
#include <cstdint>

struct GatedDeltaNetParams {
  const void* q;             // [B, S, Hk, K] activation type, raw, key_dim contiguous
  const void* k;             // [B, S, Hk, K] activation type, raw, key_dim contiguous
  const void* v;             // [B, S, Hv, V] activation type, value_dim contiguous
  const void* a;             // [B, S, Hv] activation type or fp32, raw (before bias and softplus), heads contiguous
  const void* b;             // [B, S, Hv] a's type, raw (before the sigmoid), heads contiguous
  const float* A_log;        // [Hv]
  const float* dt_bias;      // [Hv]
  void* ssm_state;           // [slots, Hv, K, V] state type, in-out; one slot contiguous
  void* k_ring;              // [slots, R, Hk, K] activation type, in-out, k as it came; one slot contiguous
  float* u_ring;             // [slots, R, Hv, V], in-out; one slot contiguous
  float* g_ring;             // [slots, R, Hv], in-out; one slot contiguous
  const int32_t* past_lengths;        // [B]
  const int32_t* checkpoint_lengths;  // [B]
  const int32_t* num_tokens;          // [B]
  const int32_t* slot_ids;            // [B], -1: padding row
  void* o;                   // [B, S, Hv, V] activation type, out, contiguous
  uint32_t* num_taken;       // for persistent kernels, whose blocks share work out: 0 before and after each launch
  // Strides in elements.
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t k_stride_batch, k_stride_token, k_stride_head;
  int64_t v_stride_batch, v_stride_token, v_stride_head;
  int64_t a_stride_batch, a_stride_token;
  int64_t b_stride_batch, b_stride_token;
  int64_t ssm_state_stride_slot, k_ring_stride_slot, u_ring_stride_slot, g_ring_stride_slot;
  int32_t seq_len;           // S
  int32_t ring_rows;         // R
  int32_t num_rows;          // B; for persistent kernels, whose grid does not tell
  int32_t num_slots;         // for prefetches, which may come before the slot ids are written
};
