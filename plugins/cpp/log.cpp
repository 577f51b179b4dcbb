#include "log.h"

#include <atomic>
#include <cstdio>

#include "tensorrt_lookup.h"

namespace replayssm {
namespace {

using Severity = nvinfer1::ILogger::Severity;

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

void log(Severity severity, const char* word, const std::string& message) noexcept {
  try {
    const std::string line = "[trtllm_replayssm] " + message;
    if (!log_through_tensorrt(logger_finder.load(), severity, line.c_str())) {
      std::fprintf(stderr, "%s: %s\n", word, line.c_str());
    }
  } catch (...) {
    std::fprintf(stderr, "%s: [trtllm_replayssm] out of memory while reporting\n", word);
  }
}

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

void log_error(const std::string& message) noexcept { log(Severity::kERROR, "error", message); }

void log_warning(const std::string& message) noexcept { log(Severity::kWARNING, "warning", message); }

}  // namespace replayssm
