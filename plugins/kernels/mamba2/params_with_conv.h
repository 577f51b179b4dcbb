// The only argument of the Mamba-2 step that begins with the causal convolution. Symbols: contract/plugin_io.py.
// Packed from Python by plugins/params.py; the size and offsets are compared by a test.
#pragma once
#include "params.h"

struct Mamba2WithConvParams {
  Mamba2Params step;        // its x, B and C are raw: before convolution and SiLU; channels of one projection, in this order
  const void* conv_weight;  // [D, K] activation type, contiguous; D = H P + 2 G N channels; tap K-1 is the newest token
  const void* conv_bias;    // [D] activation type, or null for none
  void* conv_ring;          // [slots, R_conv, D] activation type, in-out, raw; one slot contiguous
  int64_t conv_ring_stride_slot;  // in elements
  int32_t conv_ring_rows;         // R_conv
};
