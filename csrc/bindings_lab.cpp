// The bindings of the lab's DMA cards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "card.h"
#include "signal.h"

namespace nb = nanobind;
using namespace weft;

namespace {

// Waits without the interpreter. A signal's handler runs in between, and may raise.
std::tuple<uint32_t, uint32_t, uint64_t> call_wait(Card& card, const Handle& handle, double timeout) {
  const int64_t deadline = deadline_after(timeout);
  for (;;) {
    Outcome outcome;
    {
      nb::gil_scoped_release release;
      outcome = card.wait(handle, deadline);
    }
    if (outcome.fault != Fault::kSignal) return {uint32_t(outcome.fault), outcome.source, outcome.theirs};
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace

void bind_lab(nb::module_& m) {
  m.attr("WIRE_ANYBODY") = kNobody;
  m.def("make_wire", &make_wire);
  m.def("why_unreadable", &why_unreadable, "Why this process may not read the memory of another; \"\" where it may.");
  nb::class_<Handle>(m, "CardMessage", "A message that was posted, as its owner knows it.");
  nb::class_<Card>(m, "Card", "This rank's part of a lab's wire.")
      .def(nb::init<int, uint32_t>())
      .def_prop_ro("reads_memory", &Card::reads_memory)
      .def("open", &Card::open)
      .def("watch", &Card::watch)
      .def("host_of", &Card::host_of)
      .def("carried", &Card::carried, "Bytes that this host's card has sent, and received.")
      .def("close", &Card::close)
      .def("give_up", &Card::give_up)
      .def("send", &Card::send, nb::call_guard<nb::gil_scoped_release>())
      .def("receive", &Card::receive)
      .def("is_over", &Card::is_over)
      .def("wait", &call_wait, "(fault, sender's endpoint, bytes of the other side)");
}
