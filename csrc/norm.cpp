#include "norm.h"

#include "rows.h"
#include "scratch.h"

namespace weft {

void norm(const Kernels& kernels, const Norm& job, int64_t rows, int threads) {
  constexpr int64_t kWidestVector = 16;  // the last vector of a row may overrun it
  if (rows == 0) return;
  ThreadScratch scratch(job.width + kWidestVector, threads);
  for_rows(rows, threads, [&] { return scratch.take(); },
           [&](int64_t begin, int64_t end, float* mine) { kernels.norm_rows(job, begin, end, mine); });
}

}  // namespace weft
