#include "signal.h"

#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {

namespace {

std::atomic_ref<int32_t> word(const int32_t* counter) { return std::atomic_ref<int32_t>(*const_cast<int32_t*>(counter)); }

// Not FUTEX_PRIVATE: the word may lie in memory that several processes map.
long futex(const int32_t* counter, int op, int32_t value, const timespec* timeout) {
  return syscall(SYS_futex, counter, op, value, timeout, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Counters go round: one has reached a value when it is less than 2^31 ahead of it.
inline bool is_reached(int32_t seen, uint32_t target) { return int32_t(uint32_t(seen) - target) >= 0; }

// Long enough to catch a peer that is about to finish a tile, short enough not to take a core from one that computes.
constexpr int kSpins = 200;

// How long counter_reach stays awake: a sleeper is back 50 us after it was woken, as long as a whole exchange takes. It
// yields all the while, so that ranks that share a core get on.
constexpr int64_t kAwakeNs = 200'000;

// A sleeper re-reads the word at least this often, so a counter that was raised without a wake (a plain store by
// someone who maps the same memory) delays a waiter but never hangs it.
constexpr int64_t kMaxSleepNs = 20'000'000;

// Until the word is no longer `seen`, or the deadline has passed: false then.
bool sleep_on(const int32_t* counter, int32_t seen, int64_t deadline_ns) {
  const int64_t left = deadline_ns - steady_now_ns();
  if (left <= 0) return false;
  const int64_t nap = left < kMaxSleepNs ? left : kMaxSleepNs;
  const timespec timeout{nap / 1'000'000'000, nap % 1'000'000'000};
  futex(counter, FUTEX_WAIT, seen, &timeout);  // returns at once when the word is no longer `seen`
  return true;
}

}  // namespace

int64_t steady_now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

int64_t deadline_after(double seconds) {
  const double ns = seconds * 1e9;
  const int64_t now = steady_now_ns();
  return ns >= double(INT64_MAX - now) ? INT64_MAX : now + int64_t(ns);
}

void counter_add(int32_t* counter, int32_t value, int32_t wake_every) {
  // Added as unsigned numbers, which go round where the sum of signed ones is undefined.
  const uint32_t after = uint32_t(word(counter).fetch_add(value, std::memory_order_acq_rel)) + uint32_t(value);
  if (after % uint32_t(wake_every) == 0) futex(counter, FUTEX_WAKE, INT_MAX, nullptr);
}

int32_t counter_read(const int32_t* counter) { return word(counter).load(std::memory_order_acquire); }

bool counter_wait(const int32_t* counter, uint32_t target, int64_t deadline_ns) {
  for (int i = 0; i < kSpins; ++i) {
    if (is_reached(counter_read(counter), target)) return true;
    relax();
  }
  for (;;) {
    const int32_t seen = counter_read(counter);
    if (is_reached(seen, target)) return true;
    if (!sleep_on(counter, seen, deadline_ns)) return false;
  }
}

bool counter_reach(const int32_t* counter, uint32_t target, int64_t deadline_ns) {
  const int64_t start = steady_now_ns();
  do {
    for (int i = 0; i < kSpins; ++i) {
      if (is_reached(counter_read(counter), target)) return true;
      relax();
    }
    sched_yield();
  } while (steady_now_ns() - start < kAwakeNs);
  for (;;) {
    const int32_t seen = counter_read(counter);
    if (is_reached(seen, target)) return true;
    if (!sleep_on(counter, seen, deadline_ns)) return false;
  }
}

bool counter_take(const int32_t* ready, uint32_t target, int64_t deadline_ns, const void* from, void* to, size_t bytes,
                  int32_t* done) {
  if (!counter_wait(ready, target, deadline_ns)) return false;
  std::memcpy(to, from, bytes);
  counter_add(done, 1, 1);
  return true;
}

}  // namespace weft
