// One kernel as C functions: KERNEL_SOURCE, KERNEL_SYMBOL and KERNEL_PARAMS name it; the constants come by -D.
#include "under_way.h"
// The kernel's own headers of instructions must not be found before the emulator's.
#include "common/ptx.cuh"

#include KERNEL_SOURCE

#ifndef DYNAMIC_SHARED_BYTES
#define DYNAMIC_SHARED_BYTES 0
#endif
#define EXPORTED extern "C" __attribute__((visibility("default")))

alignas(256) replay::Vector16 shared_memory[DYNAMIC_SHARED_BYTES / 16 + 2];

// Before a launch: memory that it may copy and prefetch from, anything if none is declared; and, unless null, what
// stands there while the kernel before this one still runs.
EXPORTED void declare(void* begin, size_t bytes, const void* stale) {
  emulator::regions.push_back({static_cast<char*>(begin), bytes, static_cast<const char*>(stale), {}});
}

// Launch, and return null or what the kernel did wrong. Shared memory is full of NaN before each block: what a block
// has not written it must not use.
EXPORTED const char* emulate(const KERNEL_PARAMS* params, int grid_x, int grid_y, int is_descending) {
  std::memset(shared_memory, 0xff, sizeof(shared_memory));
  emulator::shared_base = reinterpret_cast<char*>(shared_memory);
  emulator::shared_bytes = DYNAMIC_SHARED_BYTES;
  emulator::chance.seed(1 + is_descending);
  emulator::on_start = emulator::start_block;
  emulator::on_idle = emulator::deliver_any;
  emulator::on_grid_ended = emulator::end_grid_before;
  emulator::on_end = emulator::end_block;
  if (_setjmp(emulator::after_failure) != 0) {
    emulator::regions.clear();
    return emulator::failure.c_str();
  }
  emulator::launch(grid_x, grid_y, is_descending != 0, [params] { KERNEL_SYMBOL(*params); });
  const unsigned char* end = reinterpret_cast<unsigned char*>(shared_memory) + DYNAMIC_SHARED_BYTES;
  if (end[0] != 0xff || end[15] != 0xff) emulator::fail("written beyond the dynamic shared memory");
  emulator::regions.clear();
  return nullptr;
}
