// Launches the kernels of an image on the caller's CUDA context and stream. Functions return what went wrong in
// words, or an empty string.
#pragma once

#include <memory>
#include <new>
#include <string>

#include "driver.h"
#include "kernel_image.h"

namespace replayssm {

// The single argument of a kernel: the bytes of its Params struct.
struct KernelArgument {
  static constexpr std::size_t kCapacity = 512;
  alignas(16) unsigned char bytes[kCapacity];

  template <typename Params>
  explicit KernelArgument(const Params& params) {
    static_assert(sizeof(Params) <= kCapacity, "raise kCapacity");
    new (bytes) Params(params);
  }
};

struct KernelLaunch {
  std::string role;  // of the kernel
  KernelArgument argument;
};

// Load every kernel that the image has for the current context's device, so that a later launch may be captured in a
// CUDA graph. Does nothing where there is no driver or no current context (a machine that only builds), and says which.
std::string prepare_kernels(const std::shared_ptr<const KernelImage>& image, bool& is_device_there);

// Launch a kernel on the grid that the image tells for this many rows, asynchronous on `stream`. Where the image has no
// special step (pipelined, of one token) for the device, its step runs.
std::string launch_kernel(const std::shared_ptr<const KernelImage>& image, KernelLaunch& launch, int64_t rows,
                          cudaStream_t stream);

// Has the image a kernel of this role for the current context's device, and is it the faster way for this many rows?
std::string is_faster(const std::shared_ptr<const KernelImage>& image, const char* role, int64_t rows, bool& answer);

// Copy between device addresses, asynchronous on `stream`.
std::string copy_on_device(void* destination, const void* source, std::size_t bytes, cudaStream_t stream);

}  // namespace replayssm
