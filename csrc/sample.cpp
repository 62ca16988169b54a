#include "sample.h"

#include <algorithm>
#include <cstring>

namespace weft {
namespace {

constexpr int64_t kLine = 64, kLines = 8;

uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

uint64_t read(uint64_t h, const char* from, int64_t bytes) {
  for (; bytes > 0; from += 8, bytes -= 8) {
    uint64_t word = 0;
    std::memcpy(&word, from, std::min<int64_t>(8, bytes));
    h = mix(h, word);
  }
  return h;
}

uint64_t read_lines(uint64_t h, const char* from, int64_t bytes) {
  // One line in each eighth, not at equal distances: those could all fall into one column of a matrix.
  const int64_t part = bytes / kLines;
  for (int64_t i = 0; i < kLines; ++i) {
    const uint64_t place = mix(static_cast<uint64_t>(bytes), static_cast<uint64_t>(i + 1)) >> 16;
    h ^= read(static_cast<uint64_t>(i + 1), from + i * part + static_cast<int64_t>(place % (part - kLine + 1)), kLine);
    h = mix(h, static_cast<uint64_t>(i));
  }
  return h;
}

}  // namespace

uint64_t sample(const int64_t* starts, const int64_t* bytes, int64_t count) {
  uint64_t h = static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i) {
    const char* from = reinterpret_cast<const char*>(static_cast<uintptr_t>(starts[i]));
    h = bytes[i] <= kLine * kLines ? read(h, from, bytes[i]) : read_lines(h, from, bytes[i]);
  }
  return h;
}

}  // namespace weft
