// AVX-512: 32 registers of 16 floats.
#include <immintrin.h>

#include <cstdint>

#define WEFT_ISA avx512
namespace weft::WEFT_ISA {

constexpr int kLanes = 16;
constexpr int kStrip = 12;  // 12 x 2 sums, 2 of the weight, 1 of x: 27 of 32 registers
constexpr char kName[] = "avx512";
constexpr bool kFused = true;
typedef float vec __attribute__((vector_size(4 * kLanes)));

inline vec splat(float v) { return _mm512_set1_ps(v); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace weft::WEFT_ISA

#include "table.h"

namespace weft {
const Kernels kernels_avx512 = WEFT_ISA::make_kernels();
}
