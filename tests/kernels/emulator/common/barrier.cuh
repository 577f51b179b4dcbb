// The instructions of plugins/kernels/common/barrier.cuh in plain C++, for the emulator.
#pragma once
#include "common/ptx.cuh"

namespace replay {
namespace ptx {

inline void barrier_init(uint32_t barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }

inline void fence_barrier_init() {}

inline void barrier_arrive(uint32_t barrier) { emulator::arrive(barrier); }

inline void barrier_expect(uint32_t barrier, uint32_t bytes) { emulator::arrive(barrier, bytes); }

inline void barrier_arrive_after_copies(uint32_t barrier) {
  emulator::Thread& thread = emulator::current();
  emulator::under_way.push_back({static_cast<int>(threadIdx.x), std::move(thread.copies), barrier, 0});
  thread.copies.clear();
}

inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulator::wait_for_phase(barrier, parity); }

inline void meet(int number, int num_threads) { emulator::meet(number, num_threads); }

inline bool barrier_has_ended(uint32_t barrier, uint32_t parity) {
  const bool has_ended = emulator::has_ended(barrier, parity);
  if (has_ended) emulator::wait_for_phase(barrier, parity);
  return has_ended;
}

inline uint64_t reading_policy() { return 0; }

inline void copy_bulk(uint32_t shared_target, const void* source, uint32_t bytes, uint32_t barrier, uint64_t) {
  if (bytes == 0 || bytes % 16 != 0) emulator::fail("a bulk copy that is not of whole pieces of 16 bytes");
  check_alignment(source);
  emulator::check_region(source, bytes);
  const emulator::Copy copy{emulator::shared_pointer(shared_target, bytes), source, bytes};
  check_alignment(copy.target);
  emulator::poison(copy);
  emulator::under_way.push_back({-1, {copy}, barrier, bytes});
}

inline void prefetch_bulk(const void* source, uint32_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) emulator::fail("a bulk prefetch that is not of whole pieces of 16 bytes");
  check_alignment(source);
  emulator::check_region(source, bytes);
}

}  // namespace ptx
}  // namespace replay
