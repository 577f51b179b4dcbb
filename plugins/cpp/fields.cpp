#include "fields.h"

#include <limits>
#include <set>

#include "log.h"

namespace replayssm {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

const char* type_text(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT8: return "int8";
    case PluginFieldType::kINT32: return "int32";
    case PluginFieldType::kINT64: return "int64";
    case PluginFieldType::kFLOAT32: return "float32";
    case PluginFieldType::kCHAR: return "char";
    default: return "another type";
  }
}

std::string found_text(const PluginField& field) {
  return concat("field ", field.name, ": found ", field.length, " x ", type_text(field.type));
}

// TensorRT's ONNX parser narrows a node's ints to int32; a caller of the C++ interface may pass them as they are.
bool read_int(const PluginField& field, int32_t& value, std::string& error) {
  const bool is_int = field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64;
  if (!is_int || field.length != 1 || field.data == nullptr) {
    error = found_text(field) + "; needed one int32";
    return false;
  }
  if (field.type == PluginFieldType::kINT32) {
    value = *static_cast<const int32_t*>(field.data);
    return true;
  }
  const int64_t wide = *static_cast<const int64_t*>(field.data);
  if (wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max()) {
    error = concat("field ", field.name, ": found ", wide, "; needed a number of 32 bits");
    return false;
  }
  value = static_cast<int32_t>(wide);
  return true;
}

bool read_kernels(const PluginField& field, std::shared_ptr<const KernelImage>& kernels, std::string& error) {
  if (field.type != PluginFieldType::kINT8 || field.length < 1 || field.data == nullptr) {
    error = found_text(field) + "; needed a kernel image as int8";
    return false;
  }
  kernels = KernelImage::read(field.data, static_cast<std::size_t>(field.length), error);
  if (kernels == nullptr) error = concat("field ", field.name, ": ", error);
  return kernels != nullptr;
}

std::string names_text(const std::vector<const char*>& int_names) {
  std::string text;
  for (const char* name : int_names) text += std::string(name) + ", ";
  return text + kKernelsField;
}

}  // namespace

bool read_fields(const nvinfer1::PluginFieldCollection& collection, const std::vector<const char*>& int_names,
                 Fields& fields, std::string& error) {
  fields.ints.assign(int_names.size(), 0);
  std::set<std::string> seen;
  for (int32_t i = 0; i < collection.nbFields; ++i) {
    const PluginField& field = collection.fields[i];
    const std::string name = field.name == nullptr ? "" : field.name;
    if (!seen.insert(name).second) {
      error = concat("field ", name, ": found twice; needed once");
      return false;
    }
    bool is_known = name == kKernelsField;
    if (is_known && !read_kernels(field, fields.kernels, error)) return false;
    for (std::size_t k = 0; k < int_names.size(); ++k) {
      if (name != int_names[k]) continue;
      is_known = true;
      if (!read_int(field, fields.ints[k], error)) return false;
    }
    if (!is_known) {
      error = concat("field ", name, ": unknown; needed ", names_text(int_names), " and no other");
      return false;
    }
  }
  std::vector<const char*> needed = int_names;
  needed.push_back(kKernelsField);
  for (const char* name : needed) {
    if (seen.count(name) == 0) {
      error = concat("field ", name, ": missing; needed ", names_text(int_names));
      return false;
    }
  }
  return true;
}

std::vector<PluginField> declared_fields(const std::vector<const char*>& int_names) {
  std::vector<PluginField> fields;
  for (const char* name : int_names) fields.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
  fields.emplace_back(kKernelsField, nullptr, PluginFieldType::kINT8, 1);
  return fields;
}

std::vector<PluginField> serialized_fields(const std::vector<const char*>& int_names, const Fields& fields) {
  std::vector<PluginField> serialized;
  for (std::size_t k = 0; k < int_names.size(); ++k) {
    serialized.emplace_back(int_names[k], &fields.ints[k], PluginFieldType::kINT32, 1);
  }
  const std::vector<unsigned char>& image = fields.kernels->bytes();
  serialized.emplace_back(kKernelsField, image.data(), PluginFieldType::kINT8, static_cast<int32_t>(image.size()));
  return serialized;
}

}  // namespace replayssm
