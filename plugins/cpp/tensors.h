// The tensor table of a plugin, and the one check that holds TensorRT's descriptions against it.
// The same tables in Python: trtllm_replayssm/contract/plugin_io.py (a test compares them).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "NvInferRuntime.h"

namespace replayssm {

// As contract/geometry.py spells it.
const char* type_text(nvinfer1::DataType type);

enum class TypeRule {
  kActivation,  // float, half or bfloat16; one type for all tensors of this rule, that of input 0
  kState,       // float, half or bfloat16
  kFloat,       // float
  kInt32,
};

struct TensorRule {
  const char* name;
  const char* dims;  // one letter a dimension: equal letters are equal sizes; s, r, k, v are printed as slots, R_conv,
                     // Hk, Hv
  TypeRule type;
};

struct OutputRule {
  const char* name;
  int32_t source;   // index of the input whose type the output has, and whose shape, if `dims` does not say another one
  bool is_aliased;  // written in place: it shares the source's address
  const char* dims = nullptr;  // letters of the inputs
};

struct TensorTable {
  std::vector<TensorRule> inputs;
  std::vector<OutputRule> outputs;

  int32_t input_count() const { return static_cast<int32_t>(inputs.size()); }
  int32_t output_count() const { return static_cast<int32_t>(outputs.size()); }
  const char* output_dims(const OutputRule& output) const {
    return output.dims == nullptr ? inputs[output.source].dims : output.dims;
  }
};

// Sizes by the letters of the table; -1 where a size is not known yet (the build phase).
class Dimensions {
 public:
  Dimensions() {
    sizes_.fill(-1);
    owners_.fill(nullptr);
  }
  int64_t operator[](char letter) const { return sizes_[index(letter)]; }
  bool knows(const char* letters) const;  // all of them

  // Take the sizes of one tensor. False when its rank or a size contradicts what is known; `error` says how.
  bool bind(const char* name, const char* letters, const nvinfer1::Dims& dims, std::string& error);

 private:
  static std::size_t index(char letter) { return static_cast<std::size_t>(letter) & 127; }

  std::array<int64_t, 128> sizes_;
  std::array<const char*, 128> owners_;  // the tensor that a size was taken from
};

// Does the tensor at `position` (inputs, then outputs) have a type and a format that the table allows, given those
// before it?
bool allows_format(const TensorTable& table, int32_t position, const nvinfer1::DynamicPluginTensorDesc* in_out);

// Hold the types that a network gives the inputs against the table. False with `error` set when one does not fit.
bool check_input_types(const TensorTable& table, const nvinfer1::DataType* types, std::string& error);

// Hold counts, types, formats and sizes against the table. False with `error` set when one does not fit.
bool check_tensors(const TensorTable& table, const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                   const nvinfer1::PluginTensorDesc* outputs, int32_t output_count, Dimensions& dimensions,
                   std::string& error);

// Of one number of a type that a tensor of ours may have.
int64_t element_bytes(nvinfer1::DataType type);

std::size_t bytes_of(nvinfer1::DataType type, const nvinfer1::Dims& dims);

}  // namespace replayssm
