// Memory of all threads in one allocation, made before any of them starts: running out is then an exception in the
// caller. Parts are page-aligned, so that threads never share a cache line.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace weft {

class ThreadScratch {
 public:
  ThreadScratch(int64_t floats, int threads) : floats_((floats + 1023) / 1024 * 1024) {
    memory_.reset(static_cast<float*>(std::aligned_alloc(4096, floats_ * threads * sizeof(float))));
    if (!memory_) throw std::bad_alloc();
  }
  // The part of one more thread: each calls this once.
  float* take() { return memory_.get() + taken_.fetch_add(1, std::memory_order_relaxed) * floats_; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  int64_t floats_;
  std::unique_ptr<float, Free> memory_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace weft
