// Fills the table of one instruction set.
#pragma once
#include "attention_few.h"
#include "attention_grad.h"
#include "matmul.h"
#include "peak.h"
#include "rows.h"

namespace weft {
namespace WEFT_ISA {

constexpr Kernels make_kernels() {
  return {kName, kPanel, kStrip, kBlockK, kBlockLd, kMaxTileM, kMaxTileN, tile, pack, unpack, fma_flops,
          attention_queries, attention_scratch, attention, attention_few_scratch, attention_few, attention_grad_scratch, attention_grad,
          norm_rows, gather_rows, rotary_rows, gate_rows, sum_rows};
}

}  // namespace WEFT_ISA
}  // namespace weft
