// One row of a step as every recurrence sees it: its slot, and its lengths by the protocol.
#pragma once
#include "common/protocol.h"

namespace replay {

struct StepRow {
  int index;       // row of the step
  int slot;        // -1: padding
  int past;        // committed tokens c
  int checkpoint;  // folded tokens f
  int pending;     // c - f
  int num_tokens;  // of the window

  // Lengths that break the protocol must not lead outside of shared memory, hence the clamps. All four loads are
  // unconditional, so that they are under way together.
  template <typename Params>
  __device__ StepRow(const Params& params, int row_index, int max_pending)
      : index(row_index),
        slot(params.slot_ids[index]),
        past(params.past_lengths[index]),
        checkpoint(params.checkpoint_lengths[index]),
        pending(max(0, min(past - checkpoint, max_pending))),
        num_tokens(max(0, min(params.num_tokens[index], params.seq_len))) {
    if (slot < 0) num_tokens = 0;
  }
};

}  // namespace replay
