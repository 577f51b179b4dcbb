#include "driver.h"

#include <dlfcn.h>

#include "log.h"

namespace replayssm {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr int kMultiprocessorCount = 16;     // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kComputeCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kComputeCapabilityMinor = 76;

struct LoadedDriver {
  Driver driver{};
  std::string error;
};

template <typename Function>
void find(void* library, const char* symbol, Function& function, std::string& error) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && error.empty()) error = concat(kLibrary, ": found no ", symbol, "; needed a newer driver");
}

LoadedDriver load() {
  LoadedDriver loaded;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    loaded.error = concat(kLibrary, ": ", reason == nullptr ? "not found" : reason, "; needed NVIDIA's driver");
    return loaded;
  }
  Driver& driver = loaded.driver;
  std::string& error = loaded.error;
  find(library, "cuInit", driver.init, error);
  find(library, "cuGetErrorName", driver.get_error_name, error);
  find(library, "cuCtxGetCurrent", driver.context_current, error);
  find(library, "cuCtxGetId", driver.context_id, error);
  find(library, "cuCtxGetDevice", driver.context_device, error);
  find(library, "cuDeviceGetAttribute", driver.device_attribute, error);
  find(library, "cuModuleLoadData", driver.module_load, error);
  find(library, "cuModuleGetFunction", driver.module_function, error);
  find(library, "cuFuncSetAttribute", driver.function_set_attribute, error);
  find(library, "cuLaunchKernelEx", driver.launch, error);
  find(library, "cuMemAlloc_v2", driver.memory_allocate, error);
  find(library, "cuMemsetD32_v2", driver.memory_set, error);
  find(library, "cuStreamSynchronize", driver.stream_synchronize, error);
  find(library, "cuMemFree_v2", driver.memory_free, error);
  find(library, "cuMemcpyDtoDAsync_v2", driver.copy_on_device, error);
  if (error.empty()) error = driver.fault("cuInit", driver.init(0));
  return loaded;
}

}  // namespace

const Driver* Driver::get(std::string& error) {
  static const LoadedDriver loaded = load();
  if (loaded.error.empty()) return &loaded.driver;
  error = loaded.error;
  return nullptr;
}

std::string Driver::fault(const char* call, CuResult result) const {
  if (result == 0) return "";
  const char* name = nullptr;
  get_error_name(result, &name);
  return name == nullptr ? concat(call, ": error ", result) : concat(call, ": ", name);
}

std::string read_compute_capability(const Driver& driver, CuDevice device, int32_t& compute_capability) {
  int major = 0;
  int minor = 0;
  std::string fault =
      driver.fault("cuDeviceGetAttribute", driver.device_attribute(&major, kComputeCapabilityMajor, device));
  if (fault.empty()) {
    fault = driver.fault("cuDeviceGetAttribute", driver.device_attribute(&minor, kComputeCapabilityMinor, device));
  }
  compute_capability = 10 * major + minor;
  return fault;
}

std::string read_multiprocessor_count(const Driver& driver, CuDevice device, int& count) {
  return driver.fault("cuDeviceGetAttribute", driver.device_attribute(&count, kMultiprocessorCount, device));
}

}  // namespace replayssm
