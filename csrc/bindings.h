// What the binding files share.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_packed(nanobind::module_&);
void bind_lab(nanobind::module_&);
void bind_ranks(nanobind::module_&);
