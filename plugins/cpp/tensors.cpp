#include "tensors.h"

#include <algorithm>
#include <cstring>

#include "log.h"

namespace replayssm {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

std::string letter_text(char letter) {
  switch (letter) {
    case 's': return "slots";
    case 'r': return "R_conv";
    case 'k': return "Hk";
    case 'v': return "Hv";
    default: return std::string(1, letter);
  }
}

std::string rule_text(const char* letters) {
  std::string text;
  for (const char* letter = letters; *letter != '\0'; ++letter) {
    text += (text.empty() ? "[" : ", ") + letter_text(*letter);
  }
  return text + "]";
}

std::string dims_text(const Dims& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    text += (i == 0 ? "" : ", ") + (dims.d[i] < 0 ? std::string("?") : std::to_string(dims.d[i]));
  }
  return text + "]";
}

bool is_float(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

// Input 0, whose type all activations have.
struct Activation {
  const char* name;
  DataType type;
};

bool allows_type(TypeRule rule, DataType type, DataType activation) {
  switch (rule) {
    case TypeRule::kActivation: return is_float(type) && type == activation;
    case TypeRule::kState: return is_float(type);
    case TypeRule::kFloat: return type == DataType::kFLOAT;
    case TypeRule::kInt32: return type == DataType::kINT32;
  }
  return false;
}

std::string type_rule_text(TypeRule rule, const Activation& activation) {
  switch (rule) {
    case TypeRule::kActivation:
      if (is_float(activation.type)) return concat(type_text(activation.type), ", as ", activation.name);
      return "float32, float16 or bfloat16";
    case TypeRule::kState: return "float32, float16 or bfloat16";
    case TypeRule::kFloat: return "float32";
    case TypeRule::kInt32: return "int32";
  }
  return "";
}

bool check_count(const char* what, int32_t found, int32_t needed, std::string& error) {
  if (found == needed) return true;
  error = concat(what, ": found ", found, "; needed ", needed);
  return false;
}

bool check_type(TypeRule rule, const char* name, DataType type, const Activation& activation, std::string& error) {
  if (allows_type(rule, type, activation.type)) return true;
  error = concat(name, ": found type ", type_text(type), "; needed ", type_rule_text(rule, activation));
  return false;
}

// One input, or an output with the rule that it has from the input that it is like.
bool check_tensor(const TensorRule& rule, const PluginTensorDesc& tensor, const Activation& activation,
                  Dimensions& dimensions, std::string& error) {
  if (!check_type(rule.type, rule.name, tensor.type, activation, error)) return false;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) {
    error = concat(rule.name, ": found format ", static_cast<int32_t>(tensor.format), "; needed the linear format");
    return false;
  }
  return dimensions.bind(rule.name, rule.dims, tensor.dims, error);
}

}  // namespace

const char* type_text(DataType type) {
  switch (type) {
    case DataType::kFLOAT: return "float32";
    case DataType::kHALF: return "float16";
    case DataType::kBF16: return "bfloat16";
    case DataType::kINT32: return "int32";
    case DataType::kINT64: return "int64";
    case DataType::kINT8: return "int8";
    default: return "another type";
  }
}

bool Dimensions::knows(const char* letters) const {
  return std::all_of(letters, letters + std::strlen(letters), [this](char letter) { return (*this)[letter] >= 0; });
}

bool Dimensions::bind(const char* name, const char* letters, const Dims& dims, std::string& error) {
  const auto rank = static_cast<int32_t>(std::char_traits<char>::length(letters));
  if (dims.nbDims != rank) {
    error = concat(name, ": found ", dims_text(dims), "; needed ", rule_text(letters));
    return false;
  }
  for (int32_t i = 0; i < rank; ++i) {
    const std::size_t letter = index(letters[i]);
    if (dims.d[i] < 0) continue;
    if (sizes_[letter] < 0) {
      sizes_[letter] = dims.d[i];
      owners_[letter] = name;
    } else if (sizes_[letter] != dims.d[i]) {
      error = concat(name, ": found ", dims_text(dims), "; needed ", rule_text(letters), " with ",
                     letter_text(letters[i]), " = ", sizes_[letter], ", as ", owners_[letter]);
      return false;
    }
  }
  return true;
}

bool allows_format(const TensorTable& table, int32_t position, const nvinfer1::DynamicPluginTensorDesc* in_out) {
  const PluginTensorDesc& tensor = in_out[position].desc;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType activation = in_out[0].desc.type;
  if (position < table.input_count()) return allows_type(table.inputs[position].type, tensor.type, activation);
  return tensor.type == in_out[table.outputs[position - table.input_count()].source].desc.type;
}

bool check_input_types(const TensorTable& table, const DataType* types, std::string& error) {
  const Activation activation{table.inputs[0].name, types[0]};
  for (int32_t i = 0; i < table.input_count(); ++i) {
    if (!check_type(table.inputs[i].type, table.inputs[i].name, types[i], activation, error)) return false;
  }
  return true;
}

bool check_tensors(const TensorTable& table, const PluginTensorDesc* inputs, int32_t input_count,
                   const PluginTensorDesc* outputs, int32_t output_count, Dimensions& dimensions, std::string& error) {
  if (!check_count("inputs", input_count, table.input_count(), error)) return false;
  if (!check_count("outputs", output_count, table.output_count(), error)) return false;
  const Activation activation{table.inputs[0].name, inputs[0].type};
  for (int32_t i = 0; i < input_count; ++i) {
    if (!check_tensor(table.inputs[i], inputs[i], activation, dimensions, error)) return false;
  }
  for (int32_t k = 0; k < output_count; ++k) {
    const OutputRule& output = table.outputs[k];
    const PluginTensorDesc& source = inputs[output.source];
    if (outputs[k].type != source.type) {
      error = concat("output ", output.name, ": found type ", type_text(outputs[k].type), "; needed ",
                     type_text(source.type), ", as the input ", table.inputs[output.source].name);
      return false;
    }
    const TensorRule rule{output.name, table.output_dims(output), table.inputs[output.source].type};
    if (!check_tensor(rule, outputs[k], activation, dimensions, error)) return false;
  }
  return true;
}

int64_t element_bytes(DataType type) { return type == DataType::kFLOAT || type == DataType::kINT32 ? 4 : 2; }

std::size_t bytes_of(DataType type, const Dims& dims) {
  auto bytes = static_cast<std::size_t>(element_bytes(type));
  for (int32_t i = 0; i < dims.nbDims; ++i) bytes *= static_cast<std::size_t>(dims.d[i]);
  return bytes;
}

}  // namespace replayssm
