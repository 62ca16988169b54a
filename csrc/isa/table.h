// Fills the table of one instruction set.
#pragma once
#include "matmul.h"
#include "peak.h"

namespace weft {

constexpr Kernels make_kernels() {
  using namespace WEFT_ISA;
  return {kName, kPanel, kStrip, kBlockK, kBlockLd, kMaxTileM, kMaxTileN, tile, pack, unpack, fma_flops};
}

}  // namespace weft
