// Vectors of `kLanes` floats: loads, stores, bf16, exp, erf and the activations, for every instruction set alike.
// A translation unit defines, in namespace weft::WEFT_ISA, vec, kLanes, kStrip (rows that fit the registers), kName,
// splat(float) and fma(a, b, c), and then includes the files of this folder.
#pragma once
#include "../kernels.h"

namespace weft {
namespace WEFT_ISA {

typedef int32_t ivec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t uvec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t hvec __attribute__((vector_size(2 * kLanes)));

template <class V, class P>
inline V load(const P* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class P>
inline void store(P* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

inline vec load_floats(const float* p) { return load<vec>(p); }
inline vec load_floats(const uint16_t* p) { return (vec)(__builtin_convertvector(load<hvec>(p), uvec) << 16); }

inline void store_floats(float* p, vec v) { store(p, v); }
inline void store_floats(uint16_t* p, vec v) {  // round to nearest even; NaN stays NaN
  const uvec bits = (uvec)v;
  const uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uvec quiet = (bits >> 16) | 0x40u;
  store(p, __builtin_convertvector(v == v ? rounded : quiet, hvec));
}

inline float widen(float v) { return v; }
inline float widen(uint16_t v) { return __builtin_bit_cast(float, uint32_t(v) << 16); }

// ---- activations -------------------------------------------------------------------------------------------------

template <int N>
inline vec horner(vec x, const float (&c)[N]) {  // c[0] + c[1] x + ...
  vec y = splat(c[N - 1]);
  for (int i = N - 2; i >= 0; --i) y = fma(y, x, splat(c[i]));
  return y;
}

inline vec exp(vec x) {
  const vec low = splat(-87.3f), high = splat(88.72f);
  const vec clamped = x < low ? low : (x > high ? high : x);
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vec n = fma(clamped, splat(1.44269504f), magic) - magic;
  vec r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  // exp(r) on [-ln2/2, ln2/2]
  static constexpr float c[] = {1.0f, 1.0f, 0.499999911f, 0.166664183f, 0.0416682325f, 0.00837491732f, 0.00138367142f};
  const vec p = horner(r, c);
  // 2^n in two steps, as n = 128 alone is no float
  const ivec i = __builtin_convertvector(n, ivec), half = i >> 1;
  const vec y = p * (vec)((half + 127) << 23) * (vec)((i - half + 127) << 23);
  return x > high ? splat(__builtin_inff()) : (x < low ? splat(0.0f) : y);
}

inline vec erf(vec x) {
  const vec a = x < splat(0.0f) ? -x : x;
  // Near-minimax fits: erf(x) = x * near(x^2) below 1, and 1 - exp(far(|x|)) up to 4, where erf is 1 in float.
  static constexpr float near[] = {1.12837911f,   -0.37612626f,     0.112836003f,  -0.0268544443f,
                                   0.00518953521f, -0.000802084105f, 7.8891193e-05f};
  static constexpr float far[] = {-0.000353708921f, -1.12704003f,     -0.638225615f, -0.103037432f,
                                  0.0218053516f,    -0.00293961563f, 0.0001855749f};
  const vec top = splat(4.0f);
  const vec small = x * horner(x * x, near);
  const vec large = splat(1.0f) - exp(horner(a > top ? top : a, far));
  return a < splat(1.0f) ? small : (x < splat(0.0f) ? -large : large);
}

inline vec sigmoid_times(vec x, vec u) { return x / (splat(1.0f) + exp(-u)); }  // x * sigmoid(u)

inline vec activate(vec x, Activation activation) {
  switch (activation) {
    case Activation::gelu:
      return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.707106781f)));
    case Activation::gelu_tanh: {  // (1 + tanh(u)) / 2 = sigmoid(2u)
      const vec cubic = fma(x * x * x, splat(0.044715f), x);
      return sigmoid_times(x, cubic * splat(1.5957691216f));
    }
    case Activation::silu:
      return sigmoid_times(x, x);
    case Activation::relu:
      return x < splat(0.0f) ? splat(0.0f) : x;  // NaN stays NaN
    case Activation::none:
      break;
  }
  return x;
}

}  // namespace WEFT_ISA
}  // namespace weft
