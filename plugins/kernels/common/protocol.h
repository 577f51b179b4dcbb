// The flush predicate of the checkpoint-and-ring protocol; compiles as host C++ and as device code.
// The same function in Python: trtllm_replayssm/contract/protocol.py (a test compares them exhaustively).
#pragma once

#ifdef __CUDACC__
#define REPLAY_HOST_DEVICE __host__ __device__
#else
#define REPLAY_HOST_DEVICE
#endif

namespace replay {

// Committed tokens c = past_length, folded tokens f = checkpoint_length: fold the rows [f, c) before the window?
REPLAY_HOST_DEVICE inline bool needs_flush(int past_length, int checkpoint_length, int history, int max_draft_len) {
  return past_length - checkpoint_length + 1 + max_draft_len > history;
}

// Tokens folded after a decode or verification step.
REPLAY_HOST_DEVICE inline int advance_checkpoint(int past_length, int checkpoint_length, int history,
                                                 int max_draft_len) {
  return needs_flush(past_length, checkpoint_length, history, max_draft_len) ? past_length : checkpoint_length;
}

// The ring row of the token at an absolute position.
REPLAY_HOST_DEVICE inline int ring_row(int position, int ring_rows) { return position % ring_rows; }

}  // namespace replay
