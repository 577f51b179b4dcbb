// The instructions of plugins/kernels/common/mma.cuh in plain C++, for the emulator; that file describes the operands.
#pragma once
#include "common/words.cuh"

namespace replay {

inline uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(ptx::bf16_from_float(high)) << 16 | ptx::bf16_from_float(low);
}

namespace ptx {

// Sums in fp32, one product after another. Tensor cores add in another order and truncate: only bounds can be compared.
inline void mma_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Exchange exchange({a[0], a[1], a[2], a[3], b0, b1});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row_half = i / 2, column = 2 * q + i % 2;
    for (unsigned k = 0; k < 16; k += 2) {
      const uint32_t left = exchange.of(g * 4 + k % 8 / 2)[row_half + k / 8 * 2];
      const uint32_t right = exchange.of(column * 4 + k % 8 / 2)[4 + k / 8];
      sums[i] += low_bf16(left) * low_bf16(right);
      sums[i] += high_bf16(left) * high_bf16(right);
    }
  }
}

// Of an operand the upper 19 bits count.
inline float tf32(uint32_t word) { return bits_to_float(word & 0xffffe000u); }

inline void mma_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Exchange exchange({a[0], a[1], a[2], a[3], b0, b1});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row_half = i / 2, column = 2 * q + i % 2;
    for (unsigned k = 0; k < 8; ++k) {
      const uint32_t left = exchange.of(g * 4 + k % 4)[row_half + k / 4 * 2];
      sums[i] += tf32(left) * tf32(exchange.of(column * 4 + k % 4)[4 + k / 4]);
    }
  }
}

inline const char* matrix_row(const emulator::Exchange& exchange, unsigned matrix, unsigned row) {
  return emulator::shared_pointer(exchange.of(matrix * 8 + row)[0], 16);
}

inline uint32_t element(const char* row, unsigned column) {
  uint16_t bits;
  std::memcpy(&bits, row + 2 * column, sizeof(bits));
  return bits;
}

inline void load_matrices(uint32_t (&words)[4], uint32_t row_address) {
  check_alignment(emulator::shared_base + row_address);
  const emulator::Exchange exchange({row_address});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const char* row = matrix_row(exchange, i, g);
    words[i] = element(row, 2 * q + 1) << 16 | element(row, 2 * q);
  }
}

inline void load_transposed(uint32_t (&words)[4], uint32_t row_address) {
  check_alignment(emulator::shared_base + row_address);
  const emulator::Exchange exchange({row_address});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (unsigned i = 0; i < 4; ++i) {
    words[i] = element(matrix_row(exchange, i, 2 * q + 1), g) << 16 | element(matrix_row(exchange, i, 2 * q), g);
  }
}

inline uint32_t transpose(uint32_t word) {
  const emulator::Exchange exchange({word});
  const unsigned g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, shift = g % 2 * 16;
  const uint32_t low = exchange.of(2 * q * 4 + g / 2)[0] >> shift, high = exchange.of((2 * q + 1) * 4 + g / 2)[0] >> shift;
  return high << 16 | (low & 0xffffu);
}

}  // namespace ptx
}  // namespace replay
