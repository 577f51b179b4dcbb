#include "recurrence.h"

#include <algorithm>
#include <cstdint>

#include "../kernels/common/protocol.h"
#include "log.h"

namespace replayssm {
namespace {

int64_t window_length(const IntFields& fields) { return 1 + static_cast<int64_t>(fields[kMaxDraftLen]); }

}  // namespace

std::vector<const char*> recurrence_fields() { return {"history", "max_draft_len"}; }

std::string recurrence_field_fault(const IntFields& fields) {
  const int32_t max_draft_len = fields[kMaxDraftLen];
  if (max_draft_len < 0) return concat("field max_draft_len: found ", max_draft_len, "; needed 0 or more");
  if (fields[kHistory] >= window_length(fields)) return "";
  return concat("field history: found ", fields[kHistory], " with max_draft_len = ", max_draft_len,
                "; needed at least ", window_length(fields), " (1 + max_draft_len)");
}

std::string ring_rows_fault(const char* ring, const Dimensions& dimensions, const IntFields& fields) {
  const int64_t rows = fields[kHistory] + window_length(fields);
  if (!dimensions.knows("R") || dimensions['R'] >= rows) return "";
  return concat(ring, ": found ", dimensions['R'], " rows with history = ", fields[kHistory], " and max_draft_len = ",
                fields[kMaxDraftLen], "; needed at least ", rows, " (history + 1 + max_draft_len)");
}

std::string recurrence_constants(const IntFields& fields, nvinfer1::DataType activation, nvinfer1::DataType state) {
  return concat("history=", fields[kHistory], " max_draft_len=", fields[kMaxDraftLen],
                " activation_dtype=", type_text(activation), " state_dtype=", type_text(state));
}

bool are_in_pieces(std::initializer_list<const void*> pointers) {
  constexpr uintptr_t kPieceBytes = 16;
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kPieceBytes == 0;
  });
}

const char* recurrence_role(int64_t window_tokens, const IntFields& fields,
                            std::initializer_list<const void*> in_pieces) {
  if (replay::is_prefill(window_tokens, fields[kMaxDraftLen])) return "prefill";
  return are_in_pieces(in_pieces) ? "pipelined_step" : "step";
}

}  // namespace replayssm
