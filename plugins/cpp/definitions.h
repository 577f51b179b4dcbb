// The plugins of this library, in the order in which their creators are given out.
#pragma once

#include "replay_plugin.h"

namespace replayssm {

const PluginDefinition& causal_conv1d_definition();
const PluginDefinition& mamba2_definition();
const PluginDefinition& gated_delta_net_definition();
const PluginDefinition& mamba2_with_conv_definition();

}  // namespace replayssm
