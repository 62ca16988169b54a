// Gradients of attention by recomputation: nothing of size queries x keys is ever stored.
//
//   P = 2^(S - lse)      dV = P^T dO      dP = dO V^T      dS = P (dP - delta)      delta = sum(dO * O)
//   dQ = scale dS K      dK = scale dS^T Q      dbias = sum of dS over equal distances
// With dropout, M being its mask over the share that stays:  dV = (M P)^T dO      dP = M (dO V^T)
//
// One item is a whole sequence and key head, walked in a fixed order: no two threads add to one sum, so that the bits
// of a sequence's gradients depend on nothing but the sequence. The layout is that of attention.h: S^T and dS^T have a
// row for each key and lanes of queries, here kGradQueries of them side by side.
#pragma once
#include "attention.h"

namespace weft {
namespace WEFT_ISA {

constexpr int64_t kGradQueries = 64;
constexpr int64_t kGradLd = kGradQueries + kPanel;  // not a power of two: see kBlockLd
static_assert(kGradQueries % kPanel == 0);

constexpr int64_t panels_in(int64_t width) { return (width + kPanel - 1) / kPanel; }

struct GradScratch {
  float *k, *v, *k_strips;                     // of a block of keys
  float *q_t, *do_t, *q_cols, *do_cols;        // of a block of queries: panels of queries, and panels of columns
  float *lse, *delta, *p, *ds, *line;
  float *dk, *dv;                              // [column panel][key][kPanel]
  float *dq;                                   // [head of the group][query panel][column][kPanel]

  GradScratch(float* at, int64_t width) {
    const auto take = [&](int64_t floats) { return (at += floats) - floats; };
    const int64_t columns = panels_in(width) * kPanel;
    k = take(kKeys * kKeyLd), v = take(kKeys * kKeyLd), k_strips = take(strips_in(width) * kValueStrip);
    q_t = take(kGradQueries * width), do_t = take(kGradQueries * width);
    q_cols = take(kGradQueries * columns), do_cols = take(kGradQueries * columns);
    lse = take(kGradQueries), delta = take(kGradQueries);
    p = take(kKeys * kGradLd), ds = take(kKeys * kGradLd), line = take(kKeys + 2 * kPanel);
    dk = take(kKeys * columns), dv = take(kKeys * columns);
    dq = at;
  }
};

int64_t attention_grad_scratch(int64_t head_dim, int64_t group, int64_t max_queries) {
  float* const zero = nullptr;
  const int64_t padded = (max_queries + kGradQueries - 1) / kGradQueries * kGradQueries;
  return GradScratch(zero, head_dim).dq - zero + group * padded * head_dim;
}

// Rows as panels of kPanel columns: element (i, c) at panel c / kPanel, [i][c % kPanel].
template <class T>
inline void load_columns(const T* from, int64_t ld, int64_t count, int64_t width, float* to) {
  for (int64_t c = 0; c < width; c += kLanes) {
    float* panel = to + c / kPanel * kGradQueries * kPanel + c % kPanel;
    for (int64_t i = 0; i < kGradQueries; ++i)
      store(panel + i * kPanel, i < count ? load_part(from + i * ld + c, width - c) : splat(0.0f));
  }
  if (width % kPanel == 0 || width % kPanel > kPanel - kLanes) return;
  float* last = to + width / kPanel * kGradQueries * kPanel;  // its unused vectors are multiplied too
  const int64_t used = (width % kPanel + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < kGradQueries; ++i)
    for (int64_t c = used; c < kPanel; c += kLanes) store(last + i * kPanel + c, splat(0.0f));
}

// One block of queries of one head, made ready for all panels.
template <class T>
inline void load_queries(const AttentionGrad& g, const AttentionItem& item, int64_t i0, int64_t count,
                         const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t row = item.q_start + i0, d = a.head_dim;
  const T* q = (const T*)a.q + row * a.q_row + item.head * a.q_head;
  const T* o = (const T*)a.out + row * a.out_row + item.head * a.out_head;
  const T* grad = (const T*)g.dout + row * g.dout_row + item.head * g.dout_head;
  for (int64_t i = 0; i < kGradQueries; i += kPanel) {
    const int64_t left = count - i < 0 ? 0 : (count - i < kPanel ? count - i : kPanel);
    load_transposed(q + i * a.q_row, a.q_row, left, d, a.scale * kLog2e, s.q_t + i * d);
    load_transposed(grad + i * g.dout_row, g.dout_row, left, d, 1.0f, s.do_t + i * d);
  }
  load_columns(q, a.q_row, count, d, s.q_cols);
  load_columns(grad, g.dout_row, count, d, s.do_cols);
  for (int64_t i = 0; i < kGradQueries; ++i) {
    vec sum = splat(0.0f);
    for (int64_t c = 0; i < count && c < d; c += kLanes)
      sum = fma(load_part(o + i * a.out_row + c, d - c), load_part(grad + i * g.dout_row + c, d - c), sum);
    s.delta[i] = 0.0f;
    for (int l = 0; l < kLanes; ++l) s.delta[i] += sum[l];
    s.lse[i] = i < count ? a.lse[item.head * a.total_q + row + i] : __builtin_inff();  // makes P and dS zero
  }
}

// The end of `recompute` with dropout: p becomes what dV needs, the weights that stayed, times their factor.
inline void recompute_dropped(const AttentionGrad& g, const AttentionItem& item, int64_t i0, Range block, int64_t panel,
                              const GradScratch& s) {
  const Attention& a = g.forward;
  const Dropped dropped(a, item.head, item.q_start + i0);
  for (int v = 0; v < kVectors; ++v) {
    const vec lse = load<vec>(s.lse + panel * kPanel + v * kLanes);
    const vec delta = load<vec>(s.delta + panel * kPanel + v * kLanes);
    for (int64_t j = 0; j < block.end - block.begin; ++j) {
      const int64_t at = j * kGradLd + panel * kPanel + v * kLanes;
      const vec prob = exp2(load<vec>(s.p + at) - lse);
      const vec kept = dropped.stays(a, v, block.begin + j) ? splat(a.kept_factor) : splat(0.0f);
      store(s.p + at, kept * prob);
      store(s.ds + at, prob * (kept * load<vec>(s.ds + at) - delta));
    }
  }
}

// P and dS of one panel of queries; keys outside of `keys` get zeros.
inline void recompute(const AttentionGrad& g, const AttentionItem& item, int64_t i0, int64_t count, Range block,
                      int64_t panel, const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t n = block.end - block.begin, d = a.head_dim;
  float *p = s.p + panel * kPanel, *ds = s.ds + panel * kPanel;
  strips<kKeyLd, 1, kPanel, kGradLd>(n, d, s.k, kStrip * kKeyLd, s.q_t + panel * kPanel * d, nullptr, p);
  adjust(a, item, i0, count, block, p, kGradLd, s.line);
  strips<kKeyLd, 1, kPanel, kGradLd>(n, d, s.v, kStrip * kKeyLd, s.do_t + panel * kPanel * d, nullptr, ds);
  if (a.drop_below) return recompute_dropped(g, item, i0, block, panel, s);
  for (int v = 0; v < kVectors; ++v) {
    const vec lse = load<vec>(s.lse + panel * kPanel + v * kLanes);
    const vec delta = load<vec>(s.delta + panel * kPanel + v * kLanes);
    for (int64_t j = 0; j < n; ++j) {
      float *pj = p + j * kGradLd + v * kLanes, *dj = ds + j * kGradLd + v * kLanes;
      const vec prob = exp2(load<vec>(pj) - lse);
      store(pj, prob);
      store(dj, prob * (load<vec>(dj) - delta));
    }
  }
}

// Adds dS of one panel to the gradient of the bias, by distance.
inline void add_bias_grad(const AttentionGrad& g, const AttentionItem& item, int64_t i0, Range block, int64_t panel,
                          const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t n = block.end - block.begin, first = i0 + item.k_len - item.q_len - (block.end - 1);
  for (int64_t t = 0; t < n + kPanel; t += kLanes) store(s.line + t, splat(0.0f));
  for (int64_t j = 0; j < n; ++j)
    for (int v = 0; v < kVectors; ++v) {
      float* at = s.line + (n - 1 - j) + v * kLanes;
      store(at, load<vec>(at) + load<vec>(s.ds + j * kGradLd + panel * kPanel + v * kLanes));
    }
  float* table = g.dbias + item.head * (2 * a.reach + 1) + a.reach;
  for (int64_t t = 0; t < n + kPanel - 1; ++t) {
    const int64_t ahead = first + t;
    table[ahead > a.reach ? -a.reach : (ahead < -a.reach ? a.reach : -ahead)] += s.line[t];
  }
}

// One block of queries of one head against one block of keys: adds to dq, dk and dv in scratch.
template <class T>
inline void grad_blocks(const AttentionGrad& g, const AttentionItem& item, int64_t i0, Range block, bool first,
                        float* dq, const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t left = item.q_len - i0, count = left < kGradQueries ? left : kGradQueries;
  const int64_t n = block.end - block.begin, d = a.head_dim, columns = panels_in(d);
  const int64_t panels = (count + kPanel - 1) / kPanel;
  load_queries<T>(g, item, i0, count, s);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t i = i0 + panel * kPanel, here = item.q_len - i < kPanel ? item.q_len - i : kPanel;
    recompute(g, item, i, here, block, panel, s);
    if (g.dbias) add_bias_grad(g, item, i, block, panel, s);
    float* const to = dq + i * d;
    strips<1, kStrip, kGradLd, kPanel>(d, n, s.k_strips, kValueStrip, s.ds + panel * kPanel, to, to);
  }
  for (int64_t c = 0; c < columns; ++c) {
    float *dk = s.dk + c * kKeys * kPanel, *dv = s.dv + c * kKeys * kPanel;
    const float *q = s.q_cols + c * kGradQueries * kPanel, *grad = s.do_cols + c * kGradQueries * kPanel;
    const int64_t k = panels * kPanel;
    strips<kGradLd, 1, kPanel, kPanel>(n, k, s.ds, kStrip * kGradLd, q, first ? nullptr : dk, dk);
    strips<kGradLd, 1, kPanel, kPanel>(n, k, s.p, kStrip * kGradLd, grad, first ? nullptr : dv, dv);
  }
}

template <class T>
inline void store_columns(const float* from, float factor, int64_t count, int64_t width, T* to, int64_t ld) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t c = 0; c < width; c += kLanes) {
      const vec v = load<vec>(from + (c / kPanel * kKeys + j) * kPanel + c % kPanel);
      store_part(to + j * ld + c, v * splat(factor), width - c);
    }
}

// One block of keys: its dk and dv from all queries of all heads of the group.
template <class T>
inline void grad_key_block(const AttentionGrad& g, AttentionItem item, int64_t kv_head, Range block, int64_t padded,
                           const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t n = block.end - block.begin, d = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t row = item.k_start + block.begin;
  const T* k = (const T*)a.k + row * a.k_row + kv_head * a.k_head;
  load_rows(k, a.k_row, n, d, s.k);
  load_strips(k, a.k_row, n, d, s.k_strips);
  load_rows((const T*)a.v + row * a.v_row + kv_head * a.v_head, a.v_row, n, d, s.v);
  bool first = true;
  for (int64_t member = 0; member < group; ++member) {
    item.head = kv_head * group + member;
    for (int64_t i = 0; i < item.q_len; i += kGradQueries) {
      const int64_t count = item.q_len - i < kGradQueries ? item.q_len - i : kGradQueries;
      const Range keys = panel_keys(a, item, i, count, block);
      if (keys.begin >= keys.end) continue;
      grad_blocks<T>(g, item, i, block, first, s.dq + member * padded * d, s);
      first = false;
    }
  }
  const int64_t floats = kKeys * panels_in(d) * kPanel;
  for (int64_t e = 0; first && e < floats; e += kLanes) store(s.dk + e, splat(0.0f)), store(s.dv + e, splat(0.0f));
  store_columns(s.dk, a.scale, n, d, (T*)g.dk + row * g.dk_row + kv_head * g.dk_head, g.dk_row);
  store_columns(s.dv, 1.0f, n, d, (T*)g.dv + row * g.dv_row + kv_head * g.dv_head, g.dv_row);
}

// item.head is the key head here.
template <class T>
inline void grad_item(const AttentionGrad& g, const AttentionItem& item, const GradScratch& s) {
  const Attention& a = g.forward;
  const int64_t d = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t padded = (item.q_len + kGradQueries - 1) / kGradQueries * kGradQueries;
  for (int64_t e = 0; e < group * padded * d; e += kLanes) store(s.dq + e, splat(0.0f));
  for (int64_t j = 0; j < item.k_len; j += kKeys)
    grad_key_block<T>(g, item, item.head, {j, item.k_len - j < kKeys ? item.k_len : j + kKeys}, padded, s);
  alignas(64) float scale[kPanel];
  for (float& value : scale) value = a.scale;
  for (int64_t member = 0; member < group; ++member) {
    T* dq = (T*)g.dq + item.q_start * g.dq_row + (item.head * group + member) * g.dq_head;
    for (int64_t i = 0; i < item.q_len; i += kPanel) {
      const int64_t count = item.q_len - i < kPanel ? item.q_len - i : kPanel;
      store_transposed(s.dq + (member * padded + i) * d, scale, count, d, dq + i * g.dq_row, g.dq_row);
    }
  }
}

void attention_grad(const AttentionGrad& g, const AttentionItem& item, float* scratch) {
  const GradScratch s(scratch, g.forward.head_dim);
  if (g.forward.dtype == DType::f32) return grad_item<float>(g, item, s);
  grad_item<uint16_t>(g, item, s);
}

}  // namespace WEFT_ISA
}  // namespace weft
