#include "gemm.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "scratch.h"
#include "signal.h"
#include "threads.h"

namespace weft {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

struct Shape {
  int64_t m, n;
};

// Tiles that fill the caches, cut smaller until every thread gets several, so that none is left waiting at the end.
Shape choose_tile(const Kernels& kernels, int64_t m, int64_t n, int threads) {
  Shape tile{std::min(m, kernels.max_tile_m), std::min(n, kernels.max_tile_n)};
  if (threads == 1) return tile;
  const int64_t wanted = 8 * threads;
  const auto tiles = [&] { return ceil_div(m, tile.m) * ceil_div(n, tile.n); };
  while (tiles() < wanted && tile.n > 4 * kernels.panel)
    tile.n = ceil_div(tile.n / 2, kernels.panel) * kernels.panel;
  while (tiles() < wanted && tile.m > 4 * kernels.strip)
    tile.m = ceil_div(tile.m / 2, kernels.strip) * kernels.strip;
  return tile;
}

// How one thread's part of the scratch is divided.
struct Parts {
  int64_t x, panel, sums;

  Parts(const Kernels& k, const Tile& t, const Shape& tile) {
    const int64_t rows = std::min(tile.m, k.max_tile_m), block = std::min(t.k, k.block_k);
    const int64_t cols = ceil_div(std::min(tile.n, k.max_tile_n), k.panel) * k.panel;
    const bool widened = t.dtype != DType::f32;
    x = pages(rows * k.block_ld);
    panel = pages(widened ? block * k.panel : 0);
    sums = pages(t.k > k.block_k ? rows * cols : 0);
  }
  int64_t floats() const { return x + panel + sums; }
  Scratch of(float* start) const { return {start, start + x, start + x + panel}; }

 private:
  static int64_t pages(int64_t floats) { return ceil_div(floats, 1024) * 1024; }
};

struct Walk {
  const Kernels& kernels;
  const Linear& linear;
  const Parts& parts;
  ThreadScratch& memory;
  Shape tile;
  int64_t cols, tiles;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> stopped{kAllReady};  // why: kInterrupted, or the block that did not come
  std::atomic<int32_t> begun{0};            // threads that have
  int32_t ended{0};                         // a counter to sleep on
  const std::thread::id caller = std::this_thread::get_id();

  bool is_stopped() const { return stopped.load(std::memory_order_relaxed) != kAllReady; }

  void stop(int64_t why) {
    int64_t none = kAllReady;
    stopped.compare_exchange_strong(none, why);
  }

  // Only the calling thread may ask, because Python handles signals there.
  void look_for_signals() {
    if (std::this_thread::get_id() == caller && linear.interrupted && linear.interrupted()) stop(kInterrupted);
  }

  bool wait_for_block(const int32_t* block) {
    const int64_t end = deadline_after(linear.schedule.timeout);
    for (;;) {
      const int64_t slice = std::min(end, deadline_after(kSliceSeconds));
      if (counter_wait(block, linear.schedule.ready_value, slice)) return true;
      if (slice == end) return false;
      look_for_signals();
      if (is_stopped()) return false;
    }
  }

  bool wait_for_rows(int64_t m0, int64_t m1) {
    const Schedule& s = linear.schedule;
    for (int64_t block = m0 / s.ready_rows; block * s.ready_rows < m1; ++block) {
      if (wait_for_block(s.ready + block)) continue;
      stop(block);
      return false;
    }
    return true;
  }

  // The calling thread is back first where another one waits for rows: it must not go deaf at the end of the region.
  // A thread that begins only now finds no tile left.
  void wait_for_others() {
    for (;;) {
      const int32_t others = begun.load() - 1;  // without this one
      if (counter_read(&ended) >= others) return;
      if (!counter_wait(&ended, others, deadline_after(kSliceSeconds))) look_for_signals();
    }
  }

  void run_and_listen() {
    begun.fetch_add(1);
    run();
    if (std::this_thread::get_id() == caller)
      wait_for_others();
    else
      counter_add(&ended, 1);
  }

  // A caller's tile may exceed what scratch and caches take: then it is computed in parts.
  void compute(const Tile& whole, const Scratch& scratch) {
    Tile part = whole;
    for (int64_t m = whole.m0; m < whole.m1; m += kernels.max_tile_m)
      for (int64_t n = whole.n0; n < whole.n1; n += kernels.max_tile_n) {
        part.m0 = m, part.m1 = std::min(m + kernels.max_tile_m, whole.m1);
        part.n0 = n, part.n1 = std::min(n + kernels.max_tile_n, whole.n1);
        kernels.tile(part, scratch);
      }
  }

  // The kernel addresses the output from the matrix's origin: put that where the tile falls on its own place.
  void place(Tile& one, int64_t t) const {
    const Schedule& s = linear.schedule;
    const int64_t size = one.dtype == DType::f32 ? sizeof(float) : sizeof(uint16_t);
    one.epilogue.ld_out = s.tile_ld[t];
    one.epilogue.out = reinterpret_cast<void*>(s.tile_out[t] - (one.m0 * s.tile_ld[t] + one.n0) * size);
  }

  void run() {
    const Schedule& s = linear.schedule;
    const Scratch scratch = parts.of(memory.take());
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles;) {
      const int64_t t = s.order ? s.order[i] : i;
      Tile one = linear.whole;
      one.m0 = t / cols * tile.m, one.m1 = std::min(one.m0 + tile.m, linear.whole.m1);
      one.n0 = t % cols * tile.n, one.n1 = std::min(one.n0 + tile.n, linear.whole.n1);
      if (s.tile_out) place(one, t);
      if (is_stopped()) return;
      if (s.ready && !wait_for_rows(one.m0, one.m1)) return;
      compute(one, scratch);
      if (s.done) counter_add(s.done + s.group_of[t], 1, s.group_size[s.group_of[t]]);
    }
  }
};

struct ByPanel {
  void (*body)(const ByPanel&, int64_t panel);
  const Kernels& kernels;
  const void* from;
  void* to;
  DType dtype;
  int64_t n, k, stride_n, stride_k;
  std::atomic<int64_t> next{0};

  void run(int threads) {
    parallel(threads, [](void* arg) {
      ByPanel& job = *static_cast<ByPanel*>(arg);
      const int64_t panels = ceil_div(job.n, job.kernels.panel);
      for (int64_t p; (p = job.next.fetch_add(1, std::memory_order_relaxed)) < panels;) job.body(job, p);
    }, this);
  }
};

}  // namespace

int64_t linear(const Kernels& kernels, const Linear& job) {
  const int64_t m = job.whole.m1, n = job.whole.n1;
  if (m == 0 || n == 0) return kAllReady;
  Shape tile = choose_tile(kernels, m, n, job.threads);
  if (job.schedule.tile_m > 0) tile = {job.schedule.tile_m, job.schedule.tile_n};
  const int64_t cols = ceil_div(n, tile.n), tiles = ceil_div(m, tile.m) * cols;
  const int threads = int(std::min<int64_t>(job.threads, tiles));
  const Parts parts(kernels, job.whole, tile);
  ThreadScratch memory(parts.floats(), threads);
  Walk walk{kernels, job, parts, memory, tile, cols, tiles};
  if (job.schedule.ready)
    parallel(threads, [](void* arg) { static_cast<Walk*>(arg)->run_and_listen(); }, &walk);
  else
    parallel(threads, [](void* arg) { static_cast<Walk*>(arg)->run(); }, &walk);
  return walk.stopped.load();
}

int64_t packed_elements(const Kernels& kernels, int64_t n, int64_t k) {
  return ceil_div(n, kernels.panel) * kernels.panel * k;
}

void pack(const Kernels& kernels, const void* w, int64_t stride_n, int64_t stride_k, DType dtype, int64_t n, int64_t k,
          int threads, void* packed) {
  ByPanel job{[](const ByPanel& j, int64_t p) {
                j.kernels.pack(j.from, j.stride_n, j.stride_k, j.dtype, j.n, j.k, p, j.to);
              },
              kernels, w, packed, dtype, n, k, stride_n, stride_k};
  job.run(threads);
}

void unpack(const Kernels& kernels, const void* packed, DType dtype, int64_t n, int64_t k, int threads, void* w) {
  ByPanel job{[](const ByPanel& j, int64_t p) { j.kernels.unpack(j.from, j.dtype, j.n, j.k, p, j.to); },
              kernels, packed, w, dtype, n, k, 0, 0};
  job.run(threads);
}

double fma_loop(const Kernels& kernels, int threads, int64_t rounds) {
  struct Job {
    const Kernels& kernels;
    int64_t rounds;
    std::atomic<double> flops{0};
  } job{kernels, rounds};
  parallel(threads, [](void* arg) {
    Job& j = *static_cast<Job*>(arg);
    j.flops.fetch_add(j.kernels.fma_flops(j.rounds));
  }, &job);
  return job.flops.load();
}

}  // namespace weft
