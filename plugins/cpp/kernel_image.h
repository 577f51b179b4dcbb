// Reads a kernel image: compiled kernels and their launch table. The format: plugins/kernel_image.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace replayssm {

constexpr uint32_t kKernelImageVersion = 7;

// One launchable kernel for one architecture.
struct KernelEntry {
  std::string role;
  std::string symbol;
  int32_t compute_capability;  // 10 * major + minor
  bool is_exact;               // true: runs on that capability alone; false: also on later minors of the same major
  int32_t grid_x;
  int32_t block_x;
  int32_t dynamic_shared_bytes;
  std::size_t cubin_offset;
  std::size_t cubin_bytes;
  bool is_persistent;        // true: its grid is min(multiprocessors, rows * grid_x), 1, 1
  bool is_dependent_launch;  // true: launched with programmatic stream serialization, since 9.0
  int32_t rows_per_block;    // its grid has that many times fewer rows than the step
  int32_t most_blocks_per_multiprocessor;  // rows * grid_x of each up to which it is the faster way; 0: any number
};

// Immutable and shared: equal images of one process are one object, however many layers carry a copy.
class KernelImage {
 public:
  // Check every offset and value of an image and take a copy of it. Null with `error` set when it is not sound.
  static std::shared_ptr<const KernelImage> read(const void* data, std::size_t bytes, std::string& error);

  // The kernel of a role for a device: an exact one first, then the nearest earlier minor. Null when there is none.
  const KernelEntry* find(const char* role, int32_t compute_capability) const;

  // What the kernels were compiled for, in one line.
  const std::string& constants() const { return constants_; }

  // Does any kernel take its work from a counter?
  bool has_persistent() const;

  // The capabilities that the image was compiled for, as "8.0, 9.0".
  std::string capabilities() const;

  const std::vector<unsigned char>& bytes() const { return bytes_; }
  const std::vector<KernelEntry>& entries() const { return entries_; }

 private:
  bool parse(std::string& error);

  std::vector<unsigned char> bytes_;
  std::string constants_;
  std::vector<KernelEntry> entries_;
};

// "9.0" for 90.
std::string capability_text(int32_t compute_capability);

}  // namespace replayssm
