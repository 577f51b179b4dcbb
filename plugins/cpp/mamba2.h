// What the plugins that run Mamba-2 have in common, beside what all recurrences have (recurrence.h). In their tables there
// are H heads of P channels, G groups of N columns, and rings of R rows.
#pragma once

#include <string>

#include "../kernels/mamba2/params.h"
#include "replay_plugin.h"

namespace replayssm {

// What is wrong with the number of groups, which the tensor `name` tells; or an empty string.
std::string mamba2_groups_fault(const char* name, const Dimensions& dimensions);

// The constants of the kernels, by the types of activations, state and dt; empty while a size is not known.
std::string mamba2_constants(const Dimensions& dimensions, const IntFields& fields, nvinfer1::DataType activation,
                             nvinfer1::DataType state, nvinfer1::DataType dt);

// The role of the kernel for a window at these addresses.
const char* mamba2_role(const Mamba2Params& params, const IntFields& fields);

// From the tensors of ReplayMamba2, in its order.
Mamba2Params mamba2_params(const Buffers& buffers, const Dimensions& dimensions);

}  // namespace replayssm
