// Attention of one block of queries of one head to all keys of its sequence, with an online softmax.
//
// Lanes are queries: the scores of a panel of queries are S^T = K Q^T, a row for each key. Maxima and sums over keys
// then run down the rows, lane by lane, and S^T is already the panel that O^T = V^T P^T multiplies by. Scores are kept
// in units of log 2, so that their exponential needs one multiplication less.
//
// Same bits: a lane never meets another, and blocks of keys start at multiples of kKeys of the sequence.
#pragma once
#include "dropout.h"

namespace weft {
namespace WEFT_ISA {

constexpr int64_t kKeys = 128 / kStrip * kStrip;  // keys at once: their scores stay in the first-level cache
constexpr int64_t kKeyLd = kBlockLd;              // distance of the rows of K
constexpr int64_t kMaxHead = 256;
constexpr float kLog2e = 1.44269504f;
static_assert(kMaxHead <= kKeyLd);

constexpr int64_t strips_in(int64_t width) { return (width + kStrip - 1) / kStrip; }
constexpr int64_t kValueStrip = kKeys * kStrip + kLanes;  // a store may overrun its strip by less than a vector

// Queries of one item: what keeps Q, O, K and V in the second-level cache.
int64_t attention_queries(int64_t head_dim) {
  const int64_t wanted = 16384 / head_dim;
  return (wanted < 256 ? (wanted > kPanel ? wanted : kPanel) : 256) / kPanel * kPanel;
}

// 2^x for x <= 0 and a little above: 0 below -126, NaN for NaN.
inline vec exp2(vec x) {
  const vec low = splat(-126.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vec clamped = x < low ? low : x;
  const vec shifted = clamped + magic;
  const vec f = clamped - (shifted - magic);
  static constexpr float c[] = {1.0f,          0.693147206f,  0.240226469f,  0.0555032878f,
                                0.00961848896f, 0.00133999312f, 0.00015345812f};
  // The low bits of `shifted` are the integer; all else leaves at the left.
  const vec y = (vec)((ivec)horner(f, c) + ((ivec)shifted << 23));
  return x < low ? splat(0.0f) : y;
}

struct Range {
  int64_t begin, end;
};

// The keys that query i of the item's sequence sees.
inline Range seen_by(const Attention& a, const AttentionItem& item, int64_t i) {
  const int64_t at = i + item.k_len - item.q_len;  // the last query is level with the last key
  const int64_t begin = a.left < 0 || at - a.left < 0 ? 0 : at - a.left;
  const int64_t end = a.right < 0 || at + a.right + 1 > item.k_len ? item.k_len : at + a.right + 1;
  return {begin, end < 0 ? 0 : end};
}

// Adds the bias of (query, key) distances to the scores of keys [keys.begin, keys.end), and masks unseen keys.
// `line` takes the biases of all distances in the panel: the row of a key reads it from its own place on.
inline void add_bias(const Attention& a, const AttentionItem& item, int64_t i0, Range keys, float* scores, int64_t ld,
                     float* line) {
  const int64_t count = keys.end - keys.begin, first = i0 + item.k_len - item.q_len - (keys.end - 1);
  const float* table = a.bias ? a.bias + item.head * (2 * a.reach + 1) + a.reach : nullptr;
  const float slope = a.slopes ? a.slopes[item.head] : 0.0f;
  for (int64_t t = 0; t < count + kPanel - 1; ++t) {
    const int64_t ahead = first + t;  // how far the query is ahead of the key
    float bias = -slope * float(ahead < 0 ? -ahead : ahead);
    if (table) bias += table[ahead > a.reach ? -a.reach : (ahead < -a.reach ? a.reach : -ahead)];
    line[t] = bias * kLog2e;
  }
  for (int64_t j = 0; j < count; ++j)
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + j * ld + v * kLanes;
      store(at, load<vec>(at) + load<vec>(line + (count - 1 - j) + v * kLanes));
    }
}

inline void mask(const Attention& a, const AttentionItem& item, int64_t i0, Range keys, float* scores, int64_t ld) {
  int32_t begin[kPanel], end[kPanel];
  for (int lane = 0; lane < kPanel; ++lane) {
    const Range seen = seen_by(a, item, i0 + lane);
    begin[lane] = int32_t(seen.begin - keys.begin);
    end[lane] = int32_t(seen.end - keys.begin);
  }
  for (int64_t j = 0; j < keys.end - keys.begin; ++j)
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + j * ld + v * kLanes;
      const ivec key = ivec{} + int32_t(j), seen = (key >= load<ivec>(begin + v * kLanes)) & (key < load<ivec>(end + v * kLanes));
      store(at, seen ? load<vec>(at) : splat(-__builtin_inff()));
    }
}

// The keys of [block.begin, block.end) that any query of the panel sees; a panel has `count` queries.
inline Range panel_keys(const Attention& a, const AttentionItem& item, int64_t i0, int64_t count, Range block) {
  const int64_t first = seen_by(a, item, i0).begin, last = seen_by(a, item, i0 + count - 1).end;
  return {first > block.begin ? first : block.begin, last < block.end ? last : block.end};
}

inline void adjust(const Attention& a, const AttentionItem& item, int64_t i0, int64_t count, Range keys, float* scores,
                   int64_t ld, float* line) {
  if (a.bias || a.slopes) add_bias(a, item, i0, keys, scores, ld, line);
  const bool whole = seen_by(a, item, i0 + count - 1).begin <= keys.begin && seen_by(a, item, i0).end >= keys.end;
  if (!whole) mask(a, item, i0, keys, scores, ld);
}

// Running maxima and sums of a panel's queries; `scale` is what the sums so far must be multiplied by.
struct Softmax {
  vec max[kVectors], sum[kVectors], scale[kVectors];
};

// Turns scores into exponentials relative to the new maxima.
inline void exponentiate(float* scores, int64_t keys, Softmax& s) {
  for (int v = 0; v < kVectors; ++v) {
    float* at = scores + v * kLanes;
    vec top = s.max[v];
    for (int64_t j = 0; j < keys; ++j) {
      const vec x = load<vec>(at + j * kPanel);
      top = x > top ? x : top;
    }
    const vec shift = top == splat(-__builtin_inff()) ? splat(0.0f) : top;  // a lane that has seen no key yet
    s.scale[v] = exp2(s.max[v] - shift);
    s.max[v] = top;
    vec sum = s.sum[v] * s.scale[v];
    for (int64_t j = 0; j < keys; ++j) {
      const vec p = exp2(load<vec>(at + j * kPanel) - shift);
      store(at + j * kPanel, p);
      sum = sum + p;
    }
    s.sum[v] = sum;
  }
}

// K as rows kKeyLd apart.
template <class T>
inline void load_rows(const T* from, int64_t ld, int64_t count, int64_t width, float* to) {
  for (int64_t j = 0; j < count; ++j) widen(from + j * ld, width, to + j * kKeyLd);
}

// Rows as strips of kStrip columns: element (j, d) at strip d / kStrip, [j][d % kStrip].
template <class T>
inline void load_strips(const T* from, int64_t ld, int64_t count, int64_t width, float* to) {
  alignas(64) float row[kMaxHead + kStrip + kLanes] = {};
  for (int64_t j = 0; j < count; ++j) {
    widen(from + j * ld, width, row);
    for (int64_t s = 0; s < strips_in(width); ++s)
      for (int c = 0; c < kStrip; c += kLanes)
        store(to + s * kValueStrip + j * kStrip + c, load<vec>(row + s * kStrip + c));
  }
}

// What one thread needs: see attention_scratch for the sizes.
struct AttentionScratch {
  float *q, *o, *k, *v, *scores, *line;
  Softmax* softmax;

  AttentionScratch(float* at, int64_t queries, int64_t width) {
    softmax = (Softmax*)at;
    q = at + queries / kPanel * (sizeof(Softmax) / sizeof(float));
    o = q + queries * width;
    k = o + queries * width;
    v = k + kKeys * kKeyLd;
    scores = v + strips_in(width) * kValueStrip;
    line = scores + kKeys * kPanel;
  }
  float* end() const { return line + kKeys + 2 * kPanel; }
};

int64_t attention_scratch(int64_t head_dim) {
  float* const zero = nullptr;
  return AttentionScratch(zero, attention_queries(head_dim), head_dim).end() - zero;
}

// One panel of queries against the keys of one block that lie in scratch.
inline void attend(const Attention& a, const AttentionItem& item, int64_t i0, int64_t count, Range block, int64_t panel,
                   const AttentionScratch& s) {
  const Range keys = panel_keys(a, item, i0, count, block);
  const int64_t n = keys.end - keys.begin, skipped = keys.begin - block.begin, d = a.head_dim;
  if (n <= 0) return;
  Softmax& softmax = s.softmax[panel];
  float* const o = s.o + panel * kPanel * d;
  strips<kKeyLd, 1, kPanel, kPanel>(n, d, s.k + skipped * kKeyLd, kStrip * kKeyLd, s.q + panel * kPanel * d, nullptr,
                                    s.scores);
  adjust(a, item, i0, count, keys, s.scores, kPanel, s.line);
  exponentiate(s.scores, n, softmax);
  if (a.drop_below) drop(a, Dropped(a, item.head, item.q_start + i0), keys.begin, n, s.scores, kPanel);
  for (int64_t r = 0; r < d; ++r)
    for (int v = 0; v < kVectors; ++v) {
      float* at = o + r * kPanel + v * kLanes;
      store(at, load<vec>(at) * softmax.scale[v]);
    }
  strips<1, kStrip, kPanel, kPanel>(d, n, s.v + skipped * kStrip, kValueStrip, s.scores, o, o);
}

template <class T>
inline void finish_panel(const Attention& a, const AttentionItem& item, int64_t i0, int64_t count, int64_t panel,
                         const AttentionScratch& s) {
  alignas(64) float factor[kPanel], max[kPanel], sum[kPanel];
  for (int v = 0; v < kVectors; ++v) {
    store(max + v * kLanes, s.softmax[panel].max[v]);
    store(sum + v * kLanes, s.softmax[panel].sum[v]);
  }
  for (int lane = 0; lane < kPanel; ++lane) factor[lane] = sum[lane] == 0.0f ? 0.0f : a.kept_factor / sum[lane];
  T* out = (T*)a.out + (item.q_start + i0) * a.out_row + item.head * a.out_head;
  store_transposed(s.o + panel * kPanel * a.head_dim, factor, count, a.head_dim, out, a.out_row);
  if (!a.lse) return;
  // A query that saw no key: infinity makes its recomputed probabilities zero.
  float* lse = a.lse + item.head * a.total_q + item.q_start + i0;
  for (int lane = 0; lane < count; ++lane)
    lse[lane] = sum[lane] == 0.0f ? __builtin_inff() : max[lane] + __builtin_log2f(sum[lane]);
}

template <class T>
inline void attention_item(const Attention& a, const AttentionItem& item, const AttentionScratch& s) {
  const int64_t d = a.head_dim, kv_head = item.head / (a.heads / a.kv_heads);
  const T* q = (const T*)a.q + item.q_start * a.q_row + item.head * a.q_head;
  const T* k = (const T*)a.k + item.k_start * a.k_row + kv_head * a.k_head;
  const T* v = (const T*)a.v + item.k_start * a.v_row + kv_head * a.v_head;
  const auto queries_from = [&](int64_t i) { return item.end - i < kPanel ? item.end - i : kPanel; };
  int64_t panel = 0;
  for (int64_t i = item.begin; i < item.end; i += kPanel, ++panel) {
    load_transposed(q + i * a.q_row, a.q_row, queries_from(i), d, a.scale * kLog2e, s.q + panel * kPanel * d);
    for (int64_t e = 0; e < d * kPanel; e += kLanes) store(s.o + panel * kPanel * d + e, splat(0.0f));
    for (int c = 0; c < kVectors; ++c)
      s.softmax[panel].max[c] = splat(-__builtin_inff()), s.softmax[panel].sum[c] = splat(0.0f);
  }
  const Range all = panel_keys(a, item, item.begin, item.end - item.begin, {0, item.k_len});
  for (int64_t j = all.begin / kKeys * kKeys; j < all.end; j += kKeys) {
    const Range block{j, all.end - j < kKeys ? all.end : j + kKeys};
    load_rows(k + j * a.k_row, a.k_row, block.end - j, d, s.k);
    load_strips(v + j * a.v_row, a.v_row, block.end - j, d, s.v);
    panel = 0;
    for (int64_t i = item.begin; i < item.end; i += kPanel) attend(a, item, i, queries_from(i), block, panel++, s);
  }
  panel = 0;
  for (int64_t i = item.begin; i < item.end; i += kPanel) finish_panel<T>(a, item, i, queries_from(i), panel++, s);
}

void attention(const Attention& a, const AttentionItem& item, float* scratch) {
  const AttentionScratch s(scratch, attention_queries(a.head_dim), a.head_dim);
  if (a.dtype == DType::f32) return attention_item<float>(a, item, s);
  attention_item<uint16_t>(a, item, s);
}

}  // namespace WEFT_ISA
}  // namespace weft
