// The only argument of the causal convolution kernels. Shapes and symbols: contract/plugin_io.py.
// Packed from Python by plugins/params.py and from C++ by plugins/cpp; the size and offsets are compared by a test.
#pragma once
#include <cstdint>

// The step kernel is launched up to this many tokens, as verification has them at most (max_draft_len 7), and for one
// alone the one-token step; the prefill kernel, which shares a window out, beyond. Step and prefill can run any window.
constexpr int64_t LONGEST_STEP_WINDOW = 8;

struct CausalConv1dParams {
  const void* x;             // [B, S, D] activation type, channels contiguous
  const void* weight;        // [D, K] activation type, contiguous; tap K-1 is the newest token
  const void* bias;          // [D] activation type, or null for none
  void* conv_ring;           // [slots, R_conv, D] activation type, in-out; one slot contiguous
  const int32_t* past_lengths;  // [B]
  const int32_t* num_tokens;    // [B]
  const int32_t* slot_ids;      // [B], -1: padding row
  void* y;                   // [B, S, D] activation type, out, contiguous
  // Strides in elements.
  int64_t x_stride_batch, x_stride_token;
  int64_t conv_ring_stride_slot;
  int32_t seq_len;           // S
  int32_t ring_rows;         // R_conv
  int32_t activation;        // 0 none, 1 silu
  int32_t num_rows;          // B; a block of the step kernel has several, the last one maybe fewer
};
