#include "tensorrt_lookup.h"

#include <dlfcn.h>
#include <link.h>
#include <unwind.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "log.h"

namespace replayssm {
namespace {

using nvinfer1::IPluginCreatorInterface;

// Places of functions in the tables of virtual functions of one TensorRT version.
struct FunctionPlaces {
  int registry_register_creator;  // IPluginRegistry::registerCreator(IPluginCreatorInterface&, const char*)
  int logger_log;                 // ILogger::log(Severity, const char*)
};

// Version 11 dropped the registry's functions for V2 plugins, and made ILogger a versioned interface, whose four
// functions come first. Found by experiment with TensorRT 11.4 and TensorRT for RTX 1.7; tests hold them.
constexpr FunctionPlaces kPlaces10{12, 0};
constexpr FunctionPlaces kPlaces11{8, 4};

// The version is getInferLibVersion's, 10000 * major + 100 * minor + patch. Null for one that is unknown.
const FunctionPlaces* places_of_version(int version) {
  const int major = version / 10000;
  if (major == 10) return &kPlaces10;
  if (major == 11) return &kPlaces11;
  if (major == 1 && version >= 10700) return &kPlaces11;  // TensorRT for RTX; none takes plugins before 1.7
  return nullptr;
}

bool is_tensorrt_path(const char* path) {
  const char* slash = path == nullptr ? nullptr : std::strrchr(path, '/');
  if (slash == nullptr) return false;
  const std::string file = slash + 1;
  for (const char* prefix : {"libnvinfer.so", "libnvinfer_lean.so", "libnvinfer_dispatch.so", "libtensorrt_rtx.so"}) {
    if (file.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

int add_if_tensorrt(dl_phdr_info* info, std::size_t, void* paths) {
  if (is_tensorrt_path(info->dlpi_name)) static_cast<std::vector<std::string>*>(paths)->push_back(info->dlpi_name);
  return 0;
}

// Call `visit` with a dlsym handle for each TensorRT of the process, until it returns true.
template <typename Visit>
void visit_loaded_tensorrt(Visit visit) {
  if (visit(RTLD_DEFAULT)) return;
  // A host that was itself dlopened with RTLD_LOCAL, as Triton's backends and Python's modules are, keeps TensorRT's
  // symbols out of the global scope; the library is found by its file name then.
  std::vector<std::string> paths;
  dl_iterate_phdr(add_if_tensorrt, &paths);
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;
    const bool is_done = visit(library);
    dlclose(library);
    if (is_done) return;
  }
}

template <typename Function>
Function find(void* library, const char* symbol) {
  return reinterpret_cast<Function>(dlsym(library, symbol));
}

// The version of the TensorRT behind a dlsym handle; 0 when there is none.
int version_of(void* library) {
  auto get_version = find<int32_t (*)()>(library, "getInferLibVersion");
  return get_version == nullptr ? 0 : get_version();
}

// The version of the TensorRT whose code holds the virtual functions of `object`; 0 when it is in no TensorRT.
int version_of_owner(const void* object) {
  Dl_info owner;
  if (dladdr(*static_cast<void* const*>(object), &owner) == 0 || owner.dli_fname == nullptr) return 0;
  void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return 0;
  const int version = version_of(library);
  dlclose(library);
  return version;
}

// A virtual function of an object, by its place. It takes the object first (the Itanium C++ ABI, Linux compilers').
template <typename Function>
Function virtual_function(void* object, int place) {
  return (*static_cast<Function**>(object))[place];
}

bool log_by_place(void* logger, int version, nvinfer1::ILogger::Severity severity, const char* message) {
  const FunctionPlaces* places = places_of_version(version);
  if (logger == nullptr || places == nullptr) return false;
  using Log = void (*)(void*, nvinfer1::ILogger::Severity, const char*);
  virtual_function<Log>(logger, places->logger_log)(logger, severity, message);
  return true;
}

_Unwind_Reason_Code look_for_tensorrt(_Unwind_Context* frame, void* is_found) {
  Dl_info owner;
  if (dladdr(reinterpret_cast<void*>(_Unwind_GetIP(frame)), &owner) != 0 && is_tensorrt_path(owner.dli_fname)) {
    *static_cast<bool*>(is_found) = true;
    return _URC_END_OF_STACK;
  }
  return _URC_NO_REASON;
}

}  // namespace

void register_with_loaded_tensorrt(IPluginCreatorInterface& creator, const char* plugin_namespace) {
  std::set<void*> seen;
  visit_loaded_tensorrt([&](void* library) {
    auto get_registry = find<void* (*)()>(library, "getPluginRegistry");
    void* registry = get_registry == nullptr ? nullptr : get_registry();
    if (registry == nullptr || !seen.insert(registry).second) return false;
    const FunctionPlaces* places = places_of_version(version_of(library));
    if (places == nullptr) {
      log_warning(concat("found a TensorRT of version number ", version_of(library),
                         "; needed 10.x, 11.x or TensorRT for RTX 1.7 to register by itself. Use loadLibrary"));
      return false;
    }
    using RegisterCreator = bool (*)(void*, IPluginCreatorInterface&, const char*);
    auto register_creator = virtual_function<RegisterCreator>(registry, places->registry_register_creator);
    // False means that another library of this process registered the same plugin first; it stays then.
    register_creator(registry, creator, plugin_namespace);
    return false;
  });
}

bool is_called_by_tensorrt() {
  bool is_found = false;
  _Unwind_Backtrace(look_for_tensorrt, &is_found);
  return is_found;
}

bool log_through_tensorrt(nvinfer1::ILoggerFinder* finder, nvinfer1::ILogger::Severity severity,
                          const char* message) {
  if (finder != nullptr) {
    const int version = version_of_owner(finder);
    if (log_by_place(finder->findLogger(), version, severity, message)) return true;
  }
  bool is_logged = false;
  visit_loaded_tensorrt([&](void* library) {
    auto get_logger = find<void* (*)()>(library, "getLogger");
    is_logged = get_logger != nullptr && log_by_place(get_logger(), version_of(library), severity, message);
    return is_logged;
  });
  return is_logged;
}

}  // namespace replayssm
