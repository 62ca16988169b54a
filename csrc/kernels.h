// What every instruction set provides. One translation unit for each fills this table; nothing else may contain its
// instructions, so a CPU without them never meets one.
#pragma once
#include <cstdint>

namespace weft {

enum class DType : int32_t { f32 = 0, bf16 = 1 };
enum class Activation : int32_t { none = 0, gelu = 1, gelu_tanh = 2, silu = 3 };

// What happens to an accumulator before it is stored, in this order: + bias, (store pre), activation, + residual, store.
// Every pointer but `out` may be null. Rows are strided in elements; columns are contiguous.
struct Epilogue {
  const void* bias;
  void* pre;
  int64_t ld_pre;
  const void* residual;
  int64_t ld_residual;
  void* out;
  int64_t ld_out;
  Activation activation;
};

// out[m0:m1, n0:n1] of x[M,K] times packed[N,K] transposed. n0 is a multiple of the panel width.
struct Tile {
  const void* x;
  int64_t ld_x;
  const int64_t* x_rows;  // the address of each row of x, when they do not lie ld_x apart; else null
  const void* packed;
  DType dtype;
  int64_t n, k;
  int64_t m0, m1, n0, n1;
  Epilogue epilogue;
};

// Scratch that one thread owns: a block of x as floats, one panel of the weight as floats, and partial sums.
struct Scratch {
  float* x;
  float* panel;
  float* sums;
};

struct Kernels {
  const char* name;
  int64_t panel;       // columns that are packed side by side
  int64_t strip;       // rows that are computed at once
  int64_t block_k;     // summed before partial sums leave the registers
  int64_t block_ld;    // distance of the rows of Scratch::x
  int64_t max_tile_m;  // what Scratch is sized for
  int64_t max_tile_n;
  void (*tile)(const Tile&, const Scratch&);
  // w[n,k] at w[n*stride_n + k*stride_k] -> panel `p` of the packed form, and back.
  void (*pack)(const void* w, int64_t stride_n, int64_t stride_k, DType, int64_t n, int64_t k, int64_t p, void* packed);
  void (*unpack)(const void* packed, DType, int64_t n, int64_t k, int64_t p, void* w);
  double (*fma_flops)(int64_t rounds);  // runs independent fused multiply-adds; returns how many flops
};

extern const Kernels kernels_portable;
#if WEFT_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace weft
