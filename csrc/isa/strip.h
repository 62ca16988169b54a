// The inner loop of attention: a few rows by one panel, and the transposes that feed it.
#pragma once
#include "matmul.h"

namespace weft {
namespace WEFT_ISA {

// to[r][0:kPanel] = from[r][0:kPanel] + sum over i < k of x[r, i] * w[i][0:kPanel], from zero when `from` is null.
// x[r, i] lies at x[r * XR + i * XK], row i of w at w[i * WK], row r of `from` and `to` at [r * TR].
// Each element is summed in the order of i, so its bits depend on nothing but its own row and column.
template <int ROWS, int XR, int XK, int WK, int TR>
__attribute__((noinline)) void strip(int64_t k, const float* x, const float* w, const float* from, float* to) {
  vec sum[ROWS][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[r][v] = from ? load<vec>(from + r * TR + v * kLanes) : splat(0.0f);
  const auto step = [&](int64_t u) __attribute__((always_inline)) {
    vec b[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b[v] = load<vec>(w + u * WK + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vec a = splat(x[r * XR + u * XK]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(a, b[v], sum[r][v]);
    }
  };
  int64_t i = 0;
  for (; i + kUnroll <= k; i += kUnroll, x += kUnroll * XK, w += kUnroll * WK) {
#pragma GCC unroll 16
    for (int u = 0; u < kUnroll; ++u) step(u);
  }
  for (; i < k; ++i, x += XK, w += WK) step(0);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(to + r * TR + v * kLanes, sum[r][v]);
}

template <int ROWS, int XR, int XK, int WK, int TR>
inline void strip_of(int rows, int64_t k, const float* x, const float* w, const float* from, float* to) {
  if (rows == ROWS) return strip<ROWS, XR, XK, WK, TR>(k, x, w, from, to);
  if constexpr (ROWS > 1) strip_of<ROWS - 1, XR, XK, WK, TR>(rows, k, x, w, from, to);
}

// The same for any number of rows; strip s of x starts at x + s * x_strip. `from` is null or `to`.
template <int XR, int XK, int WK, int TR>
inline void strips(int64_t rows, int64_t k, const float* x, int64_t x_strip, const float* w, const float* from,
                   float* to) {
  for (int64_t r = 0; r < rows; r += kStrip, x += x_strip) {
    const int count = int(rows - r < kStrip ? rows - r : kStrip);
    strip_of<kStrip, XR, XK, WK, TR>(count, k, x, w, from ? from + r * TR : nullptr, to + r * TR);
  }
}

// ---- transposes --------------------------------------------------------------------------------------------------

// Lane l of the first result comes from a where bit `step` of l is clear, else from b; the second takes what is left.
template <int STEP>
inline void exchange(vec& a, vec& b) {
  ivec first, second;
  for (int l = 0; l < kLanes; ++l) {
    first[l] = l & STEP ? l - STEP + kLanes : l;
    second[l] = l & STEP ? l + kLanes : l + STEP;
  }
  const vec low = __builtin_shuffle(a, b, first);
  b = __builtin_shuffle(a, b, second);
  a = low;
}

template <int STEP>
inline void transpose_by(vec (&m)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & STEP)) exchange<STEP>(m[i], m[i + STEP]);
  if constexpr (STEP > 1) transpose_by<STEP / 2>(m);
}

inline void transpose(vec (&m)[kLanes]) { transpose_by<kLanes / 2>(m); }

template <class T>
inline vec load_part(const T* p, int64_t count) {  // the first `count` values, then zeros
  if (count >= kLanes) return load_floats(p);
  T part[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = p[i];
  return load_floats(part);
}

template <class T>
inline void store_part(T* p, vec v, int64_t count) {
  if (count >= kLanes) return store_floats(p, v);
  T part[kLanes];
  store_floats(part, v);
  for (int64_t i = 0; i < count; ++i) p[i] = part[i];
}

// rows[r][0:width], `ld` apart, times `factor` -> panel[c][0:kPanel] with lane r; lanes past `rows` are zero.
template <class T>
inline void load_transposed(const T* rows, int64_t ld, int64_t count, int64_t width, float factor, float* panel) {
  for (int v = 0; v < kVectors; ++v)
    for (int64_t c = 0; c < width; c += kLanes) {
      vec m[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const int64_t row = v * kLanes + r;
        m[r] = row < count ? load_part(rows + row * ld + c, width - c) * splat(factor) : splat(0.0f);
      }
      transpose(m);
      for (int64_t i = 0; i < kLanes && c + i < width; ++i) store(panel + (c + i) * kPanel + v * kLanes, m[i]);
    }
}

// The way back, each lane times its own factor.
template <class T>
inline void store_transposed(const float* panel, const float* factors, int64_t count, int64_t width, T* rows,
                             int64_t ld) {
  for (int v = 0; v < kVectors; ++v) {
    const vec factor = load<vec>(factors + v * kLanes);
    for (int64_t c = 0; c < width; c += kLanes) {
      vec m[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        m[i] = c + i < width ? load<vec>(panel + (c + i) * kPanel + v * kLanes) * factor : splat(0.0f);
      transpose(m);
      for (int r = 0; r < kLanes && v * kLanes + r < count; ++r)
        store_part(rows + (v * kLanes + r) * ld + c, m[r], width - c);
    }
  }
}

}  // namespace WEFT_ISA
}  // namespace weft
