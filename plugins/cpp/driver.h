// The few functions of the CUDA driver API that a launch needs, found in libcuda.so.1 when first wanted.
// Engines are built on machines without a driver, so nothing here may be touched before a kernel is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "NvInferRuntime.h"

namespace replayssm {

// Types and numbers of the driver's ABI, which NVIDIA keeps stable; cuda.h is not needed to compile this library.
using CuContext = struct CUctx_st*;
using CuModule = struct CUmod_st*;
using CuFunction = struct CUfunc_st*;
using CuDevice = int;
using CuResult = int;
using CuAddress = unsigned long long;

// An attribute of a launch: its number, then 64 bytes of value.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    int number;
    unsigned char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72, "the driver's CUlaunchAttribute");

struct LaunchConfig {
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  cudaStream_t stream;
  LaunchAttribute* attributes;
  unsigned int num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56, "the driver's CUlaunchConfig");

struct Driver {
  CuResult (*init)(unsigned int flags);
  CuResult (*get_error_name)(CuResult result, const char** name);
  CuResult (*context_current)(CuContext* context);
  CuResult (*context_id)(CuContext context, unsigned long long* id);  // since CUDA 12
  CuResult (*context_device)(CuDevice* device);
  CuResult (*device_attribute)(int* value, int attribute, CuDevice device);
  CuResult (*module_load)(CuModule* module, const void* image);
  CuResult (*module_function)(CuFunction* function, CuModule module, const char* symbol);
  CuResult (*function_set_attribute)(CuFunction function, int attribute, int value);
  CuResult (*launch)(const LaunchConfig* config, CuFunction function, void** parameters, void** extra);
  CuResult (*memory_allocate)(CuAddress* address, std::size_t bytes);
  CuResult (*memory_set)(CuAddress address, unsigned int value, std::size_t count);  // of 32 bits
  CuResult (*stream_synchronize)(cudaStream_t stream);
  CuResult (*memory_free)(CuAddress address);
  CuResult (*copy_on_device)(CuAddress destination, CuAddress source, std::size_t bytes, cudaStream_t stream);

  // The process's driver, loaded and initialised once. Null with `error` set where there is none.
  static const Driver* get(std::string& error);

  // "cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE", or an empty string for success.
  std::string fault(const char* call, CuResult result) const;
};

// The compute capability of a device, 10 * major + minor.
std::string read_compute_capability(const Driver& driver, CuDevice device, int32_t& compute_capability);

// How many multiprocessors a device has.
std::string read_multiprocessor_count(const Driver& driver, CuDevice device, int& count);

}  // namespace replayssm
