// Layernorm and RMSNorm of rows, fused with what is added before them.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace weft {

void norm(const Kernels&, const Norm&, int64_t rows, int threads);

}  // namespace weft
