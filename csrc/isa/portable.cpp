// Any CPU: vectors of 4 floats, which every compiler for x86-64 and arm64 maps to registers. A product is rounded before
// it is added, as std::fma would be a slow call where the hardware lacks it.
#include <cstdint>

#define WEFT_ISA portable
namespace weft::WEFT_ISA {

constexpr int kLanes = 4;
constexpr int kStrip = 6;  // 6 x 2 sums, 2 of the weight, 1 of x: 15 of 16 registers
constexpr char kName[] = "portable";
constexpr bool kFused = false;
typedef float vec __attribute__((vector_size(4 * kLanes)));

inline vec splat(float v) { return vec{} + v; }
inline vec fma(vec a, vec b, vec c) { return a * b + c; }

}  // namespace weft::WEFT_ISA

#include "table.h"

namespace weft {
const Kernels kernels_portable = WEFT_ISA::make_kernels();
}
