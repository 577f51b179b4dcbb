// What the plugins that convolve have in common. In their tables the channels are D, the taps K, the ring's rows r.
#pragma once

#include <string>

#include "../kernels/causal_conv1d/params.h"
#include "replay_plugin.h"

namespace replayssm {

enum Activation : int32_t { kNoActivation, kSilu };  // of CausalConv1dParams

// What is wrong with the taps, of the input `weight`, or with the ring's rows for windows of so many tokens; or an empty
// string.
std::string conv_ring_fault(const char* weight, const Dimensions& dimensions, int64_t window);

// The role of the kernel that is fastest for a window.
const char* causal_conv1d_role(int64_t window_tokens);

// From the tensors of ReplayCausalConv1d, in its order.
CausalConv1dParams causal_conv1d_params(const Buffers& buffers, const Dimensions& dimensions, int32_t activation);

}  // namespace replayssm
