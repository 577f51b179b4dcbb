// Just enough of CUDA C++ to run the kernels on a CPU, one thread block at a time: every CUDA thread is a coroutine.
//
// Coroutines switch only at barriers and shuffles, in ascending or descending order of their thread index. A result
// that depends on the order shows a missing barrier; copies that are not waited for never arrive (common/ptx.cuh).
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
static Index3 threadIdx, blockIdx;

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

namespace emulator {

struct Copy {
  void* target;
  const void* source;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
  bool is_waiting_for_block = false, is_waiting_for_warp = false;
  unsigned n_shuffles = 0;
  float shuffled[2];
  std::vector<Copy> copies;
};

constexpr size_t STACK_BYTES = 128 * 1024;
static std::vector<Thread> threads(BLOCK_THREADS);
static ucontext_t scheduler;
static std::function<void()> kernel;

inline Thread& current() { return threads[threadIdx.x]; }

inline void yield() { swapcontext(&current().context, &scheduler); }

inline void run_thread() {
  kernel();
  current().is_done = true;
}

inline void start(Thread& thread) {
  thread.is_done = thread.is_waiting_for_block = thread.is_waiting_for_warp = false;
  thread.copies.clear();
  if (!thread.stack) thread.stack = std::make_unique<char[]>(STACK_BYTES);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = STACK_BYTES;
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, run_thread, 0);
}

// Let the threads [first, last) go on when all that still run have arrived. CUDA counts finished ones as arrived.
inline bool release(int first, int last, bool Thread::*flag) {
  for (int i = first; i < last; ++i) {
    if (!threads[i].is_done && !(threads[i].*flag)) return false;
  }
  bool is_any = false;
  for (int i = first; i < last; ++i) {
    is_any = is_any || threads[i].*flag;
    threads[i].*flag = false;
  }
  return is_any;
}

inline bool release_barriers() {
  bool is_any = release(0, BLOCK_THREADS, &Thread::is_waiting_for_block);
  for (int warp = 0; warp < BLOCK_THREADS; warp += 32) {
    is_any = release(warp, warp + 32, &Thread::is_waiting_for_warp) || is_any;
  }
  return is_any;
}

inline void run_block(bool is_descending) {
  for (Thread& thread : threads) start(thread);
  while (true) {
    bool has_run = false, is_all_done = true;
    for (int i = 0; i < BLOCK_THREADS; ++i) {
      threadIdx.x = is_descending ? BLOCK_THREADS - 1 - i : i;
      Thread& thread = current();
      is_all_done = is_all_done && thread.is_done;
      if (thread.is_done || thread.is_waiting_for_block || thread.is_waiting_for_warp) continue;
      swapcontext(&scheduler, &thread.context);
      has_run = true;
    }
    if (is_all_done) return;
    if (!release_barriers() && !has_run) {
      std::fprintf(stderr, "deadlock: some threads of a block wait at a barrier that others never reach\n");
      std::abort();
    }
  }
}

// Launch on a grid (grid_x, grid_y, 1), blocks in order.
inline void launch(int grid_x, int grid_y, bool is_descending, std::function<void()> body) {
  kernel = std::move(body);
  for (int y = 0; y < grid_y; ++y) {
    for (int x = 0; x < grid_x; ++x) {
      blockIdx = {static_cast<unsigned>(x), static_cast<unsigned>(y), 0};
      run_block(is_descending);
    }
  }
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::current().is_waiting_for_block = true;
  emulator::yield();
}

// Two buffers by turns: a thread that is one shuffle ahead does not disturb those that still read the last one.
inline float __shfl_xor_sync(unsigned mask, float value, int lane_mask) {
  if (mask != 0xffffffffu) std::abort();
  emulator::Thread& thread = emulator::current();
  const unsigned buffer = thread.n_shuffles++ % 2;
  thread.shuffled[buffer] = value;
  thread.is_waiting_for_warp = true;
  emulator::yield();
  const unsigned lane = threadIdx.x % 32;
  return emulator::threads[threadIdx.x - lane + (lane ^ static_cast<unsigned>(lane_mask))].shuffled[buffer];
}
