#include "pack.h"

#include "rows.h"

namespace weft {

namespace {

template <class Job>
void run(void (*body)(const Job&, int64_t, int64_t), const Job& job, int64_t rows, int threads) {
  if (rows == 0) return;
  for_rows(rows, threads, [] { return 0; }, [&](int64_t begin, int64_t end, int) { body(job, begin, end); });
}

}  // namespace

void gather(const Kernels& k, const Gather& job, int64_t rows, int threads) { run(k.gather_rows, job, rows, threads); }
void rotary(const Kernels& k, const Rotary& job, int64_t rows, int threads) { run(k.rotary_rows, job, rows, threads); }
void gate(const Kernels& k, const Gate& job, int64_t rows, int threads) { run(k.gate_rows, job, rows, threads); }

}  // namespace weft
