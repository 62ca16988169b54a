// AVX2 with FMA: 16 registers of 8 floats.
#include <immintrin.h>

#include <cstdint>

#define WEFT_ISA avx2
namespace weft::WEFT_ISA {

constexpr int kLanes = 8;
constexpr int kStrip = 6;  // 6 x 2 sums, 2 of the weight, 1 of x: 15 of 16 registers
constexpr char kName[] = "avx2";
constexpr bool kFused = true;
typedef float vec __attribute__((vector_size(4 * kLanes)));

inline vec splat(float v) { return _mm256_set1_ps(v); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace weft::WEFT_ISA

#include "table.h"

namespace weft {
const Kernels kernels_avx2 = WEFT_ISA::make_kernels();
}
