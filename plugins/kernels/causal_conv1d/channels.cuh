// A thread's neighbouring channels: loads, stores, and the convolution of one token.
#pragma once
#include "causal_conv1d/params.h"
#include "common/copy.cuh"
#include "common/protocol.h"

namespace replay {

// Neighbouring channels as they stand in memory; one access where the address allows it.
struct alignas(CHANNELS_PER_THREAD * sizeof(ACTIVATION_TYPE)) Channels {
  ACTIVATION_TYPE elements[CHANNELS_PER_THREAD];
};

__device__ inline Channels load_channels(const ACTIVATION_TYPE* source, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<const Channels*>(source);
  Channels channels;
#pragma unroll
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) channels.elements[i] = source[i];
  return channels;
}

struct Taps {
  float weights[CHANNELS_PER_THREAD * D_CONV];
  float bias[CHANNELS_PER_THREAD];
};

__device__ inline void load_taps(const CausalConv1dParams& params, int channel, Taps& taps) {
  const ACTIVATION_TYPE* weight = static_cast<const ACTIVATION_TYPE*>(params.weight) + channel * D_CONV;
  const ACTIVATION_TYPE* bias = static_cast<const ACTIVATION_TYPE*>(params.bias);
  const bool is_weight_aligned = is_aligned<sizeof(Channels)>(weight, 0);
  const bool is_bias_aligned = is_aligned<sizeof(Channels)>(bias, 0);
#pragma unroll
  for (int k = 0; k < D_CONV; ++k) {
    const Channels part = load_channels(weight + k * CHANNELS_PER_THREAD, is_weight_aligned);
#pragma unroll
    for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
      taps.weights[k * CHANNELS_PER_THREAD + i] = to_float(part.elements[i]);
    }
  }
  const Channels part = bias == nullptr ? Channels{} : load_channels(bias + channel, is_bias_aligned);
#pragma unroll
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) taps.bias[i] = to_float(part.elements[i]);
}

// The D_CONV - 1 tokens before the next one, oldest first.
struct Previous {
  float values[D_CONV - 1][CHANNELS_PER_THREAD];

  __device__ void push(const float (&x)[CHANNELS_PER_THREAD]) {
#pragma unroll
    for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
#pragma unroll
      for (int k = 0; k + 1 < D_CONV - 1; ++k) values[k][i] = values[k + 1][i];
      values[D_CONV - 2][i] = x[i];
    }
  }
};

// y = activation(bias + sum over taps), in fp32, rounded once; then x becomes the newest of `previous`.
__device__ inline Channels convolve(const Taps& taps, const Channels& token, bool is_silu, Previous& previous) {
  Channels y;
  float x[CHANNELS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < CHANNELS_PER_THREAD; ++i) {
    x[i] = to_float(token.elements[i]);
    float sum = taps.bias[i];
#pragma unroll
    for (int k = 0; k < D_CONV - 1; ++k) sum += taps.weights[i * D_CONV + k] * previous.values[k][i];
    sum += taps.weights[i * D_CONV + D_CONV - 1] * x[i];
    y.elements[i] = from_float<ACTIVATION_TYPE>(is_silu ? sum / (1.0f + expf(-sum)) : sum);
  }
  previous.push(x);
  return y;
}

}  // namespace replay
