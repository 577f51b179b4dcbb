#include "kernel_image.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>

#include "log.h"

namespace replayssm {
namespace {

constexpr char kMagic[8] = {'R', 'S', 'S', 'M', 'K', 'I', 'M', 'G'};
constexpr std::size_t kConstantsBytes = 256;
constexpr std::size_t kRoleBytes = 32;
constexpr std::size_t kSymbolBytes = 64;
constexpr int32_t kMaxThreadsPerBlock = 1024;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t entry_count;
  char constants[kConstantsBytes];
};

struct Record {
  char role[kRoleBytes];
  char symbol[kSymbolBytes];
  int32_t compute_capability;
  int32_t is_exact;
  int32_t grid_x;
  int32_t block_x;
  int32_t dynamic_shared_bytes;
  int32_t is_persistent;
  int32_t is_dependent_launch;
  int32_t rows_per_block;
  int32_t most_blocks_per_multiprocessor;
  int32_t padding;
  uint64_t cubin_offset;
  uint64_t cubin_bytes;
};

static_assert(sizeof(Header) == 272, "plugins/kernel_image.py packs the header in 272 bytes");
static_assert(sizeof(Record) == 152, "plugins/kernel_image.py packs an entry in 152 bytes");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel image is little-endian and is read in place"
#endif

template <std::size_t N>
std::string padded_text(const char (&text)[N]) {
  return std::string(text, strnlen(text, N));
}

// What is wrong with one entry's values, or an empty string.
std::string entry_fault(const KernelEntry& entry, std::size_t table_end, std::size_t image_bytes) {
  if (entry.role.empty() || entry.symbol.empty()) return "it has no role or no symbol";
  if (entry.compute_capability < 10) return concat("its compute capability is ", entry.compute_capability);
  if (entry.grid_x < 1) return concat("its grid_x is ", entry.grid_x);
  if (entry.rows_per_block < 1) return concat("its rows_per_block is ", entry.rows_per_block);
  if (entry.most_blocks_per_multiprocessor < 0) {
    return concat("its most_blocks_per_multiprocessor is ", entry.most_blocks_per_multiprocessor);
  }
  if (entry.block_x < 1 || entry.block_x > kMaxThreadsPerBlock) return concat("its block_x is ", entry.block_x);
  if (entry.dynamic_shared_bytes < 0) return concat("its dynamic_shared_bytes is ", entry.dynamic_shared_bytes);
  const bool is_inside = entry.cubin_offset >= table_end && entry.cubin_offset <= image_bytes &&
                         entry.cubin_bytes <= image_bytes - entry.cubin_offset;
  if (!is_inside || entry.cubin_bytes == 0) {
    return concat("its cubin of ", entry.cubin_bytes, " bytes at ", entry.cubin_offset, " is not inside the image's ",
                  image_bytes, " bytes");
  }
  return "";
}

// FNV-1a; only to find candidates, which are then compared byte by byte.
uint64_t content_hash(const unsigned char* data, std::size_t bytes) {
  uint64_t hash = 14695981039346656037ull;
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ data[i]) * 1099511628211ull;
  return hash;
}

// The images that some plugin holds. Never destroyed: plugins may outlive the library's static objects at exit.
struct LiveImages {
  std::mutex mutex;
  std::unordered_multimap<uint64_t, std::weak_ptr<const KernelImage>> by_hash;

  static LiveImages& instance() {
    static auto& images = *new LiveImages;
    return images;
  }

  // The live image of this content, or null; forgets those that died. The mutex is held.
  std::shared_ptr<const KernelImage> find(uint64_t hash, const unsigned char* data, std::size_t bytes) {
    auto [candidate, end] = by_hash.equal_range(hash);
    while (candidate != end) {
      std::shared_ptr<const KernelImage> live = candidate->second.lock();
      if (live != nullptr && live->bytes().size() == bytes && std::memcmp(live->bytes().data(), data, bytes) == 0) {
        return live;
      }
      candidate = live == nullptr ? by_hash.erase(candidate) : std::next(candidate);
    }
    return nullptr;
  }
};

}  // namespace

std::string capability_text(int32_t compute_capability) {
  return concat(compute_capability / 10, ".", compute_capability % 10);
}

std::shared_ptr<const KernelImage> KernelImage::read(const void* data, std::size_t bytes, std::string& error) {
  const auto* first = static_cast<const unsigned char*>(data);
  const uint64_t hash = content_hash(first, bytes);
  LiveImages& images = LiveImages::instance();
  const std::lock_guard<std::mutex> lock(images.mutex);
  if (std::shared_ptr<const KernelImage> live = images.find(hash, first, bytes)) return live;
  auto image = std::make_shared<KernelImage>();
  image->bytes_.assign(first, first + bytes);
  if (!image->parse(error)) return nullptr;
  images.by_hash.emplace(hash, image);
  return image;
}

bool KernelImage::parse(std::string& error) {
  Header header;
  if (bytes_.size() < sizeof(Header)) {
    error = concat("found ", bytes_.size(), " bytes; needed at least ", sizeof(Header));
    return false;
  }
  std::memcpy(&header, bytes_.data(), sizeof(Header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kKernelImageVersion) {
    error = concat("found ", bytes_.size(), " bytes that are no kernel image of version ", kKernelImageVersion,
                   "; build the engine again with the installed package");
    return false;
  }
  if (header.entry_count == 0 || (bytes_.size() - sizeof(Header)) / sizeof(Record) < header.entry_count) {
    error = concat("found ", header.entry_count, " entries in ", bytes_.size(), " bytes; needed 1 or more, all inside");
    return false;
  }
  constants_ = padded_text(header.constants);
  const std::size_t table_end = sizeof(Header) + sizeof(Record) * header.entry_count;
  std::set<std::tuple<std::string, int32_t, bool>> seen;
  for (uint32_t index = 0; index < header.entry_count; ++index) {
    Record record;
    std::memcpy(&record, bytes_.data() + sizeof(Header) + index * sizeof(Record), sizeof(Record));
    KernelEntry entry{padded_text(record.role),
                      padded_text(record.symbol),
                      record.compute_capability,
                      record.is_exact != 0,
                      record.grid_x,
                      record.block_x,
                      record.dynamic_shared_bytes,
                      static_cast<std::size_t>(record.cubin_offset),
                      static_cast<std::size_t>(record.cubin_bytes),
                      record.is_persistent != 0,
                      record.is_dependent_launch != 0,
                      record.rows_per_block,
                      record.most_blocks_per_multiprocessor};
    std::string fault = entry_fault(entry, table_end, bytes_.size());
    if (fault.empty() && !seen.insert({entry.role, entry.compute_capability, entry.is_exact}).second) {
      fault = concat("it is the second one of role \"", entry.role, "\" for the same architecture");
    }
    if (!fault.empty()) {
      error = concat("entry ", index, " of ", header.entry_count, " is not sound: ", fault);
      return false;
    }
    entries_.push_back(std::move(entry));
  }
  return true;
}

bool KernelImage::has_persistent() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const KernelEntry& entry) { return entry.is_persistent; });
}

const KernelEntry* KernelImage::find(const char* role, int32_t compute_capability) const {
  const KernelEntry* best = nullptr;
  for (const KernelEntry& entry : entries_) {
    if (entry.role != role) continue;
    if (entry.is_exact && entry.compute_capability == compute_capability) return &entry;
    const bool runs = !entry.is_exact && entry.compute_capability / 10 == compute_capability / 10 &&
                      entry.compute_capability <= compute_capability;
    if (runs && (best == nullptr || entry.compute_capability > best->compute_capability)) best = &entry;
  }
  return best;
}

std::string KernelImage::capabilities() const {
  std::set<int32_t> capabilities;
  for (const KernelEntry& entry : entries_) capabilities.insert(entry.compute_capability);
  std::string text;
  for (int32_t capability : capabilities) text += (text.empty() ? "" : ", ") + capability_text(capability);
  return text;
}

}  // namespace replayssm
