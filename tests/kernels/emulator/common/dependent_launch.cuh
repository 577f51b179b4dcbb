// plugins/kernels/common/dependent_launch.cuh for the emulator: until all threads of a block wait for the kernel
// before, memory holds what the test says was there.
#pragma once
#include "host_cuda.h"

namespace replay {

inline void wait_for_previous() {
  emulator::current().is_waiting_for_grid = true;
  emulator::yield();
  emulator::current().has_waited_for_grid = true;
}

inline void let_next_start() {
  if (!emulator::current().has_waited_for_grid) emulator::fail("the next kernel was let go too early");
}

}  // namespace replay
