// One kernel as a C function: KERNEL_SOURCE, KERNEL_SYMBOL and KERNEL_PARAMS name it; the constants come by -D.
#include "host_cuda.h"
// The kernel's own header of instructions must not be found before the emulator's.
#include "common/ptx.cuh"

#include KERNEL_SOURCE

#ifndef DYNAMIC_SHARED_BYTES
#define DYNAMIC_SHARED_BYTES 0
#endif
replay::Vector16 shared_memory[DYNAMIC_SHARED_BYTES / 16 + 2];

// Fill shared memory with NaN before each launch: what a block has not written it must not use.
extern "C" __attribute__((visibility("default"))) void emulate(const KERNEL_PARAMS* params, int grid_x, int grid_y,
                                                               int is_descending) {
  std::memset(shared_memory, 0xff, sizeof(shared_memory));
  emulator::launch(grid_x, grid_y, is_descending != 0, [params] { KERNEL_SYMBOL(*params); });
  const unsigned char* end = reinterpret_cast<unsigned char*>(shared_memory) + DYNAMIC_SHARED_BYTES;
  if (end[0] != 0xff || end[15] != 0xff) {
    std::fprintf(stderr, "the kernel wrote beyond its dynamic shared memory\n");
    std::abort();
  }
}
