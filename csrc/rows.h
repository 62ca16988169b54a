// Runs a body over rows on all threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "threads.h"

namespace weft {

constexpr int64_t kRowsAtOnce = 16;

// body(begin, end) for stretches that cover [0, rows); `enter` is called once on each thread and its result passed on.
template <class Enter, class Body>
void for_rows(int64_t rows, int threads, Enter enter, Body body) {
  struct Job {
    Enter& enter;
    Body& body;
    int64_t rows;
    std::atomic<int64_t> next{0};
  } job{enter, body, rows};
  const int64_t stretches = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  parallel(int(std::min<int64_t>(threads, stretches)), [](void* arg) {
    Job& j = *static_cast<Job*>(arg);
    auto mine = j.enter();
    for (int64_t r; (r = j.next.fetch_add(kRowsAtOnce, std::memory_order_relaxed)) < j.rows;)
      j.body(r, std::min(r + kRowsAtOnce, j.rows), mine);
  }, &job);
}

}  // namespace weft
