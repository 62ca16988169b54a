// Memory of all threads in one stretch, taken before any of them starts: running out is then an exception in the caller.
// Parts are page-aligned, so that threads never share a cache line. The calling thread keeps the memory for its next
// call, so that a model that runs again allocates nothing; a stretch beyond kKeptBytes goes back at once.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace weft {

constexpr int64_t kKeptBytes = 64 << 20;

// At most one stretch of a thread is in use at a time: no kernel calls another.
class KeptMemory {
 public:
  static KeptMemory& of_this_thread() {
    static thread_local KeptMemory kept;
    return kept;
  }

  float* take(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return memory_.get();
  }

  void give_back() {
    if (bytes_ > kKeptBytes) memory_.reset(), bytes_ = 0;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t bytes_ = 0;
};

class ThreadScratch {
 public:
  ThreadScratch(int64_t floats, int threads)
      : floats_((floats + 1023) / 1024 * 1024),
        kept_(KeptMemory::of_this_thread()),
        memory_(kept_.take(floats_ * threads * int64_t(sizeof(float)))) {}
  ~ThreadScratch() { kept_.give_back(); }
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;

  // The part of one more thread: each calls this once.
  float* take() { return memory_ + taken_.fetch_add(1, std::memory_order_relaxed) * floats_; }

 private:
  int64_t floats_;
  KeptMemory& kept_;
  float* memory_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace weft
