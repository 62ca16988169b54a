#include "exchange.h"

#include "rows.h"
#include "signal.h"

namespace weft {

void Exchange::post(uint32_t number, int64_t tag) const {
  ExchangeBlock& mine = *blocks_[me_];
  mine.tag[number % kBanks] = tag;
  counter_add(&mine.posted, 1);  // release order: whoever sees it sees the bank and the tag
}

int64_t Exchange::wait(uint32_t number, int64_t tag, int64_t deadline_ns) const {
  for (int64_t r = 0; r < ranks(); ++r)
    if (r != me_ && !counter_reach(&blocks_[r]->posted, number, deadline_ns)) return r;
  for (int64_t r = 0; r < ranks(); ++r)
    if (blocks_[r]->tag[number % kBanks] != tag) return -2 - r;
  return kAllHere;
}

int64_t Exchange::sum(const Kernels& kernels, uint32_t number, int64_t tag, int64_t deadline_ns, DType dtype,
                      int64_t rows, int64_t width, const void* bias, void* out, int64_t out_ld, int threads) const {
  const int64_t here = wait(number, tag, deadline_ns);
  if (here != kAllHere || rows == 0) return here;
  static thread_local std::vector<int64_t> parts;
  parts.clear();
  for (int64_t r = 0; r < ranks(); ++r) parts.push_back(reinterpret_cast<int64_t>(bank(r, number)));
  const SumRows job{dtype, ranks(), parts.data(), width, bias, out, out_ld, width};
  for_rows(rows, threads, [] { return 0; }, [&](int64_t begin, int64_t end, int) { kernels.sum_rows(job, begin, end); });
  return here;
}

}  // namespace weft
