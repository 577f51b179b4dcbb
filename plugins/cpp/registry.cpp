// The creators, the library's exported functions, and its registration with a process's plugin registry.
#include <memory>

#include "definitions.h"
#include "log.h"
#include "tensorrt_lookup.h"

namespace replayssm {
namespace {

class ReplayCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit ReplayCreator(const PluginDefinition& definition)
      : definition_(definition), declared_(declared_fields(definition.int_names)) {
    collection_.nbFields = static_cast<int32_t>(declared_.size());
    collection_.fields = declared_.data();
  }

  const char* getPluginName() const noexcept override { return definition_.name; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* collection,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    return guarded<nvinfer1::IPluginV3*>("createPlugin", nullptr, [&]() -> nvinfer1::IPluginV3* {
      std::string label = definition_.name;
      if (name != nullptr && *name != '\0') label += concat(" \"", name, "\"");
      Fields fields;
      std::string error = "found no fields";
      bool is_sound = collection != nullptr && read_fields(*collection, definition_.int_names, fields, error);
      if (is_sound) {
        error = definition_.field_fault(fields.ints);
        is_sound = error.empty();
      }
      if (!is_sound) {
        log_error(concat(label, ": ", error));
        return nullptr;
      }
      return new ReplayPlugin(definition_, std::move(label), phase, std::move(fields));
    });
  }

 private:
  const PluginDefinition& definition_;
  std::vector<nvinfer1::PluginField> declared_;
  nvinfer1::PluginFieldCollection collection_{};
};

// Never destroyed: registries keep plain pointers, and may outlive the library's static objects.
std::vector<nvinfer1::IPluginCreatorInterface*>& creators() {
  static auto& all = *new std::vector<nvinfer1::IPluginCreatorInterface*>{
      new ReplayCreator(causal_conv1d_definition()), new ReplayCreator(mamba2_definition()),
      new ReplayCreator(gated_delta_net_definition()), new ReplayCreator(mamba2_with_conv_definition())};
  return all;
}

// Hosts that only dlopen plugin libraries (Triton's TensorRT backend) call none of our functions. So the library
// registers itself where the process has a registry; elsewhere it does nothing. Nor does it where loadLibrary opens it,
// which is about to ask for the creators and refuses a library whose creators are there already.
__attribute__((constructor)) void register_with_process() noexcept {
  guarded("register", 0, [] {
    if (is_called_by_tensorrt()) return 0;
    for (nvinfer1::IPluginCreatorInterface* creator : creators()) register_with_loaded_tensorrt(*creator, kNamespace);
    return 0;
  });
}

}  // namespace
}  // namespace replayssm

#define REPLAYSSM_EXPORT extern "C" __attribute__((visibility("default")))

// For IPluginRegistry::loadLibrary.
REPLAYSSM_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  count = static_cast<int32_t>(replayssm::creators().size());
  return replayssm::creators().data();
}

// For IPluginRegistry::loadLibrary.
REPLAYSSM_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { replayssm::set_logger_finder(finder); }

// What this library was built as; for a host that wants to print it.
REPLAYSSM_EXPORT const char* trtllm_replayssm_plugin_version() {
  static const auto& text = *new std::string(
      replayssm::concat("plugins ", replayssm::kVersion, ", kernel image ", replayssm::kKernelImageVersion,
                        ", TensorRT headers ", NV_TENSORRT_MAJOR, ".", NV_TENSORRT_MINOR, ".", NV_TENSORRT_PATCH));
  return text.c_str();
}
