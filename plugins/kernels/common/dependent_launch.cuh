// Programmatic dependent launch (since 9.0): a kernel may start while the one before it in the stream still runs.
//
// Launched as our kernels are, a kernel starts when every thread block of the one before has called let_next_start()
// or has ended. Its blocks then take their places, and wait_for_previous() holds them until the kernel before has
// finished and all that it wrote is visible. What our kernels must keep to:
// - Every block calls wait_for_previous(), on every path: the next kernel waits for this one alone, so if this one
//   could end before the one before it has, the order of the stream would be lost.
// - Before wait_for_previous() nothing is written, and no tensor is read: lengths, slots and weights may have been
//   written by whatever ran just before, a kernel that is not ours included, and that a kernel's blocks have ended
//   does not make their stores visible. Reading `params`, setting up shared memory and prefetches into L2, where later
//   stores arrive as well, are safe. What to prefetch may be guessed from lengths and slots as they stand, read past
//   the L1 cache, as long as any value of them gives addresses within the tensors.
// - let_next_start() comes after wait_for_previous(). So beside a kernel of ours that has not waited yet there runs
//   one kernel of ours at most; whatever came before that has finished and is visible.
// Below 9.0 both do nothing, and kernels are launched without the attribute (compile_image.has_dependent_launch).
#pragma once

namespace replay {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
__device__ inline void wait_for_previous() {}
__device__ inline void let_next_start() {}
#endif

}  // namespace replay
