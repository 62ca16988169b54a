// The matmul of one tile, and the packed form of its weight.
//
// Same bits: an output element is the sum of its blocks of k in order, and a block is fma(x[k], w[k], sum) from zero for
// its k in order. The blocks depend on K alone, so the bits depend on no tile, strip or thread; vector lanes are columns,
// and never mix. Blocks that start from zero, rather than from the sum of those before, keep the rounding error of a long
// K small. Every element takes the same epilogue instructions, those of a ragged edge too, which are computed on padded
// vectors and stored in part.
#pragma once
#include "vector.h"

namespace weft {
namespace WEFT_ISA {

constexpr int kVectors = 2;                    // vectors in a panel
constexpr int64_t kPanel = kVectors * kLanes;  // columns in a panel
// Tiles start at multiples of 32 columns (TILE_N_MULTIPLE in kernels/tiles.py), and each of them where a panel does.
static_assert(32 % kPanel == 0, "the width of a panel must divide 32");
constexpr int64_t kBlockK = 256;               // kBlockK x kPanel floats of the weight stay in the first-level cache
// Rows of x are copied block by block, this far apart: rows a power of two apart would meet in one set of the cache.
constexpr int64_t kBlockLd = kBlockK + 8;
constexpr int kUnroll = 4;
constexpr int64_t kLine = 64;
constexpr int64_t kMaxTileM = 8 * kStrip;  // its block of x and its partial sums stay in the second-level cache
constexpr int64_t kMaxTileN = 512;

// One row of a panel. Packed bf16 alternates the columns of the two vectors, so that a shift and a mask widen them.
inline void load_row(const float* p, vec* v) { v[0] = load<vec>(p), v[1] = load<vec>(p + kLanes); }
inline void load_row(const uint16_t* p, vec* v) {
  const uvec both = load<uvec>(p);
  v[0] = (vec)(both << 16), v[1] = (vec)(both & 0xffff0000u);
}
inline int64_t column_at(const float*, int64_t j) { return j; }
inline int64_t column_at(const uint16_t*, int64_t j) { return j < kLanes ? 2 * j : 2 * (j - kLanes) + 1; }

// Where the partial sums of ROWS x PANELS panels lie: [panel][row][kPanel], so that a strip is contiguous.
struct Sums {
  float* at;
  int64_t panel_stride;
};

// to = from (zero when null) + x[ROWS][k] * panels[k][kPanel]. The sums stay in registers throughout.
// Not inlined: the loop needs nearly every register there is. Meanwhile it fetches `ahead`, a part of the next panel:
// LINES cache lines for every kUnroll values of k.
template <int ROWS, int PANELS, int LINES, class W>
__attribute__((noinline)) void multiply(int64_t k, const float* x, const W* w, int64_t panel_stride,
                                        Sums from, Sums to, const char* ahead) {
  constexpr int kWide = PANELS * kVectors;
  vec sum[ROWS][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) sum[r][v] = splat(0.0f);
  const float* rows[(ROWS + 2) / 3];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r += 3) rows[r / 3] = x + r * kBlockLd;
  const auto step = [&](int64_t u) __attribute__((always_inline)) {
    vec b[kWide];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) load_row(w + p * panel_stride + u * kPanel, b + p * kVectors);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const vec a = splat(rows[r / 3][(r % 3) * kBlockLd + u]);
#pragma GCC unroll 16
      for (int v = 0; v < kWide; ++v) sum[r][v] = fma(a, b[v], sum[r][v]);
    }
  };
  const auto advance = [&](int64_t u) __attribute__((always_inline)) {
    w += u * kPanel;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r += 3) rows[r / 3] += u;
  };
  int64_t i = 0;
  for (; i + kUnroll <= k; i += kUnroll, ahead += LINES * kLine) {
#pragma GCC unroll 16
    for (int l = 0; l < LINES; ++l) __builtin_prefetch(ahead + l * kLine, 0, 2);
#pragma GCC unroll 16
    for (int u = 0; u < kUnroll; ++u) step(u);
    advance(kUnroll);
  }
  for (; i < k; ++i) step(0), advance(1);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kWide; ++v) {
      const int64_t at = r * kPanel + v % kVectors * kLanes;
      if (from.at) sum[r][v] = load<vec>(from.at + (v / kVectors) * from.panel_stride + at) + sum[r][v];
      store(to.at + (v / kVectors) * to.panel_stride + at, sum[r][v]);
    }
}

// Few rows leave registers idle, and one row alone would wait for the latency of each sum: they take several panels.
constexpr int kMaxPanels = 4;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : (rows * 2 <= kStrip ? 2 : 1); }

template <int ROWS, int LINES, class W>
inline void multiply_strip(int rows, int panels, int64_t k, const float* x, const W* w,
                           int64_t panel_stride, Sums from, Sums to, const char* ahead) {
  if (rows == ROWS) {
    constexpr int kWide = panels_at_once(ROWS);
    if (panels == kWide) return multiply<ROWS, kWide, LINES, W>(k, x, w, panel_stride, from, to, ahead);
    return multiply<ROWS, 1, LINES, W>(k, x, w, panel_stride, from, to, ahead);
  }
  if constexpr (ROWS > 1) multiply_strip<ROWS - 1, LINES, W>(rows, panels, k, x, w, panel_stride, from, to, ahead);
}

template <class T>
inline void copy(T* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

template <class T>
inline void finish_row(const float* sums, const T* bias, T* pre, const T* residual, T* out, Activation activation) {
  for (int v = 0; v < kVectors; ++v) {
    vec y = load<vec>(sums + v * kLanes);
    if (bias) y = y + load_floats(bias + v * kLanes);
    if (pre) store_floats(pre + v * kLanes, y);
    y = activate(y, activation);
    if (residual) y = y + load_floats(residual + v * kLanes);
    store_floats(out + v * kLanes, y);
  }
}

// The epilogue of rows [m, m + rows) of the panel that starts at column n.
template <class T>
inline void finish(const Tile& t, int64_t m, int64_t n, int rows, const float* sums) {
  const Epilogue& e = t.epilogue;
  const int64_t width = t.n1 - n < kPanel ? t.n1 - n : kPanel;
  const bool whole = width == kPanel;
  T bias_edge[kPanel] = {}, pre_edge[kPanel], residual_edge[kPanel] = {}, out_edge[kPanel];
  const T* bias = e.bias ? (const T*)e.bias + n : nullptr;
  if (bias && !whole) copy(bias_edge, bias, width), bias = bias_edge;
  for (int r = 0; r < rows; ++r) {
    T* out = (T*)e.out + (m + r) * e.ld_out + n;
    T* pre = e.pre ? (T*)e.pre + (m + r) * e.ld_pre + n : nullptr;
    const T* residual = e.residual ? (const T*)e.residual + (m + r) * e.ld_residual + n : nullptr;
    if (whole) {
      finish_row(sums + r * kPanel, bias, pre, residual, out, e.activation);
      continue;
    }
    if (residual) copy(residual_edge, residual, width);
    finish_row(sums + r * kPanel, bias, pre ? pre_edge : pre, residual ? residual_edge : residual, out_edge, e.activation);
    copy(out, out_edge, width);
    if (pre) copy(pre, pre_edge, width);
  }
}

template <class T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_floats(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
}

inline void widen_panel(const uint16_t* from, int64_t k, float* to) {
  for (int64_t i = 0; i < k; ++i, from += kPanel, to += kPanel) {
    vec row[kVectors];
    load_row(from, row);
    store(to, row[0]), store(to + kLanes, row[1]);
  }
}

// One block of k of a tile, with its rows of x as floats, kBlockLd apart.
struct BlockK {
  const float* x;
  int64_t k0, k;
  bool first, last;
};

template <class T>
constexpr int kFetchAll = kPanel * sizeof(T) * kUnroll / kLine;  // cache lines of kUnroll rows of a panel
template <class T>
constexpr int kFetchHalf = kFetchAll<T> > 1 ? kFetchAll<T> / 2 : 1;

template <int LINES, class T, class W>
inline void multiply_panels(const Tile& t, const BlockK& b, const W* w, int64_t panel_stride, int64_t panel, int panels,
                            const char* next_panel, float* sums) {
  constexpr int kParts = kPanel * sizeof(T) * kUnroll / (LINES * kLine);  // strips that fetch a whole panel between them
  const int64_t rows = t.m1 - t.m0, stride = rows * kPanel;
  for (int64_t r = 0; r < rows; r += kStrip) {
    const int count = int(rows - r < kStrip ? rows - r : kStrip);
    const Sums partial{sums + panel * stride + r * kPanel, stride};
    const Sums from = b.first ? Sums{nullptr, 0} : partial;
    const float* x = b.x + r * kBlockLd;
    const char* ahead = next_panel + r / kStrip % kParts * (b.k / kUnroll * LINES * kLine);
    if (!b.last) {
      multiply_strip<kStrip, LINES, W>(count, panels, b.k, x, w, panel_stride, from, partial, ahead);
      continue;
    }
    alignas(64) float done[kMaxPanels * kStrip * kPanel];
    multiply_strip<kStrip, LINES, W>(count, panels, b.k, x, w, panel_stride, from, Sums{done, kStrip * kPanel}, ahead);
    for (int p = 0; p < panels; ++p)
      finish<T>(t, t.m0 + r, t.n0 + (panel + p) * kPanel, count, done + p * kStrip * kPanel);
  }
}

template <class T>
inline void compute_block(const Tile& t, const BlockK& b, const Scratch& s) {
  const int64_t rows = t.m1 - t.m0, panels = (t.n1 - t.n0 + kPanel - 1) / kPanel;
  const int at_once = rows <= kStrip ? panels_at_once(int(rows)) : 1;
  for (int64_t p = 0; p < panels;) {
    const T* w = (const T*)t.packed + ((t.n0 / kPanel + p) * t.k + b.k0) * kPanel;
    const int count = panels - p >= at_once ? at_once : 1;
    const char* next = (const char*)(w + count * t.k * kPanel);
    // The fewer strips there are to fetch the next panel, the more each must: weights come from memory then.
    if (rows <= kStrip) {
      multiply_panels<kFetchAll<T>, T, T>(t, b, w, t.k * kPanel, p, count, next, s.sums);
    } else if (rows <= 2 * kStrip) {
      multiply_panels<kFetchHalf<T>, T, T>(t, b, w, t.k * kPanel, p, count, next, s.sums);
    } else if constexpr (sizeof(T) == sizeof(float)) {
      multiply_panels<1, T, T>(t, b, w, t.k * kPanel, p, count, next, s.sums);
    } else {  // enough rows to repay widening the panel in memory first
      widen_panel(w, b.k, s.panel);
      multiply_panels<1, T, float>(t, b, s.panel, 0, p, count, next, s.sums);
    }
    p += count;
  }
}

template <class T>
inline void compute_tile(const Tile& t, const Scratch& s) {
  const int64_t blocks = t.k > kBlockK ? (t.k + kBlockK - 1) / kBlockK : 1, step = (t.k + blocks - 1) / blocks;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t k0 = i * step, k = t.k - k0 < step ? t.k - k0 : step;
    for (int64_t m = t.m0; m < t.m1; ++m) {
      const T* row = t.x_rows ? (const T*)t.x_rows[m] : (const T*)t.x + m * t.ld_x;
      widen(row + k0, k, s.x + (m - t.m0) * kBlockLd);
    }
    const BlockK b{s.x, k0, k, i == 0, i == blocks - 1};
    compute_block<T>(t, b, s);
  }
}

void tile(const Tile& t, const Scratch& s) {
  if (t.dtype == DType::f32) return compute_tile<float>(t, s);
  compute_tile<uint16_t>(t, s);
}

template <class T>
inline void pack_panel(const T* w, int64_t stride_n, int64_t stride_k, int64_t n, int64_t k, int64_t p, T* packed) {
  const int64_t n0 = p * kPanel, width = n - n0 < kPanel ? n - n0 : kPanel;
  T* to = packed + p * k * kPanel;
  for (int64_t i = 0; i < k; ++i, to += kPanel) {
    const T* from = w + n0 * stride_n + i * stride_k;
    for (int64_t j = 0; j < width; ++j) to[column_at(w, j)] = from[j * stride_n];
    for (int64_t j = width; j < kPanel; ++j) to[column_at(w, j)] = T(0);
  }
}

void pack(const void* w, int64_t stride_n, int64_t stride_k, DType dtype, int64_t n, int64_t k, int64_t p, void* packed) {
  if (dtype == DType::f32) return pack_panel((const float*)w, stride_n, stride_k, n, k, p, (float*)packed);
  pack_panel((const uint16_t*)w, stride_n, stride_k, n, k, p, (uint16_t*)packed);
}

template <class T>
inline void unpack_panel(const T* packed, int64_t n, int64_t k, int64_t p, T* w) {
  const int64_t n0 = p * kPanel, width = n - n0 < kPanel ? n - n0 : kPanel;
  const T* from = packed + p * k * kPanel;
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < k; ++i) w[(n0 + j) * k + i] = from[i * kPanel + column_at(w, j)];
}

void unpack(const void* packed, DType dtype, int64_t n, int64_t k, int64_t p, void* w) {
  if (dtype == DType::f32) return unpack_panel((const float*)packed, n, k, p, (float*)w);
  unpack_panel((const uint16_t*)packed, n, k, p, (uint16_t*)w);
}

}  // namespace WEFT_ISA
}  // namespace weft
