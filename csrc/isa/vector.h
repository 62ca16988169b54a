// Vectors of `kLanes` floats: loads, stores, bf16, exp, erf and the activations, for every instruction set alike.
// A translation unit defines, in namespace weft::WEFT_ISA, vec, kLanes, kStrip (rows that fit the registers), kName,
// splat(float), fma(a, b, c) and kFused (fma rounds once), and then includes the files of this folder.
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

// x (1 + erf(z)) / 2 with z = x / sqrt(2), as max(x, 0) - |x| erfc(|z|) / 2, which rounds less than the sum does.
// erf(z) is z times a near-minimax ratio p / q of polynomials of z^2; from 3.92 on it is 1 in float, and must be: large
// numbers are multiplied by what is left. Fewer instructions than erf takes, but without fused multiply-adds it is
// not as close as torch.
inline vec gelu(vec x) {
  if constexpr (!kFused) return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.707106781f)));
  static constexpr float p[] = {1.42408025f, 0.247678638f, 0.0674792156f,
                                0.00505287852f, 0.000363526633f, 2.49234972e-06f};
  static constexpr float q[] = {1.2620585f, 0.640182912f, 0.147000462f,
                                0.0194918476f, 0.00153512903f, 4.73031068e-05f};
  const vec zero = splat(0.0f), top = splat(3.92f), z = x * splat(0.707106781f), t = z * z;
  const vec below = horner(t, q), size = x < zero ? -x : x;
  const vec erfc = fma(z < zero ? z : -z, horner(t, p), below) / below;  // not used where it overflows
  const vec left = z <= -top ? zero : erfc;
  return z >= top ? x : fma(splat(-0.5f) * size, left, x > zero ? x : zero);
}

inline vec sigmoid_times(vec x, vec u) { return x / (splat(1.0f) + exp(-u)); }  // x * sigmoid(u)

inline vec activate(vec x, Activation activation) {
  switch (activation) {
    case Activation::gelu:
      return gelu(x);
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
