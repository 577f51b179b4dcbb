// What the plugins of recurrences have in common: the fields history and max_draft_len, and what follows from them.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "replay_plugin.h"

namespace replayssm {

enum RecurrenceField : std::size_t { kHistory, kMaxDraftLen };

// Their names, in that order.
std::vector<const char*> recurrence_fields();

// What is wrong with their values, or an empty string.
std::string recurrence_field_fault(const IntFields& fields);

// What is wrong with the number of ring rows, the dimension R; `ring` is the tensor that tells it. Or an empty string.
std::string ring_rows_fault(const char* ring, const Dimensions& dimensions, const IntFields& fields);

// The constants that all recurrences have, between those of their shapes and that of their gates.
std::string recurrence_constants(const IntFields& fields, nvinfer1::DataType activation, nvinfer1::DataType state);

// Do all of these start at multiples of 16 bytes?
bool are_in_pieces(std::initializer_list<const void*> pointers);

// The role of the kernel for a window. The pipelined step copies rows of some inputs, and the pools, in 16-byte pieces.
// Its images are for shapes whose rows are such pieces, so their addresses decide.
const char* recurrence_role(int64_t window_tokens, const IntFields& fields, std::initializer_list<const void*> in_pieces);

}  // namespace replayssm
