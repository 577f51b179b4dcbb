// Typed, exhaustive reading of a plugin's fields: a missing, extra, repeated or wrongly typed one is an error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "NvInferRuntime.h"
#include "kernel_image.h"

namespace replayssm {

constexpr char kKernelsField[] = "kernels";

// The values of a plugin's int fields, in the order of its definition.
using IntFields = std::vector<int32_t>;

struct Fields {
  IntFields ints;
  std::shared_ptr<const KernelImage> kernels;
};

// Read the int fields of these names and the kernel image. False with `error` set when anything is off.
bool read_fields(const nvinfer1::PluginFieldCollection& collection, const std::vector<const char*>& int_names,
                 Fields& fields, std::string& error);

// What a creator declares to parsers: names and types, no data.
std::vector<nvinfer1::PluginField> declared_fields(const std::vector<const char*>& int_names);

// What a plugin serialises. The result points into `fields` and lives no longer.
std::vector<nvinfer1::PluginField> serialized_fields(const std::vector<const char*>& int_names, const Fields& fields);

}  // namespace replayssm
