// Lengths of a row of the step, as they stand in memory and as a pipelined step works with them.
#pragma once
#include "common/protocol.h"
#include "common/ptx.cuh"

namespace replay {

// Lengths of one row of the step, clamped: lengths that break the protocol must not lead outside of shared memory or
// of a slot's rings.
struct RowLengths {
  int slot;  // -1: padding
  int checkpoint;
  int pending;
  int num_tokens;
  int first_pending_row;  // of the rings: where position `checkpoint` stands
  int first_window_row;   // of the rings: where the window goes

  __device__ bool is_flush() const { return needs_flush(pending, 0, HISTORY, MAX_DRAFT_LEN); }
  // By bits: branches would take longer.
  __device__ bool is_active() const { return (slot >= 0) & ((num_tokens > 0) | is_flush()); }
  // A checkpoint at position 0 is zero whatever the memory holds.
  __device__ bool has_state() const { return checkpoint > 0; }
  __device__ bool is_state_read() const { return is_active() && has_state(); }
  // Outputs see the token rows first() .. first() + live() + num_tokens - 1: a flush has put the pending ones into
  // the state. Without a flush the pending ones and a window are at most HISTORY.
  __device__ int first() const { return is_flush() ? pending : 0; }
  __device__ int live() const { return is_flush() ? 0 : pending; }
  // The window's first position; within 31 bits for lengths that break the protocol, too.
  __device__ int past() const {
    return static_cast<int>((static_cast<uint32_t>(checkpoint) + static_cast<uint32_t>(pending)) & 0x7fffffffu);
  }
};

// When lengths are read: after wait_for_previous(), or before it as a guess of what they will be.
enum class Reading { FINAL, GUESS };

// ring_row() of many positions: the division is done once, before anything is waited for.
struct RingRows {
  uint32_t num_rows, reciprocal;  // of 2^32, rounded down

  __device__ explicit RingRows(int ring_rows)
      : num_rows(static_cast<uint32_t>(ring_rows)), reciprocal(0xffffffffu / num_rows) {}

  __device__ int row_of(int position) const {
    const uint32_t place = static_cast<uint32_t>(position);
    // The quotient or one less, since positions are below 2^31.
    const uint32_t rest = place - __umulhi(place, reciprocal) * num_rows;
    return static_cast<int>(rest < num_rows ? rest : rest - num_rows);
  }
};

// Lengths and slot of one row as they stand in memory.
struct RawLengths {
  int slot, past, checkpoint, num_tokens;

  template <Reading READING, typename Params>
  __device__ static RawLengths read(const Params& params, int row) {
    if constexpr (READING == Reading::FINAL) {
      return {params.slot_ids[row], params.past_lengths[row], params.checkpoint_lengths[row], params.num_tokens[row]};
    }
    const int slot = ptx::load_from_l2(params.slot_ids + row);
    return {slot < params.num_slots ? slot : -1, ptx::load_from_l2(params.past_lengths + row),
            ptx::load_from_l2(params.checkpoint_lengths + row), ptx::load_from_l2(params.num_tokens + row)};
  }

  template <typename Params>
  __device__ RowLengths clamped(const Params& params, const RingRows& ring) const {
    RowLengths lengths;
    lengths.slot = slot;
    lengths.checkpoint = max(0, checkpoint);
    lengths.pending = max(0, min(past - checkpoint, HISTORY));
    lengths.num_tokens = slot < 0 ? 0 : max(0, min(num_tokens, min(params.seq_len, 1 + MAX_DRAFT_LEN)));
    lengths.first_pending_row = ring.row_of(max(0, checkpoint));
    lengths.first_window_row = ring.row_of(max(0, past));
    return lengths;
  }
};

}  // namespace replay
