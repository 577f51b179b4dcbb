// The shared half of the plugins: TensorRT's interfaces around a table of tensors, a few ints and a kernel image.
// A plugin itself is a PluginDefinition: those of definitions.h.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "NvInferRuntime.h"
#include "device_counter.h"
#include "fields.h"
#include "launcher.h"
#include "tensors.h"

namespace replayssm {

constexpr char kNamespace[] = "trtllm_replayssm";
constexpr char kVersion[] = "1";

// The device addresses of one enqueue, in the order of the tensor table.
struct Buffers {
  const void* const* inputs;
  void* const* outputs;         // a state's address is its output's
  void* workspace = nullptr;    // if the plugin has one
  uint32_t* counter = nullptr;  // for persistent kernels, if the image has any
};

// Everything that tells one plugin from another.
struct PluginDefinition {
  const char* name;
  TensorTable tensors;
  std::vector<const char*> int_names;

  // What is wrong with the fields alone, or an empty string.
  std::string (*field_fault)(const IntFields& fields);
  // What is wrong with the sizes that are known, beyond equal letters being equal; or an empty string.
  std::string (*dimension_fault)(const Dimensions& dimensions, const IntFields& fields);
  // The constants that its kernels must have been compiled for, as plugins/specializations writes them; empty while one
  // of them is not known.
  std::string (*constants)(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions,
                           const IntFields& fields);
  // Append what an enqueue launches, kernel after kernel. All sizes are known and checked; all tensors are contiguous.
  // Returns what went wrong, or an empty string.
  std::string (*append_launches)(const nvinfer1::PluginTensorDesc* inputs, const Dimensions& dimensions,
                                 const Fields& fields, const Buffers& buffers, std::vector<KernelLaunch>& launches);
  // The input that the workspace is as large as; -1 where there is none.
  int32_t workspace_source = -1;
};

class ReplayPlugin final : public nvinfer1::IPluginV3,
                           public nvinfer1::IPluginV3OneCore,
                           public nvinfer1::IPluginV3OneBuildV2,
                           public nvinfer1::IPluginV3OneRuntime {
 public:
  // `label` names the object in messages: the plugin and its layer.
  ReplayPlugin(const PluginDefinition& definition, std::string label, nvinfer1::TensorRTPhase phase, Fields fields);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // Core
  const char* getPluginName() const noexcept override { return definition_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // Build
  int32_t getNbOutputs() const noexcept override { return definition_.tensors.output_count(); }
  int32_t getAliasedInput(int32_t output) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count,
                             const nvinfer1::DataType* input_types, int32_t input_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t shape_input_count,
                          nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* in_out,
                                 int32_t input_count, int32_t output_count) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept override;
  std::size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                               const nvinfer1::DynamicPluginTensorDesc* outputs,
                               int32_t output_count) const noexcept override;

  // Runtime
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  int32_t fail(const std::string& error) const;
  bool check_counts(int32_t input_count, int32_t output_count) const;
  bool check(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
             const nvinfer1::PluginTensorDesc* outputs, int32_t output_count, Dimensions& dimensions,
             std::string& error) const;
  int32_t check_shapes(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                       const nvinfer1::PluginTensorDesc* outputs, int32_t output_count) const;
  std::string prepare();
  std::string take_counter(uint32_t*& counter);
  std::string bring_states(const nvinfer1::PluginTensorDesc* input_descs, const Buffers& buffers,
                           cudaStream_t stream);

  const PluginDefinition& definition_;
  const std::string label_;
  const nvinfer1::TensorRTPhase phase_;
  const Fields fields_;
  std::vector<nvinfer1::PluginField> serialized_;
  nvinfer1::PluginFieldCollection collection_{};
  std::atomic<bool> has_warned_of_copies_{false};
  DeviceCounter counter_;
};

}  // namespace replayssm
