// Every PTX instruction that all kernels use by name. Those for some GPUs alone: barrier.cuh, mma.cuh. Nothing else in
// the sources is bound to a GPU's instruction set.
#pragma once
#include <cstdint>

namespace replay {

// 16 bytes: the widest access of one thread.
struct alignas(16) Vector16 {
  uint32_t words[4];
};

namespace ptx {

__device__ inline float float_from_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Round to nearest even; beyond the largest float16 the result is infinite.
__device__ inline uint16_t f16_from_float(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Round to nearest even.
__device__ inline uint16_t bf16_from_float(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// 2^x and 1/x as the hardware has them, to about 2^-22 of the result; subnormal results are zero.
__device__ inline float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / sqrt(x), to about 2^-22 of the result.
__device__ inline float rsqrt(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Make a value look new to the compiler, so that what it makes of it is not kept in registers from loop to loop.
__device__ inline void make_opaque(uint32_t& word) { asm volatile("" : "+r"(word)); }
__device__ inline void make_opaque(uint64_t& word) { asm volatile("" : "+l"(word)); }
__device__ inline void make_opaque(uint16_t& word) { asm volatile("" : "+h"(word)); }

// Loads before it are under way before loads after it: without, the compiler puts a load where it is first needed.
__device__ inline void issue_loads() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// One access of a whole T of 2, 4, 8 or 16 bytes, where the program has it: the compiler neither splits it nor lets it
// wait for the result of an earlier one.
template <typename T>
__device__ inline T load(const T* source) {
  static_assert(alignof(T) == sizeof(T), "the address must be a multiple of the access");
  uint32_t words[4];
  T value;
  if constexpr (sizeof(T) == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(source));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(source));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(source));
  } else {
    uint16_t bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(source));
    words[0] = bits;
  }
  memcpy(&value, words, sizeof(T));
  return value;
}

template <typename T>
__device__ inline void store(T* target, const T& value) {
  static_assert(alignof(T) == sizeof(T), "the address must be a multiple of the access");
  uint32_t words[4] = {};
  memcpy(words, &value, sizeof(T));
  if constexpr (sizeof(T) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(words[0]), "r"(words[1]) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(words[0]) : "memory");
  } else {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(target), "h"(static_cast<uint16_t>(words[0])) : "memory");
  }
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Start copying 16 bytes to shared memory; they are there after wait_for_copies() and a barrier.
__device__ inline void copy_async(uint32_t shared_target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_target), "l"(source) : "memory");
}

__device__ inline void copy_async(void* shared_target, const void* source) {
  copy_async(shared_address(shared_target), source);
}

// The same; zeros, and no byte is read, unless `is_present`.
__device__ inline void copy_async_or_zero(uint32_t shared_target, const void* source, bool is_present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_target), "l"(source),
               "r"(is_present ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ inline void copy_async_word(void* shared_target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared_target)), "l"(source)
               : "memory");
}

// Bring the 128 bytes around an address to the L2 cache; nothing waits for them.
__device__ inline void prefetch_line(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// Past the L1 cache, which would keep the value from the load that comes after it is written.
__device__ inline int load_from_l2(const int* source) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// The number that stood there, which grows by 1, or from `last` to 0: of all threads that do so each gets another one.
__device__ inline uint32_t increment_to(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// Wait for the copies that this thread has started. A barrier must follow before other threads read them.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The checkpoint is read once and written once per step: mark it first in line for eviction.
__device__ inline Vector16 load_streaming(const void* source) {
  Vector16 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(source));
  return v;
}

__device__ inline void store_streaming(void* target, const Vector16& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.words[0]), "r"(v.words[1]),
               "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}

}  // namespace ptx
}  // namespace replay
