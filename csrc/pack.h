// What moves or changes rows one by one: pack, unpack and embeddings (gather), rotary positions, gates.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace weft {

void gather(const Kernels&, const Gather&, int64_t rows, int threads);
void rotary(const Kernels&, const Rotary&, int64_t rows, int threads);
void gate(const Kernels&, const Gate&, int64_t rows, int threads);

}  // namespace weft
