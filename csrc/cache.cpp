#include "cache.h"

#include <cstring>

#include "rows.h"

namespace weft {

void store_heads(const StoreHeads& s, int64_t rows, int threads) {
  if (rows == 0) return;
  for_rows(rows, threads, [] { return 0; }, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < s.heads; ++h)
        std::memcpy(s.to + s.place[r] * s.head_bytes + h * s.to_head, s.from + r * s.from_row + h * s.head_bytes,
                    s.head_bytes);
  });
}

}  // namespace weft
