// What works on one row at a time and is bound by memory: norms, sums of table rows, rotary positions, gates.
#pragma once
#include "strip.h"

namespace weft {
namespace WEFT_ISA {

inline float total(const vec (&sums)[4]) {
  const vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float out = 0.0f;
  for (int l = 0; l < kLanes; ++l) out += sum[l];
  return out;
}

// Calls body(column, count, which of four sums) for each vector of a row; the last may be a part.
template <class F>
inline void each_vector(int64_t width, F body) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) body(c + u * kLanes, int64_t(kLanes), u);
  for (; c < width; c += kLanes) body(c, width - c, 0);
}

// ---- norms -------------------------------------------------------------------------------------------------------

template <class T>
inline void norm_row(const Norm& n, int64_t r, float* z) {
  const int64_t inside = r % n.heads * n.width;
  const T* x = (const T*)n.x + r / n.heads * n.x_ld + inside;
  const T* residual = n.residual ? (const T*)n.residual + r * n.residual_ld : nullptr;
  const T* x_bias = (const T*)n.x_bias;
  T* sum = n.sum ? (T*)n.sum + r * n.sum_ld : nullptr;
  vec sums[4] = {};
  each_vector(n.width, [&](int64_t c, int64_t count, int u) {
    vec v = load_part(x + c, count);
    if (x_bias) v = v + load_part(x_bias + c, count);
    if (residual) v = v + load_part(residual + c, count);
    if (sum) store_part(sum + c, v, count);
    store(z + c, v);
    sums[u] = n.rms ? fma(v, v, sums[u]) : sums[u] + v;
  });
  const float mean = n.rms ? 0.0f : total(sums) / float(n.width);
  if (!n.rms) {
    for (vec& v : sums) v = splat(0.0f);
    each_vector(n.width, [&](int64_t c, int64_t count, int u) {
      vec v = load<vec>(z + c) - splat(mean);
      if (count < kLanes) {
        float part[kLanes];
        store(part, v);
        v = load_part(part, count);
      }
      sums[u] = fma(v, v, sums[u]);
    });
  }
  const float rstd = 1.0f / __builtin_sqrtf(total(sums) / float(n.width) + n.eps);
  if (n.mean) n.mean[r] = mean;
  if (n.rstd) n.rstd[r] = rstd;
  T* out = (T*)n.out + r / n.heads * n.out_ld + inside;
  each_vector(n.width, [&](int64_t c, int64_t count, int) {
    vec y = (load<vec>(z + c) - splat(mean)) * splat(rstd);
    if (n.weight) y = y * load_part((const T*)n.weight + c, count);
    if (n.beta) y = y + load_part((const T*)n.beta + c, count);
    store_part(out + c, y, count);
  });
}

void norm_rows(const Norm& n, int64_t begin, int64_t end, float* scratch) {
  for (int64_t r = begin; r < end; ++r)
    n.dtype == DType::f32 ? norm_row<float>(n, r, scratch) : norm_row<uint16_t>(n, r, scratch);
}

// ---- sums of table rows ------------------------------------------------------------------------------------------

template <class T>
inline void gather_row(const Gather& g, int64_t r) {
  const T* from[kMaxTables];
  int count = 0;
  for (int t = 0; t < g.tables; ++t)
    if (g.index[t][r] >= 0) from[count++] = (const T*)g.table[t] + g.index[t][r] * g.table_ld[t];
  T* out = (T*)g.out + r * g.out_ld;
  if (count == 1) return void(__builtin_memcpy(out, from[0], g.width * sizeof(T)));
  each_vector(g.width, [&](int64_t c, int64_t n, int) {
    vec v = splat(0.0f);
    for (int t = 0; t < count; ++t) v = v + load_part(from[t] + c, n);
    store_part(out + c, v, n);
  });
}

void gather_rows(const Gather& g, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) g.dtype == DType::f32 ? gather_row<float>(g, r) : gather_row<uint16_t>(g, r);
}

// ---- rotary positions --------------------------------------------------------------------------------------------

template <class T>
inline void rotary_row(const Rotary& o, int64_t r) {
  const int64_t half = o.head_dim / 2;
  const float *cos = o.cos + o.positions[r] * half, *sin = o.sin + o.positions[r] * half;
  for (int64_t h = 0; h < o.heads; ++h) {
    const T* x = (const T*)o.x + r * o.x_ld + h * o.head_dim;
    T* out = (T*)o.out + r * o.out_ld + h * o.head_dim;
    each_vector(half, [&](int64_t c, int64_t n, int) {
      const vec a = load_part(x + c, n), b = load_part(x + half + c, n);
      const vec co = load_part(cos + c, n), si = load_part(sin + c, n) * splat(o.sign);
      store_part(out + c, a * co - b * si, n);
      store_part(out + half + c, b * co + a * si, n);
    });
  }
}

void rotary_rows(const Rotary& o, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) o.dtype == DType::f32 ? rotary_row<float>(o, r) : rotary_row<uint16_t>(o, r);
}

// ---- gates -------------------------------------------------------------------------------------------------------

template <class T>
inline void gate_row(const Gate& g, int64_t r) {
  const T* x = (const T*)g.x + r * g.x_ld;
  T* out = (T*)g.out + r * g.out_ld;
  each_vector(g.width, [&](int64_t c, int64_t n, int) {
    const vec y = activate(load_part(x + c, n), g.activation);
    store_part(out + c, g.gated ? y * load_part(x + g.width + c, n) : y, n);
  });
}

void gate_rows(const Gate& g, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) g.dtype == DType::f32 ? gate_row<float>(g, r) : gate_row<uint16_t>(g, r);
}

// ---- sums of rows that several ranks computed --------------------------------------------------------------------

template <class T>
inline void sum_row(const SumRows& s, int64_t r) {
  T* out = (T*)s.out + r * s.out_ld;
  each_vector(s.width, [&](int64_t c, int64_t n, int) {
    vec v = load_part((const T*)s.parts[0] + r * s.ld + c, n);
    for (int64_t p = 1; p < s.count; ++p) v = v + load_part((const T*)s.parts[p] + r * s.ld + c, n);
    if (s.bias) v = v + load_part((const T*)s.bias + c, n);
    store_part(out + c, v, n);
  });
}

void sum_rows(const SumRows& s, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) s.dtype == DType::f32 ? sum_row<float>(s, r) : sum_row<uint16_t>(s, r);
}

}  // namespace WEFT_ISA
}  // namespace weft
