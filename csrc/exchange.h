// What the ranks of one host exchange through memory that all of them map: each has a control block and as many banks of
// data. A rank fills a bank, posts it, waits until all others have posted theirs, and reads them.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace weft {

constexpr int kBanks = 4;

// In shared memory. Exchanges are numbered from 1; `posted` is the last one that the rank has filled its bank for, and
// tag[bank] says what the exchange is, so that ranks that do different things notice.
struct ExchangeBlock {
  alignas(64) int32_t posted;
  alignas(64) int64_t tag[kBanks];
};

constexpr int64_t kAllHere = -1;

// Exchange number e uses bank e % kBanks. A rank may post e + 1 before it reads e, but reads e before it posts e + 2. So
// whoever has posted e + 2 is done with e, and a rank that has read e + 2 may fill the bank of e again, for e + 4.
class Exchange {
 public:
  Exchange(std::vector<ExchangeBlock*> blocks, std::vector<char*> data, int64_t bank_bytes, int me)
      : blocks_(std::move(blocks)), data_(std::move(data)), bank_bytes_(bank_bytes), me_(me) {}

  char* bank(int64_t rank, uint32_t number) const { return data_[rank] + number % kBanks * bank_bytes_; }
  int64_t ranks() const { return int64_t(blocks_.size()); }

  void post(uint32_t number, int64_t tag) const;

  // kAllHere; a rank that has not posted in time; or -2 - r for a rank r whose tag is another one.
  int64_t wait(uint32_t number, int64_t tag, int64_t deadline_ns) const;

  // Waits, and adds up [rows, width] of all ranks in their order, + bias.
  int64_t sum(const Kernels&, uint32_t number, int64_t tag, int64_t deadline_ns, DType, int64_t rows, int64_t width,
              const void* bias, void* out, int64_t out_ld, int threads) const;

 private:
  std::vector<ExchangeBlock*> blocks_;
  std::vector<char*> data_;
  int64_t bank_bytes_;
  int me_;
};

}  // namespace weft
