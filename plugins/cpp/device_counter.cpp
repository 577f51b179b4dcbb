#include "device_counter.h"

#include "driver.h"

namespace replayssm {

DeviceCounter::~DeviceCounter() {
  std::string no_driver;
  const Driver* driver = counter_ == nullptr ? nullptr : Driver::get(no_driver);
  // Where its context is gone the memory is as well, and there is nobody to tell.
  if (driver != nullptr) driver->memory_free(reinterpret_cast<CuAddress>(counter_));
}

std::string DeviceCounter::get(uint32_t*& counter) {
  std::string fault;
  if (counter_ == nullptr) {
    const Driver* driver = Driver::get(fault);
    if (driver == nullptr) return fault;
    CuAddress address = 0;
    fault = driver->fault("cuMemAlloc", driver->memory_allocate(&address, sizeof(uint32_t)));
    if (fault.empty()) fault = driver->fault("cuMemsetD32", driver->memory_set(address, 0, 1));
    // The null stream sets it and not the one of the launch, which may not wait for that.
    if (fault.empty()) fault = driver->fault("cuStreamSynchronize", driver->stream_synchronize(nullptr));
    if (!fault.empty()) {
      if (address != 0) driver->memory_free(address);
      return fault;
    }
    counter_ = reinterpret_cast<uint32_t*>(address);
  }
  counter = counter_;
  return "";
}

}  // namespace replayssm
