// linear(x, w): walks tiles in the caller's order, waits for input that is still arriving, signals groups of tiles.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace weft {

// The caller's wishes about tiles; every pointer may be null. Tile t covers rows [t / cols * tile_m, +tile_m) and
// columns [t % cols * tile_n, +tile_n), where cols = ceil(n / tile_n).
struct Schedule {
  int64_t tile_m, tile_n;      // 0: chosen here
  const int32_t* order;        // a permutation of the tiles
  const int32_t* group_of;     // tile -> group
  const int32_t* group_size;   // tiles in each group: sleepers are woken at multiples of it
  int32_t* done;               // one counter a group
  const int32_t* ready;        // one counter for each block of `ready_rows` rows of x
  int64_t ready_rows;
  int32_t ready_value;         // a tile starts when its blocks have reached this
  double timeout;              // seconds to wait for one block; a signal is heard within kSliceSeconds
  const int64_t* x_rows;       // the address of each row of x, when they do not lie a stride apart
  const int64_t* tile_out;     // the address of each tile's first element, when tiles do not lie in one matrix
  const int64_t* tile_ld;      // and the distance of its rows, in elements
};

struct Linear {
  Tile whole;  // m0 = n0 = 0, m1 = M, n1 = N
  Schedule schedule;
  int threads;
  bool (*interrupted)();  // asked on the calling thread while rows are waited for; true ends the call
};

constexpr int64_t kAllReady = -1, kInterrupted = -2;
constexpr double kSliceSeconds = 0.1;

// Returns kAllReady when all tiles were computed, kInterrupted, or the block of rows that did not become ready in time.
int64_t linear(const Kernels&, const Linear&);

int64_t packed_elements(const Kernels&, int64_t n, int64_t k);
void pack(const Kernels&, const void* w, int64_t stride_n, int64_t stride_k, DType, int64_t n, int64_t k, int threads,
          void* packed);
void unpack(const Kernels&, const void* packed, DType, int64_t n, int64_t k, int threads, void* w);

// Runs fused multiply-adds that wait for nothing on `threads` threads; returns how many flops that was.
double fma_loop(const Kernels&, int threads, int64_t rounds);

}  // namespace weft
