// The convolution of some rows' short windows by one thread per piece of channels.
//
// There is little to compute and much to wait for. So all that a thread reads is under way before it uses the first of
// it: inputs and taps at once, the ring as soon as the lengths are known.
#pragma once
#include "causal_conv1d/row.cuh"
#include "common/dependent_launch.cuh"

namespace replay {

// Load window tokens from `first` on; those beyond the window become zero.
template <bool IS_ALIGNED, int TOKENS>
__device__ inline void load_tokens(const CausalConv1dParams& params, int seq_len, int row, int first, int channel,
                                   Tokens<D_CONV - 1 + TOKENS>& inputs) {
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    inputs.of[D_CONV - 1 + i] =
        first + i < seq_len ? load_x<IS_ALIGNED>(params, row, first + i, channel) : Channels{};
  }
}

// Write the outputs and the ring rows of window tokens from `first` on; `ring_row` is that of `first`, then the next.
template <int TOKENS>
__device__ inline void convolve_tokens(const CausalConv1dParams& params, int seq_len, const ConvRow& row,
                                       const Taps& taps, int first, int channel,
                                       const Tokens<D_CONV - 1 + TOKENS>& inputs, int& ring_row) {
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int token = first + i;
    if (token < row.num_tokens) {
      // Of a window longer than the ring the last rows stay.
      if (token >= row.num_tokens - params.ring_rows) {
        ptx::store(ring_of(params, row.slot, ring_row, channel), inputs.of[D_CONV - 1 + i]);
      }
      ring_row = ring_row + 1 == params.ring_rows ? 0 : ring_row + 1;
    }
  }
  const Tokens<TOKENS> y = convolve<TOKENS>(taps, inputs, params.activation == 1);
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int token = first + i;
    if (token < seq_len) {
      ptx::store(y_of(params, row.index, token, channel), token < row.num_tokens ? y.of[i] : Channels{});
    }
  }
}

// Convolve ROWS rows from `first_row` on, TOKENS tokens of each at a time; the first of all rows are loaded together.
// `seq_len` is that of params: where it is a constant there is no loop.
template <bool IS_ALIGNED, int ROWS, int TOKENS>
__device__ inline void convolve_rows(const CausalConv1dParams& params, int seq_len, int first_row, int channel) {
  Lengths lengths[ROWS];
  ConvRow rows[ROWS];
  Tokens<D_CONV - 1 + TOKENS> inputs[ROWS];
  // Beyond the last row it is loaded again, and not used.
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    load_tokens<IS_ALIGNED, TOKENS>(params, seq_len, min(first_row + j, params.num_rows - 1), 0, channel, inputs[j]);
  }
  const Taps taps = load_taps<IS_ALIGNED>(params, channel);
  ptx::issue_loads();
#pragma unroll
  for (int j = 0; j < ROWS; ++j) lengths[j] = load_lengths(params, min(first_row + j, params.num_rows - 1));
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    rows[j] = make_row(params, min(first_row + j, params.num_rows - 1), lengths[j]);
#pragma unroll
    for (int k = 0; k < D_CONV - 1; ++k) inputs[j].of[k] = load_history(params, rows[j], k, channel);
  }
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    if (first_row + j >= params.num_rows) return;
    int ring_row = rows[j].first_ring_row;
#pragma unroll 1
    for (int first = 0; first < seq_len; first += TOKENS) {
      if (first > 0) {
        shift<TOKENS>(inputs[j]);
        load_tokens<IS_ALIGNED, TOKENS>(params, seq_len, rows[j].index, first, channel, inputs[j]);
      }
      convolve_tokens<TOKENS>(params, seq_len, rows[j], taps, first, channel, inputs[j], ring_row);
    }
  }
}

template <int ROWS, int TOKENS>
__device__ inline void run_step(const CausalConv1dParams& params, int seq_len) {
  const int channel = (blockIdx.x * BLOCK_THREADS + threadIdx.x) * CHANNELS_PER_THREAD;
  const int first_row = blockIdx.y * ROWS;
  if (threadIdx.x == 0) prefetch_lengths(params, first_row);
  if (blockIdx.y == 0 && channel < CONV_DIM) prefetch_taps(params, channel);
  wait_for_previous();
  let_next_start();
  if (channel >= CONV_DIM) return;
  if (are_aligned(params)) {
    convolve_rows<true, ROWS, TOKENS>(params, seq_len, first_row, channel);
  } else {
#pragma unroll 1
    for (int row = first_row; row < min(first_row + ROWS, params.num_rows); ++row) {
      convolve_rows<false, 1, 1>(params, seq_len, row, channel);
    }
  }
}

}  // namespace replay
