// Plays TensorRT for a plugin library: opens it, takes its creators, and drives plugin objects through the public
// interfaces alone. A C interface for ctypes (plugin_harness.py); every function that can fail says so by its result,
// and what the plugin logged is read with harness_messages.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "NvInferRuntime.h"

#define HARNESS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace nvinfer1;

std::string messages;

class MessageLogger final : public ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    const char* words[] = {"internal error", "error", "warning", "info", "verbose"};
    messages += std::string(words[static_cast<int32_t>(severity)]) + ": " + message + "\n";
  }
};

class MessageLoggerFinder final : public ILoggerFinder {
 public:
  ILogger* findLogger() override { return &logger_; }

 private:
  MessageLogger logger_;
};

struct Library {
  void* handle;
  IPluginCreatorInterface* const* creators;
  int32_t creator_count;
};

// One tensor as ctypes sends it.
struct Tensor {
  int32_t type;
  int32_t format;
  int32_t rank;
  int64_t dims[8];
};

PluginTensorDesc desc_of(const Tensor& tensor) {
  PluginTensorDesc desc{};
  desc.dims.nbDims = tensor.rank;
  std::copy(tensor.dims, tensor.dims + 8, desc.dims.d);
  desc.type = static_cast<DataType>(tensor.type);
  desc.format = static_cast<TensorFormat>(tensor.format);
  desc.scale = 1.0F;
  return desc;
}

std::vector<PluginTensorDesc> descs_of(const Tensor* tensors, int32_t count) {
  std::vector<PluginTensorDesc> descs;
  for (int32_t i = 0; i < count; ++i) descs.push_back(desc_of(tensors[i]));
  return descs;
}

// As the builder describes them: unknown sizes are -1 in desc, and the profile's in min, opt and max.
std::vector<DynamicPluginTensorDesc> dynamic_descs_of(const Tensor* tensors, int32_t count) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (int32_t i = 0; i < count; ++i) {
    DynamicPluginTensorDesc dynamic{};
    dynamic.desc = desc_of(tensors[i]);
    dynamic.min = dynamic.opt = dynamic.max = dynamic.desc.dims;
    for (int32_t k = 0; k < dynamic.desc.dims.nbDims; ++k) {
      if (dynamic.desc.dims.d[k] < 0) dynamic.min.d[k] = dynamic.opt.d[k] = dynamic.max.d[k] = 1;
    }
    descs.push_back(dynamic);
  }
  return descs;
}

IPluginCreatorV3One* find_creator(const Library& library, const char* name) {
  for (int32_t i = 0; i < library.creator_count; ++i) {
    auto* creator = static_cast<IPluginCreatorV3One*>(library.creators[i]);
    if (std::strcmp(creator->getPluginName(), name) == 0) return creator;
  }
  return nullptr;
}

IPluginV3OneCore* core(IPluginV3* plugin) {
  return static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}
IPluginV3OneBuildV2* build(IPluginV3* plugin) {
  return static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
IPluginV3OneRuntime* runtime(IPluginV3* plugin) {
  return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

}  // namespace

// A plugin library chooses how it talks to its host by this number.
HARNESS_EXPORT int32_t getInferLibVersion() {
  return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}

// Move what was logged since the last call into a buffer; returns its length.
HARNESS_EXPORT int32_t harness_messages(char* buffer, int32_t capacity) {
  std::snprintf(buffer, static_cast<std::size_t>(capacity), "%s", messages.c_str());
  const auto length = static_cast<int32_t>(messages.size());
  messages.clear();
  return length;
}

HARNESS_EXPORT Library* harness_open(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    messages += std::string(dlerror()) + "\n";
    return nullptr;
  }
  auto set_logger_finder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(handle, "setLoggerFinder"));
  using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
  auto get_creators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"));
  if (set_logger_finder == nullptr || get_creators == nullptr) {
    messages += std::string(path) + " lacks setLoggerFinder or getCreators\n";
    return nullptr;
  }
  static MessageLoggerFinder finder;
  set_logger_finder(&finder);
  auto* library = new Library{handle, nullptr, 0};
  library->creators = get_creators(library->creator_count);
  return library;
}

// Describe creator `index` as "interface version/name/namespace/version" and give its fields; returns their number, or
// -1 beyond the last creator.
HARNESS_EXPORT int32_t harness_creator(const Library* library, int32_t index, char* text, int32_t capacity,
                                       const PluginField** fields) {
  if (index < 0 || index >= library->creator_count) return -1;
  auto* creator = static_cast<IPluginCreatorV3One*>(library->creators[index]);
  const InterfaceInfo info = creator->getInterfaceInfo();
  std::snprintf(text, static_cast<std::size_t>(capacity), "%s %d/%s/%s/%s", info.kind, info.major,
                creator->getPluginName(), creator->getPluginNamespace(), creator->getPluginVersion());
  const PluginFieldCollection* collection = creator->getFieldNames();
  *fields = collection->fields;
  return collection->nbFields;
}

HARNESS_EXPORT IPluginV3* harness_create(const Library* library, const char* name, const char* layer, int32_t phase,
                                         const PluginField* fields, int32_t count) {
  IPluginCreatorV3One* creator = find_creator(*library, name);
  const PluginFieldCollection collection{count, fields};
  return creator == nullptr ? nullptr
                            : creator->createPlugin(layer, &collection, static_cast<TensorRTPhase>(phase));
}

HARNESS_EXPORT void harness_destroy(IPluginV3* plugin) { delete plugin; }

HARNESS_EXPORT IPluginV3* harness_clone(IPluginV3* plugin) { return plugin->clone(); }

HARNESS_EXPORT IPluginV3* harness_attach(IPluginV3* plugin) { return runtime(plugin)->attachToContext(nullptr); }

HARNESS_EXPORT void harness_identity(IPluginV3* plugin, char* text, int32_t capacity) {
  std::snprintf(text, static_cast<std::size_t>(capacity), "%s/%s/%s", core(plugin)->getPluginName(),
                core(plugin)->getPluginNamespace(), core(plugin)->getPluginVersion());
}

// The fields stay the plugin's; returns their number.
HARNESS_EXPORT int32_t harness_fields(IPluginV3* plugin, const PluginField** fields) {
  const PluginFieldCollection* collection = runtime(plugin)->getFieldsToSerialize();
  *fields = collection->fields;
  return collection->nbFields;
}

HARNESS_EXPORT int32_t harness_output_count(IPluginV3* plugin) { return build(plugin)->getNbOutputs(); }

HARNESS_EXPORT int32_t harness_aliased_input(IPluginV3* plugin, int32_t output) {
  return build(plugin)->getAliasedInput(output);
}

HARNESS_EXPORT int32_t harness_output_types(IPluginV3* plugin, const int32_t* input_types, int32_t input_count,
                                            int32_t* output_types, int32_t output_count) {
  std::vector<DataType> inputs;
  for (int32_t i = 0; i < input_count; ++i) inputs.push_back(static_cast<DataType>(input_types[i]));
  std::vector<DataType> outputs(static_cast<std::size_t>(output_count));
  const int32_t result = build(plugin)->getOutputDataTypes(outputs.data(), output_count, inputs.data(), input_count);
  for (int32_t k = 0; k < output_count; ++k) output_types[k] = static_cast<int32_t>(outputs[k]);
  return result;
}

// Which dimensions of the inputs an output is given, as TensorRT would ask: every input has expressions of its own, here
// tokens that are never looked into. Of each output its rank, then, of as many dimensions as any may have, the input and
// the axis as one number.
HARNESS_EXPORT int32_t harness_output_axes(IPluginV3* plugin, const int32_t* input_ranks, int32_t input_count,
                                           int32_t* axes, int32_t output_count) {
  static char tokens[64][Dims::MAX_DIMS];
  static char builder_stand_in[256];
  std::vector<DimsExprs> inputs(static_cast<std::size_t>(input_count));
  for (int32_t i = 0; i < input_count; ++i) {
    inputs[i].nbDims = input_ranks[i];
    for (int32_t k = 0; k < input_ranks[i]; ++k) {
      inputs[i].d[k] = reinterpret_cast<const IDimensionExpr*>(&tokens[i][k]);
    }
  }
  std::vector<DimsExprs> outputs(static_cast<std::size_t>(output_count));
  auto& builder = *reinterpret_cast<IExprBuilder*>(builder_stand_in);
  const int32_t result =
      build(plugin)->getOutputShapes(inputs.data(), input_count, nullptr, 0, outputs.data(), output_count, builder);
  for (int32_t k = 0; k < output_count; ++k) {
    *axes++ = outputs[k].nbDims;
    for (int32_t axis = 0; axis < Dims::MAX_DIMS; ++axis) {
      *axes++ = static_cast<int32_t>(reinterpret_cast<const char*>(outputs[k].d[axis]) - &tokens[0][0]);
    }
  }
  return result;
}

HARNESS_EXPORT int32_t harness_supports(IPluginV3* plugin, int32_t position, const Tensor* tensors,
                                        int32_t input_count, int32_t output_count) {
  const auto descs = dynamic_descs_of(tensors, input_count + output_count);
  return build(plugin)->supportsFormatCombination(position, descs.data(), input_count, output_count) ? 1 : 0;
}

HARNESS_EXPORT int32_t harness_configure(IPluginV3* plugin, const Tensor* tensors, int32_t input_count,
                                         int32_t output_count) {
  const auto descs = dynamic_descs_of(tensors, input_count + output_count);
  return build(plugin)->configurePlugin(descs.data(), input_count, descs.data() + input_count, output_count);
}

HARNESS_EXPORT int64_t harness_workspace_bytes(IPluginV3* plugin, const Tensor* tensors, int32_t input_count,
                                               int32_t output_count) {
  const auto descs = dynamic_descs_of(tensors, input_count + output_count);
  return static_cast<int64_t>(
      build(plugin)->getWorkspaceSize(descs.data(), input_count, descs.data() + input_count, output_count));
}

HARNESS_EXPORT int32_t harness_on_shape_change(IPluginV3* plugin, const Tensor* tensors, int32_t input_count,
                                               int32_t output_count) {
  const auto descs = descs_of(tensors, input_count + output_count);
  return runtime(plugin)->onShapeChange(descs.data(), input_count, descs.data() + input_count, output_count);
}

HARNESS_EXPORT int32_t harness_enqueue(IPluginV3* plugin, const Tensor* tensors, int32_t input_count,
                                       int32_t output_count, const void* const* addresses, void* workspace,
                                       void* stream) {
  const auto descs = descs_of(tensors, input_count + output_count);
  std::vector<void*> outputs;
  for (int32_t k = 0; k < output_count; ++k) outputs.push_back(const_cast<void*>(addresses[input_count + k]));
  return runtime(plugin)->enqueue(descs.data(), descs.data() + input_count, addresses, outputs.data(), workspace,
                                  static_cast<cudaStream_t>(stream));
}
