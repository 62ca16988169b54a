// The bindings of what ranks exchange, and of the cache of keys and values; see bindings.cpp for how buffers are passed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "cache.h"
#include "exchange.h"
#include "signal.h"

namespace nb = nanobind;
using namespace weft;

namespace {

void make_exchange(Exchange* self, const std::vector<Address>& blocks, const std::vector<Address>& data,
                   int64_t bank_bytes, int me) {
  std::vector<ExchangeBlock*> control;
  std::vector<char*> banks;
  for (Address block : blocks) control.push_back(at<ExchangeBlock>(block));
  for (Address start : data) banks.push_back(at<char>(start));
  new (self) Exchange(std::move(control), std::move(banks), bank_bytes, me);
}

int64_t call_wait(const Exchange& e, uint32_t number, int64_t tag, double timeout) {
  nb::gil_scoped_release release;
  return e.wait(number, tag, deadline_after(timeout));
}

int64_t call_sum(const Exchange& e, const Kernels& kernels, uint32_t number, int64_t tag, double timeout, int dtype,
                 int64_t rows, int64_t width, Address bias, Address out, int64_t out_ld, int threads) {
  nb::gil_scoped_release release;
  return e.sum(kernels, number, tag, deadline_after(timeout), static_cast<DType>(dtype), rows, width, at<void>(bias),
               at<void>(out), out_ld, threads);
}

void call_store_heads(Address from, int64_t from_row, Address to, int64_t to_head, Address place, int64_t heads,
                      int64_t head_bytes, int64_t rows, int threads) {
  nb::gil_scoped_release release;
  store_heads({at<char>(from), from_row, at<char>(to), to_head, at<int64_t>(place), heads, head_bytes}, rows, threads);
}

}  // namespace

void bind_ranks(nb::module_& m) {
  m.attr("EXCHANGE_BANKS") = kBanks;
  m.attr("EXCHANGE_BLOCK_BYTES") = int64_t(sizeof(ExchangeBlock));
  nb::class_<Exchange>(m, "Exchange", "What the ranks of one host exchange through shared memory.")
      .def("__init__", &make_exchange)
      .def("bank", [](const Exchange& e, int64_t rank, uint32_t number) { return Address(e.bank(rank, number)); })
      .def("post", &Exchange::post)
      .def("wait", &call_wait, "-1, a rank that is late, or -2 - r for a rank r that does something else.")
      .def("sum", &call_sum, "As `wait`, and then adds up what all ranks posted.");
  m.def("store_heads", &call_store_heads);
}
