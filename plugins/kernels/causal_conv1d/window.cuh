// The convolution of one row of the step, its tokens shared out among TOKEN_SPLITS thread blocks.
//
// Grid x: TOKEN_SPLITS blocks for every BLOCK_THREADS * CHANNELS_PER_THREAD channels. A thread owns its channels. The
// ring is read and written by the first split's threads alone, each its own channels, reads before writes: so no block
// overwrites history that another one still reads, whatever the length of the window.
#pragma once
#include "causal_conv1d/channels.cuh"
#include "common/dependent_launch.cuh"

namespace replay {

constexpr int TOKENS_PER_TILE = 32;
// Tokens whose loads are under way together.
constexpr int TOKENS_PER_BATCH = 4;
static_assert(TOKENS_PER_TILE % TOKENS_PER_BATCH == 0, "a tile is whole batches");

struct ConvRow {
  const CausalConv1dParams& params;
  int index;  // row of the step
  int slot;
  int past;
  int num_tokens;
  int channel;  // this thread's first
  bool is_x_aligned;

  __device__ ConvRow(const CausalConv1dParams& params, int channel)
      : params(params),
        index(blockIdx.y),
        slot(params.slot_ids[index]),
        past(params.past_lengths[index]),
        num_tokens(max(0, min(params.num_tokens[index], params.seq_len))),
        channel(channel),
        is_x_aligned(is_aligned<sizeof(Channels)>(
            params.x, (params.x_stride_batch | params.x_stride_token) * static_cast<int>(sizeof(ACTIVATION_TYPE)))) {
    if (slot < 0) num_tokens = 0;
  }

  __device__ Channels x(int token) const {
    return load_channels(static_cast<const ACTIVATION_TYPE*>(params.x) + index * params.x_stride_batch +
                             token * params.x_stride_token + channel,
                         is_x_aligned);
  }
  __device__ Channels* ring(int position) const {
    const int64_t offset = static_cast<int64_t>(ring_row(position, params.ring_rows)) * CONV_DIM + channel;
    return reinterpret_cast<Channels*>(static_cast<ACTIVATION_TYPE*>(params.conv_ring) +
                                       slot * params.conv_ring_stride_slot + offset);
  }
  __device__ Channels* y(int token) const {
    const int64_t line = static_cast<int64_t>(index) * params.seq_len + token;
    return reinterpret_cast<Channels*>(static_cast<ACTIVATION_TYPE*>(params.y) + line * CONV_DIM + channel);
  }
};

// The tokens before window token `first`: of the window, before it of the ring, and zero before position 0.
__device__ inline Previous load_previous(const ConvRow& row, int first) {
  Previous previous = {};
#pragma unroll
  for (int k = 0; k < D_CONV - 1; ++k) {
    const int token = first - (D_CONV - 1) + k;
    if (row.past + token < 0) continue;
    const Channels channels = token >= 0 ? row.x(token) : *row.ring(row.past + token);
#pragma unroll
    for (int i = 0; i < CHANNELS_PER_THREAD; ++i) previous.values[k][i] = to_float(channels.elements[i]);
  }
  return previous;
}

// Keep the window's last tokens, as many as the ring has rows.
__device__ inline void append_window(const ConvRow& row) {
#pragma unroll 1
  for (int token = max(0, row.num_tokens - row.params.ring_rows); token < row.num_tokens; ++token) {
    *row.ring(row.past + token) = row.x(token);
  }
}

__device__ inline void convolve_tile(const ConvRow& row, const Taps& taps, int first, Previous& previous) {
  const int last = min(first + TOKENS_PER_TILE, row.num_tokens);
  // One batch at a time: taps and previous tokens leave registers for no more.
#pragma unroll 1
  for (int base = first; base < last; base += TOKENS_PER_BATCH) {
    Channels batch[TOKENS_PER_BATCH];
#pragma unroll
    for (int i = 0; i < TOKENS_PER_BATCH; ++i) {
      if (base + i < last) batch[i] = row.x(base + i);
    }
#pragma unroll
    for (int i = 0; i < TOKENS_PER_BATCH; ++i) {
      if (base + i < last) *row.y(base + i) = convolve(taps, batch[i], row.params.activation == 1, previous);
    }
  }
}

__device__ inline void run_window(const CausalConv1dParams& params) {
  wait_for_previous();
  let_next_start();
  const int split = blockIdx.x % TOKEN_SPLITS;
  const int channel = (blockIdx.x / TOKEN_SPLITS * BLOCK_THREADS + threadIdx.x) * CHANNELS_PER_THREAD;
  if (channel >= CONV_DIM) return;
  const ConvRow row(params, channel);
  for (int token = row.num_tokens + split; token < params.seq_len; token += TOKEN_SPLITS) *row.y(token) = Channels{};
  if (split * TOKENS_PER_TILE >= row.num_tokens) return;

  Taps taps;
  load_taps(params, channel, taps);
  for (int first = split * TOKENS_PER_TILE; first < row.num_tokens; first += TOKEN_SPLITS * TOKENS_PER_TILE) {
    Previous previous = load_previous(row, first);
    convolve_tile(row, taps, first, previous);
    if (first == 0) append_window(row);  // only the first tile reads the ring, and it has
  }
}

}  // namespace replay
