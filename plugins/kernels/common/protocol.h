// The predicates of the checkpoint-and-ring protocol; compiles as host C++ and as device code.
// The same functions in Python: trtllm_replayssm/contract/protocol.py (a test compares them exhaustively).
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define REPLAY_HOST_DEVICE __host__ __device__
#else
#define REPLAY_HOST_DEVICE
#endif

namespace replay {

// Most rows of a step: they are the y axis of the grid (CUDA programming guide).
constexpr int64_t MAX_ROWS = 65535;

// Is a window of seq_len tokens a prefill, which folds everything and leaves nothing pending? Else it is a step.
REPLAY_HOST_DEVICE inline bool is_prefill(int64_t seq_len, int max_draft_len) {
  return seq_len > 1 + static_cast<int64_t>(max_draft_len);
}

// Committed tokens c = past_length, folded tokens f = checkpoint_length: fold the rows [f, c) before the window?
REPLAY_HOST_DEVICE inline bool needs_flush(int past_length, int checkpoint_length, int history, int max_draft_len) {
  return past_length - checkpoint_length + 1 + max_draft_len > history;
}

// The ring row of the token at an absolute position, which is not negative: unsigned division takes half as long.
REPLAY_HOST_DEVICE inline int ring_row(int position, int ring_rows) {
  return static_cast<int>(static_cast<uint32_t>(position) % static_cast<uint32_t>(ring_rows));
}

}  // namespace replay
