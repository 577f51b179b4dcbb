#include "replay_plugin.h"

#include <cstring>
#include <memory>
#include <utility>

#include "log.h"

namespace replayssm {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;

namespace {

constexpr int32_t kFailure = 1;

std::vector<PluginTensorDesc> build_descs(const DynamicPluginTensorDesc* tensors, int32_t count) {
  std::vector<PluginTensorDesc> descs;
  for (int32_t i = 0; i < count; ++i) descs.push_back(tensors[i].desc);
  return descs;
}

// The sizes of these letters, each as the first input that has the letter says it.
nvinfer1::DimsExprs expressions_of(const TensorTable& table, const char* letters, const nvinfer1::DimsExprs* inputs) {
  nvinfer1::DimsExprs found{};
  for (const char* letter = letters; *letter != '\0'; ++letter) {
    for (int32_t i = 0; i < table.input_count(); ++i) {
      const char* place = std::strchr(table.inputs[i].dims, *letter);
      if (place == nullptr) continue;
      found.d[found.nbDims++] = inputs[i].d[place - table.inputs[i].dims];
      break;
    }
  }
  return found;
}

}  // namespace

ReplayPlugin::ReplayPlugin(const PluginDefinition& definition, std::string label, nvinfer1::TensorRTPhase phase,
                           Fields fields)
    : definition_(definition), label_(std::move(label)), phase_(phase), fields_(std::move(fields)) {
  serialized_ = serialized_fields(definition_.int_names, fields_);
  collection_.nbFields = static_cast<int32_t>(serialized_.size());
  collection_.fields = serialized_.data();
}

int32_t ReplayPlugin::fail(const std::string& error) const {
  log_error(concat(label_, ": ", error));
  return kFailure;
}

bool ReplayPlugin::check_counts(int32_t input_count, int32_t output_count) const {
  const TensorTable& tensors = definition_.tensors;
  if (input_count == tensors.input_count() && output_count == tensors.output_count()) return true;
  fail(concat("found ", input_count, " inputs and ", output_count, " outputs; needed ", tensors.input_count(), " and ",
              tensors.output_count()));
  return false;
}

nvinfer1::IPluginCapability* ReplayPlugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* ReplayPlugin::clone() noexcept {
  return guarded<nvinfer1::IPluginV3*>("clone", nullptr,
                                       [&] { return new ReplayPlugin(definition_, label_, phase_, fields_); });
}

int32_t ReplayPlugin::getAliasedInput(int32_t output) noexcept {
  if (output < 0 || output >= getNbOutputs()) return -1;
  const OutputRule& rule = definition_.tensors.outputs[output];
  return rule.is_aliased ? rule.source : -1;
}

int32_t ReplayPlugin::getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count,
                                         const nvinfer1::DataType* input_types, int32_t input_count) const noexcept {
  return guarded("getOutputDataTypes", kFailure, [&] {
    if (!check_counts(input_count, output_count)) return kFailure;
    // Here, and not in supportsFormatCombination, which is also asked about combinations that nobody wants: this is
    // where a wrong type can be refused with its reason.
    std::string error;
    if (!check_input_types(definition_.tensors, input_types, error)) return fail(error);
    for (int32_t k = 0; k < output_count; ++k) output_types[k] = input_types[definition_.tensors.outputs[k].source];
    return 0;
  });
}

int32_t ReplayPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                                      const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                      int32_t output_count, nvinfer1::IExprBuilder&) noexcept {
  return guarded("getOutputShapes", kFailure, [&] {
    if (!check_counts(input_count, output_count)) return kFailure;
    const TensorTable& tensors = definition_.tensors;
    for (int32_t k = 0; k < output_count; ++k) {
      const OutputRule& rule = tensors.outputs[k];
      outputs[k] = rule.dims == nullptr ? inputs[rule.source] : expressions_of(tensors, rule.dims, inputs);
    }
    return 0;
  });
}

bool ReplayPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* in_out,
                                             int32_t input_count, int32_t output_count) noexcept {
  if (input_count != definition_.tensors.input_count() || output_count != definition_.tensors.output_count() ||
      position < 0 || position >= input_count + output_count) {
    return false;
  }
  return allows_format(definition_.tensors, position, in_out);
}

bool ReplayPlugin::check(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                         int32_t output_count, Dimensions& dimensions, std::string& error) const {
  if (!check_tensors(definition_.tensors, inputs, input_count, outputs, output_count, dimensions, error)) return false;
  error = definition_.dimension_fault(dimensions, fields_.ints);
  return error.empty();
}

// All that can be said before addresses are known: the tensors, and that the kernels were compiled for them.
int32_t ReplayPlugin::check_shapes(const PluginTensorDesc* inputs, int32_t input_count,
                                   const PluginTensorDesc* outputs, int32_t output_count) const {
  Dimensions dimensions;
  std::string error;
  if (!check(inputs, input_count, outputs, output_count, dimensions, error)) return fail(error);
  const std::string needed = definition_.constants(inputs, dimensions, fields_.ints);
  const std::string& found = fields_.kernels->constants();
  if (needed.empty() || needed == found) return 0;
  return fail(concat("field ", kKernelsField, ": found kernels compiled for \"", found, "\"; needed \"", needed,
                     "\". Build the engine again, or take the image that was compiled for this network"));
}

int32_t ReplayPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                      const DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept {
  return guarded("configurePlugin", kFailure, [&] {
    const auto input_descs = build_descs(inputs, input_count);
    const auto output_descs = build_descs(outputs, output_count);
    return check_shapes(input_descs.data(), input_count, output_descs.data(), output_count);
  });
}

std::size_t ReplayPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                           const DynamicPluginTensorDesc*, int32_t) const noexcept {
  const int32_t source = definition_.workspace_source;
  if (source < 0 || source >= input_count) return 0;
  return bytes_of(inputs[source].desc.type, inputs[source].max);
}

int32_t ReplayPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count,
                                    const PluginTensorDesc* outputs, int32_t output_count) noexcept {
  return guarded("onShapeChange", kFailure, [&] { return check_shapes(inputs, input_count, outputs, output_count); });
}

// Whatever the first launch would need that no CUDA graph may capture.
std::string ReplayPlugin::prepare() {
  bool is_device_there = false;
  const std::string fault = prepare_kernels(fields_.kernels, is_device_there);
  uint32_t* counter = nullptr;
  return fault.empty() && is_device_there ? take_counter(counter) : fault;
}

std::string ReplayPlugin::take_counter(uint32_t*& counter) {
  return fields_.kernels->has_persistent() ? counter_.get(counter) : "";
}

// A state's output has its input's address. Where TensorRT gave another one nonetheless, bring the whole pool over,
// so that the step is right, if slow.
std::string ReplayPlugin::bring_states(const PluginTensorDesc* input_descs, const Buffers& buffers,
                                       cudaStream_t stream) {
  for (int32_t k = 0; k < getNbOutputs(); ++k) {
    const OutputRule& rule = definition_.tensors.outputs[k];
    if (!rule.is_aliased || buffers.outputs[k] == buffers.inputs[rule.source]) continue;
    if (!has_warned_of_copies_.exchange(true)) {
      log_warning(concat(label_, ": output ", rule.name,
                         " has another address than its input; the pool is copied in every step. Bind past and "
                         "present to one address, and enable PreviewFeature::kALIASED_PLUGIN_IO_10_03"));
    }
    const PluginTensorDesc& state = input_descs[rule.source];
    const std::size_t bytes = bytes_of(state.type, state.dims);
    const std::string fault = copy_on_device(buffers.outputs[k], buffers.inputs[rule.source], bytes, stream);
    if (!fault.empty()) return fault;
  }
  return "";
}

int32_t ReplayPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                              const void* const* inputs, void* const* outputs, void* workspace,
                              cudaStream_t stream) noexcept {
  return guarded("enqueue", kFailure, [&] {
    Dimensions dimensions;
    std::string error;
    // Cheap beside a launch, and it saves the device from a caller who left onShapeChange out.
    if (!check(input_descs, definition_.tensors.input_count(), output_descs, getNbOutputs(), dimensions, error)) {
      return fail(error);
    }
    Buffers buffers{inputs, outputs, workspace};
    std::string fault = bring_states(input_descs, buffers, stream);
    if (!fault.empty()) return fail(fault);
    if (dimensions['B'] == 0 || dimensions['S'] == 0) return 0;
    fault = take_counter(buffers.counter);
    if (!fault.empty()) return fail(fault);
    std::vector<KernelLaunch> launches;
    fault = definition_.append_launches(input_descs, dimensions, fields_, buffers, launches);
    for (KernelLaunch& launch : launches) {
      if (fault.empty()) fault = launch_kernel(fields_.kernels, launch, dimensions['B'], stream);
    }
    return fault.empty() ? 0 : fail(fault);
  });
}

nvinfer1::IPluginV3* ReplayPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return guarded<nvinfer1::IPluginV3*>("attachToContext", nullptr, [&]() -> nvinfer1::IPluginV3* {
    auto attached = std::make_unique<ReplayPlugin>(definition_, label_, phase_, fields_);
    // The builder's own contexts run on its machine's GPU, which need not be one that the engine is for.
    const bool is_runtime = phase_ == nvinfer1::TensorRTPhase::kRUNTIME;
    const std::string fault = is_runtime ? attached->prepare() : "";
    if (!fault.empty()) {
      fail(fault);
      return nullptr;
    }
    return attached.release();
  });
}

const nvinfer1::PluginFieldCollection* ReplayPlugin::getFieldsToSerialize() noexcept { return &collection_; }

}  // namespace replayssm
