// A counter in device memory, by which the thread blocks of a persistent kernel share out their work: 0 before and
// after each launch. Launches that may run at the same time must not have the same one; those of one attached plugin
// run one after the other, as its execution context's do.
#pragma once

#include <cstdint>
#include <string>

namespace replayssm {

class DeviceCounter {
 public:
  DeviceCounter() = default;
  DeviceCounter(const DeviceCounter&) = delete;
  DeviceCounter& operator=(const DeviceCounter&) = delete;
  ~DeviceCounter();

  // Its address, allocated in the thread's current context when first asked for, which no CUDA graph may capture.
  // Returns what went wrong in words, or an empty string.
  std::string get(uint32_t*& counter);

 private:
  uint32_t* counter_ = nullptr;
};

}  // namespace replayssm
