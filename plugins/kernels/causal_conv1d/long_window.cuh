// The convolution of one row's long window, its tokens shared out among TOKEN_SPLITS thread blocks.
//
// The ring is read and written by the first split's threads alone, each its own channels, reads before writes: so no
// block overwrites history that another one still reads, whatever the length of the window.
#pragma once
#include "causal_conv1d/row.cuh"

namespace replay {

// Tokens whose loads are under way together.
constexpr int TOKENS_PER_BATCH = 4;
// The fewest of a block.
constexpr int MIN_TOKENS_PER_SPLIT = 8;
static_assert(D_CONV - 1 <= MIN_TOKENS_PER_SPLIT, "the first split alone needs the ring");

using Batch = Tokens<D_CONV - 1 + TOKENS_PER_BATCH>;

// Load window tokens from `first` on; those from `last` on become zero.
template <bool IS_ALIGNED>
__device__ inline void load_batch(const CausalConv1dParams& params, int row, int first, int last, int channel,
                                  Batch& batch) {
#pragma unroll
  for (int i = 0; i < TOKENS_PER_BATCH; ++i) {
    batch.of[D_CONV - 1 + i] = first + i < last ? load_x<IS_ALIGNED>(params, row, first + i, channel) : Channels{};
  }
}

// Convolve the tokens [first, last) of a row.
template <bool IS_ALIGNED>
__device__ inline void convolve_share(const CausalConv1dParams& params, const ConvRow& row, int first, int last,
                                      int channel) {
  Batch batch;
  load_batch<IS_ALIGNED>(params, row.index, first, last, channel, batch);
#pragma unroll
  for (int k = 0; k < D_CONV - 1; ++k) {
    batch.of[k] = first == 0 ? load_history(params, row, k, channel)
                             : load_x<IS_ALIGNED>(params, row.index, first - (D_CONV - 1) + k, channel);
  }
  const Taps taps = load_taps<IS_ALIGNED>(params, channel);
#pragma unroll 1
  for (int base = first; base < last; base += TOKENS_PER_BATCH) {
    Batch next = batch;
    shift<TOKENS_PER_BATCH>(next);
    load_batch<IS_ALIGNED>(params, row.index, base + TOKENS_PER_BATCH, last, channel, next);
    const Tokens<TOKENS_PER_BATCH> y = convolve<TOKENS_PER_BATCH>(taps, batch, params.activation == 1);
#pragma unroll
    for (int i = 0; i < TOKENS_PER_BATCH; ++i) {
      if (base + i < last) ptx::store(y_of(params, row.index, base + i, channel), y.of[i]);
    }
    batch = next;
  }
}

// Keep the window's last tokens, as many as the ring has rows.
template <bool IS_ALIGNED>
__device__ inline void append_window(const CausalConv1dParams& params, const ConvRow& row, int channel) {
#pragma unroll 1
  for (int first = max(0, row.num_tokens - params.ring_rows); first < row.num_tokens; first += TOKENS_PER_BATCH) {
    Batch batch;
    load_batch<IS_ALIGNED>(params, row.index, first, row.num_tokens, channel, batch);
#pragma unroll
    for (int i = 0; i < TOKENS_PER_BATCH; ++i) {
      if (first + i < row.num_tokens) {
        const int target = ring_row(row.past + first + i, params.ring_rows);
        ptx::store(ring_of(params, row.slot, target, channel), batch.of[D_CONV - 1 + i]);
      }
    }
  }
}

template <bool IS_ALIGNED>
__device__ inline void convolve_row(const CausalConv1dParams& params, int index, int split, int channel) {
  const ConvRow row = make_row(params, index, load_lengths(params, index));
  for (int token = row.num_tokens + split; token < params.seq_len; token += TOKEN_SPLITS) {
    ptx::store(y_of(params, index, token, channel), Channels{});
  }
  const int share = (row.num_tokens + TOKEN_SPLITS - 1) / TOKEN_SPLITS;
  const int count = max(MIN_TOKENS_PER_SPLIT, (share + TOKENS_PER_BATCH - 1) / TOKENS_PER_BATCH * TOKENS_PER_BATCH);
  const int first = split * count;
  if (first >= row.num_tokens) return;
  convolve_share<IS_ALIGNED>(params, row, first, min(first + count, row.num_tokens), channel);
  if (split == 0) append_window<IS_ALIGNED>(params, row, channel);  // after the reads of the ring
}

}  // namespace replay
