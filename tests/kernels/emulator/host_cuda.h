// Just enough of CUDA C++ to run the kernels on a CPU, one thread block at a time: every CUDA thread is a coroutine.
//
// Coroutines switch only at barriers, shuffles and products, in ascending or descending order of their thread index. A
// result that depends on the order shows a missing barrier; copies that are not waited for never arrive (under_way.h).
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes)
#define __shared__

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
static Index3 threadIdx, blockIdx, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }

// The bytes of two words, low first, in the order that four digits name.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t order) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(bytes >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}

namespace emulator {

static jmp_buf after_failure;
static std::string failure;

// Give up the launch, from wherever it is. What coroutines hold is lost.
[[noreturn]] inline void fail(const std::string& message) {
  failure = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ": " + message;
  _longjmp(after_failure, 1);
}

struct Copy {
  void* target;
  const void* source;  // null: zeros
  size_t bytes = 16;
};

// What a thread shows to its warp: a shuffled number, or the operands of a product.
constexpr int MAX_SHOWN = 8;
using Shown = std::array<uint32_t, MAX_SHOWN>;

struct Thread {
  ucontext_t context;  // to start with
  jmp_buf place;       // to go on from
  bool has_started = false;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
  bool is_waiting_for_block = false, is_waiting_for_warp = false, is_waiting_for_grid = false;
  bool has_waited_for_grid = false;
  bool has_met_others = false;  // at a barrier of the block, or of some of its warps
  bool (*is_ready)(uint32_t, uint32_t) = nullptr;  // asked before the thread goes on, with what it waits for
  uint32_t awaited[2];
  unsigned num_shown = 0;
  Shown shown[2];
  std::vector<Copy> copies;
};

constexpr size_t STACK_BYTES = 128 * 1024;
static std::vector<Thread> threads(BLOCK_THREADS);
static char* shared_base;  // of dynamic shared memory
static ucontext_t scheduler_context;
static jmp_buf scheduler;
static std::function<void()> kernel;
// What goes on beside the threads: at the start of a block, when no thread can go on (is there any news then?), when
// the kernel before this one has ended, and when the block has.
static void (*on_start)() = [] {};
static bool (*on_idle)() = [] { return false; };
static void (*on_grid_ended)() = [] {};
static void (*on_end)() = [] {};

inline Thread& current() { return threads[threadIdx.x]; }

// By jumps, which are ten times as fast as swapcontext: that asks the operating system for signals each time.
inline void yield() {
  if (_setjmp(current().place) == 0) _longjmp(scheduler, 1);
}

inline void run_thread() {
  kernel();
  current().is_done = true;
  _longjmp(scheduler, 1);
}

inline void go_on(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.has_started) _longjmp(thread.place, 1);
  thread.has_started = true;
  swapcontext(&scheduler_context, &thread.context);
}

inline void start(Thread& thread) {
  thread.is_done = thread.is_waiting_for_block = thread.is_waiting_for_warp = false;
  thread.is_waiting_for_grid = thread.has_waited_for_grid = thread.has_met_others = false;
  thread.has_started = false;
  thread.is_ready = nullptr;
  thread.copies.clear();
  if (!thread.stack) thread.stack = std::make_unique<char[]>(STACK_BYTES);
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = STACK_BYTES;
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
  if (release(0, BLOCK_THREADS, &Thread::is_waiting_for_grid)) {
    on_grid_ended();
    is_any = true;
  }
  return is_any;
}

inline bool can_run(const Thread& thread) {
  if (thread.is_done || thread.is_waiting_for_block || thread.is_waiting_for_warp || thread.is_waiting_for_grid) {
    return false;
  }
  return thread.is_ready == nullptr || thread.is_ready(thread.awaited[0], thread.awaited[1]);
}

[[noreturn]] inline void report_deadlock() {
  std::string waiting;
  for (int i = 0; i < BLOCK_THREADS; i += 32) {
    const Thread& thread = threads[i];
    if (thread.is_done) continue;
    waiting += "; thread " + std::to_string(i) + " for ";
    if (thread.is_waiting_for_block) waiting += "the block";
    if (thread.is_waiting_for_warp) waiting += "its warp";
    if (thread.is_waiting_for_grid) waiting += "the kernel before";
    if (thread.is_ready != nullptr) {
      waiting += "parity " + std::to_string(thread.awaited[1]) + " at " + std::to_string(thread.awaited[0]);
    }
  }
  fail("deadlock, threads wait for what never comes" + waiting);
}

inline void run_block(bool is_descending) {
  for (Thread& thread : threads) start(thread);
  on_start();
  while (true) {
    bool has_run = false, is_all_done = true;
    for (int i = 0; i < BLOCK_THREADS; ++i) {
      threadIdx.x = is_descending ? BLOCK_THREADS - 1 - i : i;
      Thread& thread = current();
      is_all_done = is_all_done && thread.is_done;
      if (!can_run(thread)) continue;
      thread.is_ready = nullptr;
      go_on(thread);
      has_run = true;
    }
    if (is_all_done) break;
    if (!release_barriers() && !has_run && !on_idle()) report_deadlock();
  }
  on_end();
}

// Launch on a grid (grid_x, grid_y, 1), blocks in order.
inline void launch(int grid_x, int grid_y, bool is_descending, std::function<void()> body) {
  kernel = std::move(body);
  gridDim = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), 1};
  for (int y = 0; y < grid_y; ++y) {
    for (int x = 0; x < grid_x; ++x) {
      blockIdx = {static_cast<unsigned>(x), static_cast<unsigned>(y), 0};
      run_block(is_descending);
    }
  }
}

// Show words to the warp and wait for all of it; the result gives any lane's words. Two buffers by turns: a thread that
// is one exchange ahead does not disturb those that still read the last one.
struct Exchange {
  unsigned first_thread, buffer;

  explicit Exchange(const Shown& words) {
    Thread& thread = current();
    buffer = thread.num_shown++ % 2;
    thread.shown[buffer] = words;
    thread.is_waiting_for_warp = true;
    yield();
    first_thread = threadIdx.x - threadIdx.x % 32;
  }

  const Shown& of(unsigned lane) const { return threads[first_thread + lane].shown[buffer]; }
};

template <typename T>
inline T shuffle(unsigned mask, T value, unsigned source_lane) {
  static_assert(sizeof(T) == 4);
  if (mask != 0xffffffffu) fail("a shuffle of a part of a warp");
  Shown words = {};
  std::memcpy(&words[0], &value, sizeof(value));
  const Exchange exchange(words);
  std::memcpy(&value, &exchange.of(source_lane)[0], sizeof(value));
  return value;
}

}  // namespace emulator

inline void __syncthreads() {
  emulator::current().is_waiting_for_block = true;
  emulator::yield();
  emulator::current().has_met_others = true;
}

inline void __syncwarp() { emulator::Exchange({}); }

// Of groups of `width` lanes; lanes without a partner keep their own.
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return emulator::shuffle(mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(lane_mask));
}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::shuffle(mask, value, lane / width * width + static_cast<unsigned>(source) % width);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::shuffle(mask, value, lane % width >= delta ? lane - delta : lane);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, unsigned width = 32) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::shuffle(mask, value, lane % width + delta < width ? lane + delta : lane);
}

inline int __any_sync(unsigned mask, bool value) {
  if (mask != 0xffffffffu) emulator::fail("a vote of a part of a warp");
  emulator::Shown words = {};
  words[0] = value;
  const emulator::Exchange exchange(words);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (exchange.of(lane)[0] != 0) return 1;
  }
  return 0;
}
