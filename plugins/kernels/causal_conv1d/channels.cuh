// A thread's neighbouring channels: loads, and the convolution of some tokens.
#pragma once
#include "causal_conv1d/params.h"
#include "common/copy.cuh"
#include "common/silu.cuh"

namespace replay {

template <int BYTES>
struct Unsigned {
  using Type = uint32_t;
};
template <>
struct Unsigned<2> {
  using Type = uint16_t;
};

// Neighbouring channels as they stand in memory; one access where the address allows it. Held in whole words: 16-bit
// elements by themselves would take a register each.
struct alignas(CHANNELS_PER_THREAD * sizeof(ACTIVATION_TYPE)) Channels {
  static constexpr int PER_WORD = sizeof(ACTIVATION_TYPE) == 2 && CHANNELS_PER_THREAD > 1 ? 2 : 1;
  static constexpr int BITS = 8 * sizeof(ACTIVATION_TYPE);
  using Word = Unsigned<PER_WORD * sizeof(ACTIVATION_TYPE)>::Type;
  using Element = Unsigned<sizeof(ACTIVATION_TYPE)>::Type;
  static constexpr int WORDS = CHANNELS_PER_THREAD / PER_WORD;
  Word words[WORDS];

  __device__ ACTIVATION_TYPE get(int i) const {
    const Element bits = static_cast<Element>(words[i / PER_WORD] >> i % PER_WORD * BITS);
    ACTIVATION_TYPE element;
    memcpy(&element, &bits, sizeof(element));
    return element;
  }

  __device__ void make_opaque() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) ptx::make_opaque(words[i]);
  }

  // Of a word whose later elements are zero.
  __device__ void add(int i, ACTIVATION_TYPE element) {
    Element bits;
    memcpy(&bits, &element, sizeof(bits));
    words[i / PER_WORD] |= static_cast<Word>(bits) << i % PER_WORD * BITS;
  }
};
static_assert(sizeof(Channels) == CHANNELS_PER_THREAD * sizeof(ACTIVATION_TYPE), "as in memory");

template <int COUNT>
struct Tokens {
  Channels of[COUNT];
};

template <bool IS_ALIGNED>
__device__ inline Channels load_channels(const ACTIVATION_TYPE* source) {
  if (IS_ALIGNED) return ptx::load(reinterpret_cast<const Channels*>(source));
  Channels channels = {};
#pragma unroll
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) channels.add(i, source[i]);
  return channels;
}

// Weights and bias of a thread's channels, as they stand in memory: loading them waits for nothing.
struct Taps {
  Channels weights[D_CONV];
  Channels bias;

  __device__ float weight(int channel, int k) const {
    const int index = channel * D_CONV + k;
    return to_float(weights[index / CHANNELS_PER_THREAD].get(index % CHANNELS_PER_THREAD));
  }
};

__device__ inline const ACTIVATION_TYPE* weight_of(const CausalConv1dParams& params, int channel) {
  return static_cast<const ACTIVATION_TYPE*>(params.weight) + channel * D_CONV;
}

__device__ inline const ACTIVATION_TYPE* bias_of(const CausalConv1dParams& params, int channel) {
  return static_cast<const ACTIVATION_TYPE*>(params.bias) + channel;
}

template <bool IS_ALIGNED>
__device__ inline Taps load_taps(const CausalConv1dParams& params, int channel) {
  Taps taps;
#pragma unroll
  for (int k = 0; k < D_CONV; ++k) {
    taps.weights[k] = load_channels<IS_ALIGNED>(weight_of(params, channel) + k * CHANNELS_PER_THREAD);
  }
  taps.bias = params.bias == nullptr ? Channels{} : load_channels<IS_ALIGNED>(bias_of(params, channel));
  return taps;
}

// Bring the taps of a thread's channels to L2, where stores to them would arrive too.
__device__ inline void prefetch_taps(const CausalConv1dParams& params, int channel) {
  ptx::prefetch_line(weight_of(params, channel));
  if (params.bias != nullptr) ptx::prefetch_line(bias_of(params, channel));
}

// y = activation(bias + sum over taps) of TOKENS tokens, in fp32, rounded once. `inputs` are the D_CONV - 1 tokens
// before them, oldest first, then they. One channel after the other, so that few numbers are unpacked at a time.
template <int TOKENS>
__device__ inline Tokens<TOKENS> convolve(Taps taps, const Tokens<D_CONV - 1 + TOKENS>& inputs, bool is_silu) {
  Tokens<TOKENS> y = {};
  // Unpacked taps would fill the registers of a loop over tokens.
#pragma unroll
  for (int k = 0; k < D_CONV; ++k) taps.weights[k].make_opaque();
  taps.bias.make_opaque();
#pragma unroll
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
    const float bias = to_float(taps.bias.get(i));
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
      float sum = bias;
#pragma unroll
      for (int k = 0; k < D_CONV; ++k) sum += taps.weight(i, k) * to_float(inputs.of[token + k].get(i));
      y.of[token].add(i, from_float<ACTIVATION_TYPE>(is_silu ? silu(sum) : sum));
    }
  }
  return y;
}

// The last D_CONV - 1 inputs become the first.
template <int TOKENS>
__device__ inline void shift(Tokens<D_CONV - 1 + TOKENS>& inputs) {
#pragma unroll
  for (int k = 0; k < D_CONV - 1; ++k) inputs.of[k] = inputs.of[TOKENS + k];
}

}  // namespace replay
