// One row of the step as a thread sees it: its lengths, and its channels of the row's tensors.
#pragma once
#include "causal_conv1d/channels.cuh"
#include "common/protocol.h"

namespace replay {

struct ConvRow {
  int index;  // row of the step
  int slot;   // -1: padding
  int past;
  int num_tokens;
  int first_ring_row;  // of the window's first token
};

// Bring the lengths to L2, where stores to them would arrive too.
__device__ inline void prefetch_lengths(const CausalConv1dParams& params, int index) {
  ptx::prefetch_line(params.slot_ids + index);
  ptx::prefetch_line(params.past_lengths + index);
  ptx::prefetch_line(params.num_tokens + index);
}

// A row's lengths as they stand in memory: loading them waits for nothing.
struct Lengths {
  int slot, past, num_tokens;
};

__device__ inline Lengths load_lengths(const CausalConv1dParams& params, int index) {
  return {ptx::load(params.slot_ids + index), ptx::load(params.past_lengths + index),
          ptx::load(params.num_tokens + index)};
}

__device__ inline ConvRow make_row(const CausalConv1dParams& params, int index, const Lengths& lengths) {
  ConvRow row;
  row.index = index;
  row.slot = lengths.slot;
  row.past = lengths.past;
  row.num_tokens = lengths.slot < 0 ? 0 : max(0, min(lengths.num_tokens, params.seq_len));
  row.first_ring_row = ring_row(max(0, lengths.past), params.ring_rows);
  return row;
}

__device__ inline Channels* ring_of(const CausalConv1dParams& params, int slot, int ring_row, int channel) {
  const int64_t offset = static_cast<int64_t>(ring_row) * CONV_DIM + channel;
  return reinterpret_cast<Channels*>(static_cast<ACTIVATION_TYPE*>(params.conv_ring) +
                                     slot * params.conv_ring_stride_slot + offset);
}

// Of the D_CONV - 1 inputs before the window the k-th, oldest first; zero before position 0. The ring has them all.
__device__ inline Channels load_history(const CausalConv1dParams& params, const ConvRow& row, int k, int channel) {
  if (row.num_tokens == 0 || row.past - (D_CONV - 1) + k < 0) return Channels{};
  const int ring_row = row.first_ring_row - (D_CONV - 1) + k;
  return ptx::load(ring_of(params, row.slot, ring_row < 0 ? ring_row + params.ring_rows : ring_row, channel));
}

// A window token's input; its address depends on no length.
template <bool IS_ALIGNED>
__device__ inline Channels load_x(const CausalConv1dParams& params, int row, int token, int channel) {
  return load_channels<IS_ALIGNED>(static_cast<const ACTIVATION_TYPE*>(params.x) + row * params.x_stride_batch +
                                   token * params.x_stride_token + channel);
}

__device__ inline Channels* y_of(const CausalConv1dParams& params, int row, int token, int channel) {
  const int64_t line = static_cast<int64_t>(row) * params.seq_len + token;
  return reinterpret_cast<Channels*>(static_cast<ACTIVATION_TYPE*>(params.y) + line * CONV_DIM + channel);
}

// May x, weight and bias be read by whole Channels? The ring and y always are.
__device__ inline bool are_aligned(const CausalConv1dParams& params) {
  constexpr int BYTES = sizeof(Channels);
  const int64_t strides = (params.x_stride_batch | params.x_stride_token) * static_cast<int>(sizeof(ACTIVATION_TYPE));
  return is_aligned<BYTES>(params.x, strides) && is_aligned<BYTES>(params.weight, 0) &&
         is_aligned<BYTES>(params.bias, 0);
}

}  // namespace replay
