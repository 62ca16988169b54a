// Writes the keys and values of new tokens into a cache.
#pragma once
#include <cstdint>

namespace weft {

// Row r of `from` has `heads` heads of head_bytes each, one after the other; head h goes to
// to + place[r] * head_bytes + h * to_head bytes.
struct StoreHeads {
  const char* from;
  int64_t from_row;
  char* to;
  int64_t to_head;
  const int64_t* place;
  int64_t heads, head_bytes;
};

void store_heads(const StoreHeads&, int64_t rows, int threads);

}  // namespace weft
