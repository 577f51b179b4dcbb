// 16-bit floating types as plain storage, their conversion to and from fp32, and 16-byte vectors of elements.
// No CUDA header is needed, so that NVRTC compiles the kernels wherever its library alone is installed.
#pragma once
#include "common/ptx.cuh"

namespace replay {

struct float16 {
  uint16_t bits;
};

struct bfloat16 {
  uint16_t bits;
};

__device__ inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(bfloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

__device__ inline float to_float(float16 value) { return ptx::float_from_f16(value.bits); }

// Round to nearest even, once.
template <typename T>
__device__ T from_float(float value);

template <>
__device__ inline float from_float<float>(float value) {
  return value;
}

template <>
__device__ inline bfloat16 from_float<bfloat16>(float value) {
  return {ptx::bf16_from_float(value)};
}

template <>
__device__ inline float16 from_float<float16>(float value) {
  return {ptx::f16_from_float(value)};
}

template <typename T>
constexpr int elements_per_vector = 16 / static_cast<int>(sizeof(T));

// Convert the elements of one 16-byte vector.
template <typename T>
__device__ inline void unpack(const Vector16& vector, float (&values)[elements_per_vector<T>]) {
  T elements[elements_per_vector<T>];
  memcpy(elements, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < elements_per_vector<T>; ++i) values[i] = to_float(elements[i]);
}

template <typename T>
__device__ inline Vector16 pack(const float (&values)[elements_per_vector<T>]) {
  T elements[elements_per_vector<T>];
#pragma unroll
  for (int i = 0; i < elements_per_vector<T>; ++i) elements[i] = from_float<T>(values[i]);
  Vector16 vector;
  memcpy(&vector, elements, sizeof(vector));
  return vector;
}

// Read COUNT consecutive elements as fp32; the address is a multiple of the access width.
template <int COUNT, typename T>
__device__ inline void load_as_float(const T* source, float (&values)[COUNT]) {
  constexpr int BYTES = COUNT * static_cast<int>(sizeof(T));
  struct alignas(BYTES < 16 ? BYTES : 16) Access {
    T elements[COUNT];
  };
  const Access access = *reinterpret_cast<const Access*>(source);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = to_float(access.elements[i]);
}

}  // namespace replay
