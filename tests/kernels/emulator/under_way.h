// What goes on beside the threads of a block: copies under way, the barriers they report to, and the kernel before.
//
// A copy arrives as late as it can: when no thread can go on, one of those under way, by chance. Its target is NaN from
// its start on, so who reads too early, or starts a copy to what others still read, is found out.
#pragma once
#include <random>

#include "host_cuda.h"

namespace emulator {

// Memory that the kernel may read; `stale` is what stands there until the kernel before this one has ended, or null.
struct Region {
  char* begin;
  size_t bytes;
  const char* stale;
  std::vector<char> fresh;
};

struct Barrier {
  uint32_t address;
  int count, pending;
  int64_t bytes = 0;    // announced and not yet arrived
  int64_t phase = 0;    // the one that has not ended
  std::vector<int64_t> seen = std::vector<int64_t>(BLOCK_THREADS, -2);  // by each thread: the last phase it waited for
};

// Copies that one thread has started and, when they have arrived, a barrier to tell: of the bytes, or of an arrival.
struct UnderWay {
  int owner;  // -1: the copy engine, which keeps no order
  std::vector<Copy> copies;
  uint32_t barrier;
  int64_t bytes;  // 0: tell of an arrival
};

static std::vector<Region> regions;
static std::vector<Barrier> barriers;
static std::vector<UnderWay> under_way;
static std::minstd_rand chance;
static size_t shared_bytes;
constexpr uint64_t BARRIER_MARK = 0x6261727269657221;  // stands in shared memory where a barrier is

inline char* shared_pointer(uint32_t address, size_t bytes) {
  if (address + bytes > shared_bytes) fail("an address beyond the dynamic shared memory");
  return shared_base + address;
}

// Of a copy or prefetch: does all of it, in whole words, lie in one tensor?
inline void check_region(const void* source, size_t bytes) {
  if (regions.empty()) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(source);
  for (const Region& region : regions) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(region.begin);
    if (begin / 4 * 4 <= first && first + bytes <= (begin + region.bytes + 3) / 4 * 4) return;
  }
  fail("a copy or a prefetch of memory outside of every tensor");
}

inline Barrier& find_barrier(uint32_t address) {
  for (Barrier& barrier : barriers) {
    if (barrier.address != address) continue;
    if (std::memcmp(shared_pointer(address, 8), &BARRIER_MARK, 8) != 0) fail("a barrier was overwritten");
    return barrier;
  }
  fail("a barrier that nobody has initialised");
}

inline void init_barrier(uint32_t address, int count) {
  if (address % 8 != 0) fail("a misaligned barrier");
  std::memcpy(shared_pointer(address, 8), &BARRIER_MARK, 8);
  barriers.push_back({address, count, count});
}

inline void end_phase_if_due(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
}

inline void arrive(uint32_t address, int64_t bytes = 0) {
  Barrier& barrier = find_barrier(address);
  if (barrier.pending == 0) fail("more arrivals at a barrier than it counts");
  barrier.bytes += bytes;
  --barrier.pending;
  end_phase_if_due(barrier);
}

inline bool has_ended(uint32_t address, uint32_t parity) { return ((find_barrier(address).phase - 1) & 1) == parity; }

inline void wait_for_phase(uint32_t address, uint32_t parity) {
  if (!current().has_met_others) fail("a wait before the thread can know that barriers are initialised");
  if (!has_ended(address, parity)) {
    Thread& thread = current();
    thread.is_ready = has_ended;
    thread.awaited[0] = address;
    thread.awaited[1] = parity;
    yield();
  }
  Barrier& barrier = find_barrier(address);
  int64_t& seen = barrier.seen[threadIdx.x];
  if (barrier.phase - 1 <= seen) fail("a wait ended with a phase that the thread had waited for before");
  seen = barrier.phase - 1;
}

// A numbered barrier of some of the block's threads.
struct Meeting {
  int num_come = 0;
  uint32_t num_held = 0;
};
static std::array<Meeting, 16> meetings;

inline bool is_held(uint32_t number, uint32_t num_held) { return meetings[number].num_held > num_held; }

inline void meet(int number, int num_threads) {
  if (number < 1 || number > 15 || num_threads % 32 != 0) fail("a numbered barrier that there is not");
  Meeting& meeting = meetings[number];
  if (++meeting.num_come == num_threads) {
    meeting.num_come = 0;
    ++meeting.num_held;
  } else {
    current().is_ready = is_held;
    current().awaited[0] = number;
    current().awaited[1] = meeting.num_held;
    yield();
  }
  current().has_met_others = true;
}

inline void poison(const Copy& copy) { std::memset(copy.target, 0xff, copy.bytes); }

inline void finish(const Copy& copy) {
  if (copy.source == nullptr) {
    std::memset(copy.target, 0, copy.bytes);
  } else {
    std::memcpy(copy.target, copy.source, copy.bytes);
  }
}

inline void deliver(size_t index) {
  const UnderWay delivered = std::move(under_way[index]);
  under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(index));
  for (const Copy& copy : delivered.copies) finish(copy);
  if (delivered.bytes == 0) return arrive(delivered.barrier);
  Barrier& barrier = find_barrier(delivered.barrier);
  barrier.bytes -= delivered.bytes;
  end_phase_if_due(barrier);
}

// Copies of one thread's own arrive in order; the barrier of later ones says that earlier ones have come too.
inline bool deliver_any() {
  if (under_way.empty()) return false;
  const int owner = under_way[chance() % under_way.size()].owner;
  std::vector<size_t> first;
  for (size_t i = 0; i < under_way.size() && (owner < 0 || first.empty()); ++i) {
    if (under_way[i].owner == owner) first.push_back(i);
  }
  deliver(first[chance() % first.size()]);
  return true;
}

inline void start_block() {
  std::memset(shared_base, 0xff, shared_bytes);
  barriers.clear();
  meetings = {};
  under_way.clear();
  for (Region& region : regions) {
    if (region.stale == nullptr) continue;
    region.fresh.assign(region.begin, region.begin + region.bytes);
    std::memcpy(region.begin, region.stale, region.bytes);
  }
}

inline void end_grid_before() {
  for (Region& region : regions) {
    if (region.stale != nullptr) std::memcpy(region.begin, region.fresh.data(), region.bytes);
  }
}

inline void end_block() {
  if (!under_way.empty()) fail("a block ended with copies under way");
}

}  // namespace emulator
