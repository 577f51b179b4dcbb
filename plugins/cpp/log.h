// Messages of the library: through TensorRT's logger, or to stderr where TensorRT gave none.
#pragma once

#include <sstream>
#include <string>

#include "NvInferRuntime.h"

namespace replayssm {

// Remember where TensorRT's logger is found; called through the exported setLoggerFinder. Null forgets it.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

void log_error(const std::string& message) noexcept;
void log_warning(const std::string& message) noexcept;

// Join values as an output stream prints them.
template <typename... Values>
std::string concat(const Values&... values) {
  std::ostringstream text;
  (text << ... << values);
  return text.str();
}

// Run `body`, which may throw (for want of memory, in practice), on behalf of a noexcept interface of TensorRT.
template <typename Result, typename Body>
Result guarded(const char* where, Result on_failure, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log_error(std::string(where) + ": " + error.what());
  } catch (...) {
    log_error(std::string(where) + ": unknown exception");
  }
  return on_failure;
}

}  // namespace replayssm
