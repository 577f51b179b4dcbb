// Barriers in shared memory that count arrivals (since 8.0) and copied bytes, and the bulk copies that report to them
// (both since 9.0).
//
// A barrier's phase ends when all arrivals and all announced bytes have come; phases alternate in parity, from 0. Who
// waits for a parity must not fall two phases behind, or the wait sees a later phase of the same parity.
#pragma once
#include "common/ptx.cuh"

namespace replay {
namespace ptx {

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers known to the copy engine, where there is one; a thread block barrier must follow for the
// other threads.
__device__ inline void fence_barrier_init() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and let the phase wait for this many copied bytes too.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive when all of this thread's copy_async() so far have come. Counted at the barrier's initialisation.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Since 9.0 a thread that waits is put aside for some time; before, it asks again and again.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define REPLAY_MBARRIER_WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define REPLAY_MBARRIER_WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif

__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t" REPLAY_MBARRIER_WAIT " done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Wait until this many threads, whole warps, have come to the block's barrier of a number from 1 to 15; what they have
// written to shared memory is there then. Takes a sixth of the time that telling each other by two other barriers takes.
__device__ inline void meet(int number, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// Has the phase of a parity ended? For who has something to do before it waits.
__device__ inline bool barrier_has_ended(uint32_t barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, done;\n\t}"
      : "=r"(is_done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_done != 0;
}

// An L2 policy for what is read once, beside much that is written: it leaves what stands in the cache in its order.
// Marked to go first it would make the cache write in small pieces, between the reads.
__device__ inline uint64_t reading_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Start one copy to shared memory that reports to a barrier. Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(uint32_t shared_target, const void* source, uint32_t bytes, uint32_t barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Bring memory to the L2 cache; nothing waits for it. Address and bytes are multiples of 16.
__device__ inline void prefetch_bulk(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

}  // namespace ptx
}  // namespace replay
