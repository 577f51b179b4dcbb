// A stand-in for NVIDIA's libcuda.so.1 that records what it is asked to do. It lets tests see, on a machine without a
// GPU, which launches the plugins make: grid, block, stream and every byte of the kernels' argument.
//
// It offers the functions that the plugin library looks up, and recording_* functions to read the record. Built under
// the driver's file name and found through LD_LIBRARY_PATH in a process of its own (recorded_run.py).
//
// A "cubin" that is the path of a kernel compiled for the CPU (tests/kernels/emulation.py) is run as well: then device
// addresses are host addresses, and a plugin's whole way from create to results works without a GPU.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#define DRIVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kMultiprocessors = 20;  // recorded_run.py: NUM_MULTIPROCESSORS

std::string record;  // one line a call
int compute_capability = 90;
std::size_t argument_bytes = 0;
std::string failing_call;
char context;
char module_handle;
char function_handle;

// The entry of a kernel compiled for the CPU: params, grid_x, grid_y, whether threads run in descending order.
using Emulate = const char* (*)(const void*, int, int, int);

// Note a call; returns the result that it is to have.
int note(const char* call, const std::string& details) {
  record += std::string(call) + " " + details + "\n";
  return failing_call == call ? kInvalidValue : kSuccess;
}

std::string hex(const void* data, std::size_t bytes) {
  std::string text;
  char digits[3];
  for (std::size_t i = 0; i < bytes; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(data)[i]);
    text += digits;
  }
  return text;
}

}  // namespace

DRIVER_EXPORT void recording_setup(int capability, std::size_t bytes_of_argument, const char* call_to_fail) {
  compute_capability = capability;
  argument_bytes = bytes_of_argument;
  failing_call = call_to_fail;
}

DRIVER_EXPORT const char* recording_read() { return record.c_str(); }

DRIVER_EXPORT int cuInit(unsigned int) { return note("cuInit", ""); }

DRIVER_EXPORT int cuGetErrorName(int result, const char** name) {
  *name = result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_SUCCESS";
  return kSuccess;
}

DRIVER_EXPORT int cuCtxGetCurrent(void** current) {
  *current = &context;
  return kSuccess;
}

DRIVER_EXPORT int cuCtxGetId(void*, unsigned long long* id) {
  *id = 7;
  return kSuccess;
}

DRIVER_EXPORT int cuCtxGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}

DRIVER_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute == 75) *value = compute_capability / 10;
  if (attribute == 76) *value = compute_capability % 10;
  if (attribute == 16) *value = kMultiprocessors;
  return attribute == 75 || attribute == 76 || attribute == 16 ? kSuccess : kInvalidValue;
}

DRIVER_EXPORT int cuModuleLoadData(void** module, const void* image) {
  const char* path = static_cast<const char*>(image);
  *module = &module_handle;
  if (path[0] == '/') *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*module == nullptr) return kInvalidValue;
  return note("cuModuleLoadData", static_cast<const char*>(image));
}

DRIVER_EXPORT int cuModuleGetFunction(void** function, void* module, const char* symbol) {
  *function = module == &module_handle ? &function_handle : dlsym(module, "emulate");
  return *function == nullptr ? kInvalidValue : note("cuModuleGetFunction", symbol);
}

DRIVER_EXPORT int cuFuncSetAttribute(void*, int attribute, int value) {
  return note("cuFuncSetAttribute", std::to_string(attribute) + " " + std::to_string(value));
}

// CUlaunchAttribute and CUlaunchConfig, as the driver's headers lay them out.
struct Attribute {
  int id;
  char padding[4];
  int value[16];
};

struct Config {
  unsigned int grid[3], block[3];
  unsigned int shared_bytes;
  void* stream;
  const Attribute* attributes;
  unsigned int num_attributes;
};

DRIVER_EXPORT int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  if (function == nullptr || extra != nullptr) return kInvalidValue;
  const unsigned int *grid = config->grid, *block = config->block;
  if (function != &function_handle) {
    const char* failure = reinterpret_cast<Emulate>(function)(parameters[0], static_cast<int>(grid[0]),
                                                               static_cast<int>(grid[1]), 0);
    if (failure != nullptr) std::fprintf(stderr, "%s\n", failure);
    return failure == nullptr ? kSuccess : kInvalidValue;
  }
  std::string attributes;
  for (unsigned int i = 0; i < config->num_attributes; ++i) {
    const Attribute& attribute = config->attributes[i];
    attributes += std::to_string(attribute.id) + "=" + std::to_string(attribute.value[0]) + ",";
  }
  char text[256];
  std::snprintf(text, sizeof text, "%u %u %u %u %u %u %u %llu ", grid[0], grid[1], grid[2], block[0], block[1],
                block[2], config->shared_bytes, reinterpret_cast<unsigned long long>(config->stream));
  return note("cuLaunchKernelEx", text + ("[" + attributes + "] ") + hex(parameters[0], argument_bytes));
}

DRIVER_EXPORT int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  void* memory = std::malloc(bytes);
  const unsigned long long number = reinterpret_cast<unsigned long long>(memory);
  const int result = note("cuMemAlloc", std::to_string(bytes) + " " + std::to_string(number));
  if (result == kSuccess) *address = number;
  else std::free(memory);
  return result;
}

DRIVER_EXPORT int cuMemsetD32_v2(unsigned long long address, unsigned int value, std::size_t count) {
  std::fill_n(reinterpret_cast<unsigned int*>(address), count, value);
  return note("cuMemsetD32", std::to_string(address) + " " + std::to_string(value) + " " + std::to_string(count));
}

DRIVER_EXPORT int cuStreamSynchronize(void* stream) {
  return note("cuStreamSynchronize", std::to_string(reinterpret_cast<unsigned long long>(stream)));
}

DRIVER_EXPORT int cuMemFree_v2(unsigned long long address) {
  std::free(reinterpret_cast<void*>(address));
  return note("cuMemFree", std::to_string(address));
}

DRIVER_EXPORT int cuMemcpyDtoDAsync_v2(unsigned long long destination, unsigned long long source, std::size_t bytes,
                                       void* stream) {
  char text[256];
  std::snprintf(text, sizeof text, "%llu %llu %zu %llu", destination, source, bytes,
                reinterpret_cast<unsigned long long>(stream));
  return note("cuMemcpyDtoDAsync", text);
}
