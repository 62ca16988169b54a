// Packed attention over all sequences and heads of a batch, forward and backward.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace weft {

// Sequence s has query tokens [cu_q[s], cu_q[s + 1]) and key tokens [cu_k[s], cu_k[s + 1]); or, where cu_k is null, the
// k_len[s] key tokens from k_start[s] on, which may lie anywhere: in a cache, with room behind them.
struct Sequences {
  const int32_t *cu_q, *cu_k;
  int64_t count;
  const int64_t *k_start = nullptr, *k_len = nullptr;
};

void attention(const Kernels&, const Attention&, const Sequences&, int threads);
void attention_grad(const Kernels&, const AttentionGrad&, const Sequences&, int threads);

}  // namespace weft
