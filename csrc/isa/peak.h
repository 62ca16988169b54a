// What the machine gives at best: fused multiply-adds that wait for nothing.
#pragma once
#include "vector.h"

namespace weft {
namespace WEFT_ISA {

__attribute__((noinline)) double fma_flops(int64_t rounds) {
  constexpr int kChains = 12;  // enough to fill two pipes of latency 4 to 6
  vec sum[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sum[i] = splat(float(i));
  const vec a = splat(0.999f), b = splat(1e-3f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sum[i] = fma(sum[i], a, b);
      asm volatile("" : "+x"(sum[i]));  // keeps the loop as it is written
    }
  }
  return 2.0 * kChains * kLanes * double(rounds);
}

}  // namespace WEFT_ISA
}  // namespace weft
