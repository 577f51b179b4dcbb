// Copies of rows between global and shared memory by a whole thread block.
#pragma once
#include "common/types.cuh"

namespace replay {

// Are `pointer` and every address a multiple of `stride_bytes` after it aligned to ALIGNMENT bytes, a power of two?
template <int ALIGNMENT>
__device__ inline bool is_aligned(const void* pointer, int64_t stride_bytes) {
  return ((reinterpret_cast<uint64_t>(pointer) | static_cast<uint64_t>(stride_bytes)) & (ALIGNMENT - 1)) == 0;
}

// Start copying COUNT elements of each of num_rows rows to shared memory; wait_for_copies() and a barrier complete it.
// source_of(row) is the address of a row's first element. Rows that are not 16-byte aligned go element by element.
template <int COUNT, int TARGET_STRIDE, typename T, typename SourceOf>
__device__ inline void stage_rows(T* shared_target, int num_rows, bool is_aligned, SourceOf source_of) {
  if (is_aligned) {
    constexpr int VECTORS = COUNT / elements_per_vector<T>;
    // Not unrolled: the addresses of several copies would not fit beside the state in the registers.
#pragma unroll 1
    for (int i = threadIdx.x; i < num_rows * VECTORS; i += BLOCK_THREADS) {
      const int row = i / VECTORS, offset = i % VECTORS * elements_per_vector<T>;
      ptx::copy_async(shared_target + row * TARGET_STRIDE + offset, source_of(row) + offset);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_rows * COUNT; i += BLOCK_THREADS) {
      const int row = i / COUNT, offset = i % COUNT;
      shared_target[row * TARGET_STRIDE + offset] = source_of(row)[offset];
    }
  }
}

// Copy COUNT elements of each of num_rows rows from shared memory to 16-byte aligned rows of global memory.
template <int COUNT, int SOURCE_STRIDE, typename T, typename TargetOf>
__device__ inline void store_rows(const T* shared_source, int num_rows, TargetOf target_of) {
  constexpr int VECTORS = COUNT / elements_per_vector<T>;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * VECTORS; i += BLOCK_THREADS) {
    const int row = i / VECTORS, offset = i % VECTORS * elements_per_vector<T>;
    *reinterpret_cast<Vector16*>(target_of(row) + offset) =
        *reinterpret_cast<const Vector16*>(shared_source + row * SOURCE_STRIDE + offset);
  }
}

}  // namespace replay
