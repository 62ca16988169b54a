// Attention of a few queries, as in decoding, to keys and values that are read in place, once for all heads that share
// them. Rows are (query, head) pairs. Lanes are keys in the scores and a head's columns in the result.
//
// Same bits as attention.h: scores sum over columns, weights and results over keys, each in their order, and blocks of
// keys start at the same places. So a token is the same whether it came in a prompt or was decoded.
#pragma once
#include "attention.h"

namespace weft {
namespace WEFT_ISA {

constexpr int kFewRows = 4;  // rows at once: 4 x 2 vectors of sums, 2 of the values, 1 of a weight
constexpr int64_t kFewLd = (kKeys + kLanes - 1) / kLanes * kLanes;  // distance of the rows of scores

struct FewScratch {
  float *q, *o, *scores, *max, *sum;

  FewScratch(float* at, int64_t rows, int64_t width) {
    const int64_t padded = (width + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
    q = at;
    o = q + rows * padded;
    scores = o + rows * padded;
    max = scores + kFewRows * kFewLd;
    sum = max + rows;
    ld = padded;
  }
  int64_t ld;
};

int64_t attention_few_scratch(int64_t head_dim, int64_t group) {
  float* const zero = nullptr;
  const int64_t rows = kFewQueries * group;
  return FewScratch(zero, rows, head_dim).sum + rows - zero;
}

// Adds the columns [c, c + kLanes) of ROWS rows of q times kLanes keys to the sums, a column after the other. `keys` and
// `columns` are how many there are.
template <int ROWS, bool WHOLE, class T>
inline void few_columns(const float* q, int64_t ld, const T* k, int64_t k_row, int64_t keys, int64_t columns, vec* sum) {
  vec m[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l)
    m[l] = WHOLE ? load_floats(k + l * k_row) : l < keys ? load_part(k + l * k_row, columns) : splat(0.0f);
  transpose(m);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!WHOLE && i >= columns) break;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sum[r] = fma(m[i], splat(q[r * ld + i]), sum[r]);
  }
}

// scores[r][j] of ROWS rows of q and the keys [0, n) at k.
template <int ROWS, class T>
inline void few_scores(const FewScratch& s, const float* q, const T* k, int64_t k_row, int64_t n, int64_t d) {
  for (int64_t j = 0; j < n; j += kLanes) {
    vec sum[ROWS];
    for (int r = 0; r < ROWS; ++r) sum[r] = splat(0.0f);
    int64_t c = 0;
    if (n - j >= kLanes)
      for (; c + kLanes <= d; c += kLanes) few_columns<ROWS, true>(q + c, s.ld, k + j * k_row + c, k_row, 0, 0, sum);
    for (; c < d; c += kLanes) few_columns<ROWS, false>(q + c, s.ld, k + j * k_row + c, k_row, n - j, d - c, sum);
    for (int r = 0; r < ROWS; ++r) store(s.scores + r * kFewLd + j, sum[r]);
  }
}

// Turns the scores of one row into weights relative to the new maximum; returns what earlier sums are multiplied by.
// `seen` is what the row sees of the n keys.
inline float few_weights(float* scores, int64_t n, Range seen, float& max) {
  const float none = -__builtin_inff();
  for (int64_t j = 0; j < seen.begin && j < n; ++j) scores[j] = none;
  for (int64_t j = seen.end < 0 ? 0 : seen.end; j < kFewLd; ++j) scores[j] = none;
  vec tops = splat(max);
  for (int64_t j = 0; j < n; j += kLanes) {
    const vec x = load<vec>(scores + j);
    tops = x > tops ? x : tops;
  }
  float top = max;
  for (int l = 0; l < kLanes; ++l) top = tops[l] > top ? tops[l] : top;
  const float shift = top == none ? 0.0f : top;
  const float scale = exp2(splat(max - shift))[0];
  for (int64_t j = 0; j < n; j += kLanes) store(scores + j, exp2(load<vec>(scores + j) - splat(shift)));
  max = top;
  return scale;
}

// The sums over keys of scores[r][j] * v[j] for two vectors of columns, from sum on.
template <int ROWS, bool WHOLE, class T>
inline void few_keys(const float* scores, const T* v, int64_t v_row, int64_t n, int64_t columns, vec (*sum)[2]) {
  for (int64_t j = 0; j < n; ++j, v += v_row) {
    const vec a = WHOLE ? load_floats(v) : load_part(v, columns);
    const vec b = WHOLE ? load_floats(v + kLanes)
                        : columns > kLanes ? load_part(v + kLanes, columns - kLanes) : splat(0.0f);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const vec p = splat(scores[r * kFewLd + j]);
      sum[r][0] = fma(a, p, sum[r][0]), sum[r][1] = fma(b, p, sum[r][1]);
    }
  }
}

// o[r] = o[r] * scale[r] + the sum over keys of scores[r][j] * v[j].
template <int ROWS, class T>
inline void few_values(const FewScratch& s, float* o, const float* scale, const T* v, int64_t v_row, int64_t n,
                       int64_t d) {
  for (int64_t c = 0; c < d; c += 2 * kLanes) {
    vec sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < 2; ++i) sum[r][i] = load<vec>(o + r * s.ld + c + i * kLanes) * splat(scale[r]);
    if (d - c >= 2 * kLanes) {
      few_keys<ROWS, true>(s.scores, v + c, v_row, n, 0, sum);
    } else {
      few_keys<ROWS, false>(s.scores, v + c, v_row, n, d - c, sum);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < 2; ++i) store(o + r * s.ld + c + i * kLanes, sum[r][i]);
  }
}

// ROWS rows from `row` on against the keys [keys.begin, keys.end). Row r is query r / group of the sequence.
template <int ROWS, class T>
inline void few_block(const Attention& a, const AttentionItem& item, int64_t row, const T* k, const T* v, Range keys,
                      const FewScratch& s) {
  const int64_t group = a.heads / a.kv_heads, n = keys.end - keys.begin, d = a.head_dim;
  few_scores<ROWS>(s, s.q + row * s.ld, k + keys.begin * a.k_row, a.k_row, n, d);
  float scale[ROWS], sum[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const Range seen = seen_by(a, item, (row + r) / group);
    const int64_t end = seen.end < keys.end ? seen.end : keys.end;
    scale[r] = few_weights(s.scores + r * kFewLd, n, {seen.begin - keys.begin, end - keys.begin}, s.max[row + r]);
    sum[r] = s.sum[row + r] * scale[r];
  }
  for (int64_t j = 0; j < n; ++j)  // rows side by side: one alone would wait for each sum
    for (int r = 0; r < ROWS; ++r) sum[r] = sum[r] + s.scores[r * kFewLd + j];
  for (int r = 0; r < ROWS; ++r) s.sum[row + r] = sum[r];
  few_values<ROWS>(s, s.o + row * s.ld, scale, v + keys.begin * a.v_row, a.v_row, n, d);
}

template <int ROWS, class T>
inline void few_rows(int rows, const Attention& a, const AttentionItem& item, int64_t row, const T* k, const T* v,
                     Range keys, const FewScratch& s) {
  if (rows == ROWS) return few_block<ROWS>(a, item, row, k, v, keys, s);
  if constexpr (ROWS > 1) few_rows<ROWS - 1>(rows, a, item, row, k, v, keys, s);
}

template <class T>
inline void attention_few_item(const Attention& a, const AttentionItem& item, const FewScratch& s) {
  const int64_t group = a.heads / a.kv_heads, rows = item.q_len * group, d = a.head_dim;
  const T* k = (const T*)a.k + item.k_start * a.k_row + item.head * a.k_head;
  const T* v = (const T*)a.v + item.k_start * a.v_row + item.head * a.v_head;
  const auto head_of = [&](int64_t row) { return item.head * group + row % group; };
  for (int64_t row = 0; row < rows; ++row) {
    const T* q = (const T*)a.q + (item.q_start + row / group) * a.q_row + head_of(row) * a.q_head;
    for (int64_t c = 0; c < d; c += kLanes)
      store(s.q + row * s.ld + c, load_part(q + c, d - c) * splat(a.scale * kLog2e));
    for (int64_t c = 0; c < s.ld; c += kLanes) store(s.o + row * s.ld + c, splat(0.0f));
    s.max[row] = -__builtin_inff(), s.sum[row] = 0.0f;
  }
  const Range all = panel_keys(a, item, 0, item.q_len, {0, item.k_len});
  for (int64_t j = all.begin / kKeys * kKeys; j < all.end; j += kKeys) {
    const Range keys{j < all.begin ? all.begin : j, all.end - j < kKeys ? all.end : j + kKeys};
    for (int64_t row = 0; row < rows; row += kFewRows) {
      const int count = int(rows - row < kFewRows ? rows - row : kFewRows);
      few_rows<kFewRows>(count, a, item, row, k, v, keys, s);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = s.sum[row] == 0.0f ? 0.0f : a.kept_factor / s.sum[row];
    T* out = (T*)a.out + (item.q_start + row / group) * a.out_row + head_of(row) * a.out_head;
    for (int64_t c = 0; c < d; c += kLanes)
      store_part(out + c, load<vec>(s.o + row * s.ld + c) * splat(factor), d - c);
  }
}

void attention_few(const Attention& a, const AttentionItem& item, float* scratch) {
  const FewScratch s(scratch, kFewQueries * (a.heads / a.kv_heads), a.head_dim);
  if (a.dtype == DType::f32) return attention_few_item<float>(a, item, s);
  attention_few_item<uint16_t>(a, item, s);
}

}  // namespace WEFT_ISA
}  // namespace weft
