// The instructions of plugins/kernels/common/ptx.cuh in plain C++, for the emulator.
#pragma once
#include "under_way.h"

namespace replay {

struct alignas(16) Vector16 {
  uint32_t words[4];
};

namespace ptx {

inline float float_from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : 1024 + mantissa), max(exponent, 1) - 25);
  if (exponent == 31) value = mantissa == 0 ? INFINITY : NAN;
  return bits >> 15 ? -value : value;
}

inline uint16_t f16_from_float(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  const int exponent = magnitude == 0.0f ? -14 : max(std::ilogb(magnitude), -14);
  // Ties to even, the default rounding mode. A mantissa of 2048 carries into the exponent by itself.
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + mantissa));
}

inline uint16_t bf16_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

inline float reciprocal(float x) { return 1.0f / x; }

inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }

inline void make_opaque(uint32_t&) {}
inline void make_opaque(uint64_t&) {}
inline void make_opaque(uint16_t&) {}

inline void check_alignment(const void* pointer, int bytes = 16) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) {
    emulator::fail("a misaligned access of " + std::to_string(bytes) + " bytes");
  }
}

inline void issue_loads() {}

template <typename T>
inline T load(const T* source) {
  check_alignment(source, sizeof(T));
  return *source;
}

template <typename T>
inline void store(T* target, const T& value) {
  check_alignment(target, sizeof(T));
  *target = value;
}

inline void prefetch_line(const void* source) { emulator::check_region(source, 1); }

inline int load_from_l2(const int* source) { return *source; }

inline uint32_t increment_to(uint32_t* counter, uint32_t last) {
  const uint32_t before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}

// A shared address is the distance from the start of shared memory, which is aligned.
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::shared_base);
}

// The bytes arrive when the thread waits for its copies, or when a barrier tells of them, and not before.
inline void start_copy(void* shared_target, const void* source, int bytes) {
  check_alignment(shared_target, bytes);
  check_alignment(source, bytes);
  emulator::check_region(source, bytes);
  emulator::current().copies.push_back({shared_target, source, static_cast<size_t>(bytes)});
  emulator::poison(emulator::current().copies.back());
}

inline void copy_async(void* shared_target, const void* source) { start_copy(shared_target, source, 16); }

inline void copy_async(uint32_t shared_target, const void* source) {
  start_copy(emulator::shared_pointer(shared_target, 16), source, 16);
}

inline void copy_async_word(void* shared_target, const void* source) { start_copy(shared_target, source, 4); }

inline void copy_async_or_zero(uint32_t shared_target, const void* source, bool is_present) {
  if (is_present) {
    start_copy(emulator::shared_pointer(shared_target, 16), source, 16);
  } else {
    emulator::current().copies.push_back({emulator::shared_pointer(shared_target, 16), nullptr, 16});
    emulator::poison(emulator::current().copies.back());
  }
}

inline void wait_for_copies() {
  for (const emulator::Copy& copy : emulator::current().copies) emulator::finish(copy);
  emulator::current().copies.clear();
}

inline Vector16 load_streaming(const void* source) {
  check_alignment(source);
  Vector16 vector;
  std::memcpy(&vector, source, sizeof(vector));
  return vector;
}

inline void store_streaming(void* target, const Vector16& vector) {
  check_alignment(target);
  std::memcpy(target, &vector, sizeof(vector));
}

}  // namespace ptx
}  // namespace replay
