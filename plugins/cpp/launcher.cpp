#include "launcher.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>

#include "../kernels/common/protocol.h"
#include "log.h"

namespace replayssm {
namespace {

constexpr int kMaxDynamicSharedBytes = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSharedBytesWithoutAsking = 48 * 1024;  // more must be asked for by the attribute above

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one before it in the stream
// has finished; it waits by itself (kernels/common/dependent_launch.cuh).
constexpr int kStreamSerialization = 6;
constexpr int32_t kStreamSerializationSince = 90;  // compute capability

struct Kernel {
  const KernelEntry* entry = nullptr;
  CuFunction function = nullptr;
  int multiprocessors = 0;    // of the device; asked for persistent kernels alone
  bool is_dependent = false;  // launched with kStreamSerialization
};

// An image has this role for some devices or operations only; everywhere else another one does its work, or, where that
// is null, several of them one after the other, and then a Kernel without an entry stands for it.
struct SpecialRole {
  const char* role;
  const char* generic;
};
constexpr SpecialRole kSpecialRoles[] = {{"pipelined_step", "step"},
                                         {"one_token_step", "step"},
                                         {"conv_one_token_step", "conv_step"},
                                         {"step_with_conv", nullptr}};

const SpecialRole* find_special(const std::string& role) {
  const auto* found = std::find_if(std::begin(kSpecialRoles), std::end(kSpecialRoles),
                                   [&](const SpecialRole& special) { return role == special.role; });
  return found == std::end(kSpecialRoles) ? nullptr : found;
}

// A context's id is never given twice in a process, unlike its address.
using ContextId = unsigned long long;

// The process's loaded kernels. Modules are never unloaded: they live as long as their context, and at exit the
// driver may be gone before us.
class KernelCache {
 public:
  static KernelCache& instance() {
    static auto& cache = *new KernelCache;
    return cache;
  }

  // The loaded kernel of a role for the current context's device.
  std::string get(const Driver& driver, const std::shared_ptr<const KernelImage>& image, const std::string& role,
                  Kernel& kernel) {
    ContextId context = 0;
    std::string fault = current_context(driver, context);
    if (!fault.empty()) return fault;
    const std::lock_guard<std::mutex> lock(mutex_);
    return find_or_load(driver, context, image, role, kernel);
  }

 private:
  // A loaded cubin, and the image it came from: holding it keeps its address from being given to another one.
  struct Module {
    std::shared_ptr<const KernelImage> image;
    CuModule handle = nullptr;
  };

  static std::string current_context(const Driver& driver, ContextId& id) {
    CuContext context = nullptr;
    const std::string fault = driver.fault("cuCtxGetCurrent", driver.context_current(&context));
    if (!fault.empty()) return fault;
    if (context == nullptr) return "found no current CUDA context in this thread; needed one before enqueue";
    return driver.fault("cuCtxGetId", driver.context_id(context, &id));
  }

  std::string find_or_load(const Driver& driver, ContextId context, const std::shared_ptr<const KernelImage>& image,
                           const std::string& role, Kernel& kernel) {
    const auto key = std::make_tuple(context, image.get(), role);
    const auto found = kernels_.find(key);
    if (found != kernels_.end()) {
      kernel = found->second;
      return "";
    }
    const std::string fault = load(driver, context, image, role, kernel);
    if (fault.empty()) kernels_.emplace(key, kernel);
    return fault;
  }

  std::string load(const Driver& driver, ContextId context, const std::shared_ptr<const KernelImage>& image,
                   const std::string& role, Kernel& kernel) {
    CuDevice device = 0;
    int32_t capability = 0;
    std::string fault = driver.fault("cuCtxGetDevice", driver.context_device(&device));
    if (fault.empty()) fault = read_compute_capability(driver, device, capability);
    if (!fault.empty()) return fault;
    kernel.entry = image->find(role.c_str(), capability);
    const SpecialRole* special = kernel.entry == nullptr ? find_special(role) : nullptr;
    if (special != nullptr) {
      return special->generic == nullptr ? "" : find_or_load(driver, context, image, special->generic, kernel);
    }
    if (kernel.entry == nullptr) {
      return concat("no ", role, " kernel for compute capability ", capability_text(capability),
                    "; the engine carries ", image->capabilities(), ". Build it for this device as well");
    }
    kernel.is_dependent = kernel.entry->is_dependent_launch && capability >= kStreamSerializationSince;
    if (kernel.entry->is_persistent) fault = read_multiprocessor_count(driver, device, kernel.multiprocessors);
    if (!fault.empty()) return fault;
    CuModule module = nullptr;
    fault = load_module(driver, context, image, *kernel.entry, module);
    if (!fault.empty()) return fault;
    const char* symbol = kernel.entry->symbol.c_str();
    fault = driver.fault("cuModuleGetFunction", driver.module_function(&kernel.function, module, symbol));
    if (!fault.empty()) return concat(fault, " for the symbol ", symbol);
    const int shared = kernel.entry->dynamic_shared_bytes;
    if (shared <= kSharedBytesWithoutAsking) return "";
    fault = driver.fault("cuFuncSetAttribute",
                         driver.function_set_attribute(kernel.function, kMaxDynamicSharedBytes, shared));
    return fault.empty() ? fault : concat(fault, " for ", shared, " bytes of shared memory");
  }

  // Entries may share a cubin; it is loaded once.
  std::string load_module(const Driver& driver, ContextId context, const std::shared_ptr<const KernelImage>& image,
                          const KernelEntry& entry, CuModule& module) {
    const auto key = std::make_tuple(context, image.get(), entry.cubin_offset);
    const auto found = modules_.find(key);
    if (found != modules_.end()) {
      module = found->second.handle;
      return "";
    }
    // A copy, since cubins stand in the image at any alignment; and one zero more, so that PTX text is ended.
    const unsigned char* first = image->bytes().data() + entry.cubin_offset;
    std::vector<unsigned char> cubin(first, first + entry.cubin_bytes);
    cubin.push_back(0);
    const std::string fault = driver.fault("cuModuleLoadData", driver.module_load(&module, cubin.data()));
    if (!fault.empty()) {
      return concat(fault, " for the ", entry.role, " kernel of ", capability_text(entry.compute_capability));
    }
    modules_.emplace(key, Module{image, module});
    return "";
  }

  std::mutex mutex_;
  std::map<std::tuple<ContextId, const KernelImage*, std::string>, Kernel> kernels_;
  std::map<std::tuple<ContextId, const KernelImage*, std::size_t>, Module> modules_;
};

}  // namespace

std::string prepare_kernels(const std::shared_ptr<const KernelImage>& image, bool& is_device_there) {
  is_device_there = false;
  std::string no_driver;
  const Driver* driver = Driver::get(no_driver);
  if (driver == nullptr) return "";
  CuContext context = nullptr;
  is_device_there = driver->context_current(&context) == 0 && context != nullptr;
  if (!is_device_there) return "";
  for (const KernelEntry& entry : image->entries()) {
    Kernel kernel;
    const std::string fault = KernelCache::instance().get(*driver, image, entry.role, kernel);
    if (!fault.empty()) return fault;
  }
  return "";
}

std::string is_faster(const std::shared_ptr<const KernelImage>& image, const char* role, int64_t rows, bool& answer) {
  std::string fault;
  const Driver* driver = Driver::get(fault);
  if (driver == nullptr) return fault;
  Kernel kernel;
  fault = KernelCache::instance().get(*driver, image, role, kernel);
  const int64_t most = kernel.entry == nullptr ? 0 : kernel.entry->most_blocks_per_multiprocessor;
  answer = kernel.entry != nullptr && (most == 0 || rows * kernel.entry->grid_x <= most * kernel.multiprocessors);
  return fault;
}

std::string launch_kernel(const std::shared_ptr<const KernelImage>& image, KernelLaunch& launch, int64_t rows,
                          cudaStream_t stream) {
  if (rows > replay::MAX_ROWS) return concat("found ", rows, " rows; needed at most ", replay::MAX_ROWS);
  std::string fault;
  const Driver* driver = Driver::get(fault);
  if (driver == nullptr) return fault;
  Kernel kernel;
  fault = KernelCache::instance().get(*driver, image, launch.role, kernel);
  if (!fault.empty()) return fault;
  const KernelEntry& entry = *kernel.entry;
  int64_t grid_x = entry.grid_x, grid_y = (rows + entry.rows_per_block - 1) / entry.rows_per_block;
  if (entry.is_persistent) {
    grid_x = std::min<int64_t>(kernel.multiprocessors, grid_x * rows);
    grid_y = 1;
  }
  void* parameters[] = {launch.argument.bytes};
  LaunchAttribute serialization{};
  serialization.id = kStreamSerialization;
  serialization.value.number = 1;
  LaunchConfig config{};
  config.grid_x = static_cast<unsigned int>(grid_x);
  config.grid_y = static_cast<unsigned int>(grid_y);
  config.block_x = static_cast<unsigned int>(entry.block_x);
  config.grid_z = config.block_y = config.block_z = 1;
  config.shared_bytes = static_cast<unsigned int>(entry.dynamic_shared_bytes);
  config.stream = stream;
  if (kernel.is_dependent) {
    config.attributes = &serialization;
    config.num_attributes = 1;
  }
  return driver->fault("cuLaunchKernelEx", driver->launch(&config, kernel.function, parameters, nullptr));
}

std::string copy_on_device(void* destination, const void* source, std::size_t bytes, cudaStream_t stream) {
  std::string fault;
  const Driver* driver = Driver::get(fault);
  if (driver == nullptr) return fault;
  return driver->fault("cuMemcpyDtoDAsync",
                       driver->copy_on_device(reinterpret_cast<CuAddress>(destination),
                                              reinterpret_cast<CuAddress>(source), bytes, stream));
}

}  // namespace replayssm
