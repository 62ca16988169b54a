// Bindings. Buffers come as addresses: weft.kernels has checked dtype, shape, strides and device, and a
// DLPack capsule for each tensor would cost more than a small matmul. Every long call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "cpu.h"
#include "gemm.h"
#include "memory.h"
#include "sample.h"
#include "signal.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

const Kernels& kernels(const std::string& isa) {
  if (const Kernels* found = find_kernels(isa)) return *found;
  std::string names;
  for (const auto& name : available_isas()) names += " " + name;
  throw nb::value_error(("no kernels for instruction set '" + isa + "' here; this CPU runs:" + names).c_str());
}

// Runs Python's signal handlers, on its main thread; true where one raised, and its exception is set.
bool is_interrupted() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

int64_t call_linear(const Kernels& k, Address x, int64_t ld_x, Address packed, int dtype, int64_t m, int64_t n,
                    int64_t depth, Address bias, int activation, Address residual, int64_t ld_residual, Address pre,
                    int64_t ld_pre, Address out, int64_t ld_out, int threads, const Schedule& schedule) {
  const Epilogue epilogue{at<void>(bias), at<void>(pre),   ld_pre, at<void>(residual), ld_residual,
                          at<void>(out),  ld_out, static_cast<Activation>(activation)};
  const Tile whole{at<void>(x), ld_x, schedule.x_rows, at<void>(packed), static_cast<DType>(dtype), n, depth, 0, m, 0, n, epilogue};
  int64_t found;
  {
    nb::gil_scoped_release release;
    found = linear(k, Linear{whole, schedule, threads, is_interrupted});
  }
  if (found == kInterrupted) throw nb::python_error();
  return found;
}

}  // namespace

NB_MODULE(_core, m) {
  // Python keeps a table of kernels until the very end of the process, which is no leak: no warning.
  nb::set_leak_warnings(false);
  m.def("cpu_features", &cpu_features);
  m.def("available_isas", &available_isas, "Instruction sets that this CPU can run, fastest first.");
  m.def("parallel_backend", [] { return std::string(parallel_backend()); });

  nb::class_<Kernels>(m, "Kernels", "The kernels of one instruction set.")
      .def_prop_ro("name", [](const Kernels& k) { return std::string(k.name); })
      .def_prop_ro("panel", [](const Kernels& k) { return k.panel; })
      .def_prop_ro("strip", [](const Kernels& k) { return k.strip; });
  m.def("kernels", &kernels, nb::rv_policy::reference, "isa"_a = "");
  m.def("packed_elements", &packed_elements);
  m.def("pack", [](const Kernels& k, Address w, int64_t stride_n, int64_t stride_k, int dtype, int64_t n, int64_t depth,
                   int threads, Address packed) {
    nb::gil_scoped_release release;
    pack(k, at<void>(w), stride_n, stride_k, static_cast<DType>(dtype), n, depth, threads, at<void>(packed));
  });
  m.def("unpack", [](const Kernels& k, Address packed, int dtype, int64_t n, int64_t depth, int threads, Address w) {
    nb::gil_scoped_release release;
    unpack(k, at<void>(packed), static_cast<DType>(dtype), n, depth, threads, at<void>(w));
  });

  nb::class_<Schedule>(m, "Schedule", "Tile sizes, order, groups and signals of one call.")
      .def("__init__", [](Schedule* s) { new (s) Schedule{}; })
      .def("__init__", [](Schedule* s, int64_t tile_m, int64_t tile_n, Address order, Address group_of, Address group_size,
                          Address done, Address ready, int64_t ready_rows, int32_t ready_value, double timeout,
                          Address x_rows, Address tile_out, Address tile_ld) {
        new (s) Schedule{tile_m, tile_n, at<int32_t>(order), at<int32_t>(group_of), at<int32_t>(group_size),
                         at<int32_t>(done), at<int32_t>(ready), ready_rows, ready_value, timeout,
                         at<int64_t>(x_rows), at<int64_t>(tile_out), at<int64_t>(tile_ld)};
      });
  m.def("linear", &call_linear, "Returns -1, or the block of rows that was not ready in time.");
  m.def("fma_loop", &fma_loop, nb::call_guard<nb::gil_scoped_release>());

  m.def("sample", [](Address starts, Address bytes, int64_t count) {
    return sample(at<int64_t>(starts), at<int64_t>(bytes), count);
  });
  m.def("advise_huge", [](Address start, size_t bytes) { advise_huge(at<void>(start), bytes); });

  m.def("counter_add", [](Address counter, int32_t value) { counter_add(at<int32_t>(counter), value); });
  m.def("counter_read", [](Address counter) { return counter_read(at<int32_t>(counter)); });
  m.def("counter_wait", [](Address counter, int64_t target, double timeout) {
    nb::gil_scoped_release release;
    return counter_wait(at<int32_t>(counter), uint32_t(target), deadline_after(timeout));
  });
  m.def("counter_take", [](Address ready, int64_t target, double timeout, Address from, Address to, size_t bytes,
                           Address done) {
    nb::gil_scoped_release release;
    return counter_take(at<int32_t>(ready), uint32_t(target), deadline_after(timeout), at<void>(from), at<void>(to), bytes,
                        at<int32_t>(done));
  });
  bind_packed(m);
  bind_lab(m);
  bind_ranks(m);
}
