// What every instruction set provides. One translation unit for each fills this table; nothing else may contain its
// instructions, so a CPU without them never meets one.
#pragma once
#include <cstdint>

namespace weft {

enum class DType : int32_t { f32 = 0, bf16 = 1 };
enum class Activation : int32_t { none = 0, gelu = 1, gelu_tanh = 2, silu = 3, relu = 4 };

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

// Packed attention. Rows are tokens, all sequences end to end; strides are in elements, a head's values contiguous.
// Query i of a sequence sees key j when at - left <= j <= at + right, where at = i + k_len - q_len; a negative `left` or
// `right` is no limit. `slopes` [heads] subtracts slope * |at - j| from the scores, `bias` [heads, 2 * reach + 1] adds
// bias[reach + clamp(j - at, -reach, reach)]. `lse` [heads, total_q] takes the log2 of each query's sum.
// Dropout: the weight of (head, query token, key) is dropped when its hash with `seed` is below `drop_below`, and the
// others are multiplied by `kept_factor`; see dropout.h. drop_below 0 drops nothing.
struct Attention {
  const void *q, *k, *v;
  void* out;
  int64_t q_row, k_row, v_row, out_row;
  int64_t q_head, k_head, v_head, out_head;
  DType dtype;
  int64_t heads, kv_heads, head_dim, total_q;
  float scale;
  int64_t left, right;
  const float* slopes;
  const float* bias;
  int64_t reach;
  float* lse;
  uint64_t seed = 0;
  uint32_t drop_below = 0;
  float kept_factor = 1.0f;
};

struct AttentionGrad {
  Attention forward;  // with `out` and `lse` as they were computed
  const void* dout;
  int64_t dout_row, dout_head;
  void *dq, *dk, *dv;
  int64_t dq_row, dk_row, dv_row;
  int64_t dq_head, dk_head, dv_head;
  float* dbias;  // [heads, 2 * reach + 1], zeroed by the caller, or null
};

// Queries [begin, end) of one head of one sequence, whose tokens start at q_start and k_start.
struct AttentionItem {
  int64_t q_start, q_len, k_start, k_len, head, begin, end;
};

// Queries that a sequence may have for `attention_few`, which turns no lane idle where there are few.
constexpr int64_t kFewQueries = 8;

// out[r] = parts[0][r] + parts[1][r] + ... + bias, added in this order in float; rows of all parts lie `ld` apart.
struct SumRows {
  DType dtype;
  int64_t count;
  const int64_t* parts;  // addresses
  int64_t ld;
  const void* bias;  // or null
  void* out;
  int64_t out_ld, width;
};

// out = norm(x + x_bias + residual) * weight + beta, row by row; `sum` takes the norm's input. Null pointers are left out.
// Row r is head r % heads of token r / heads: x and out have tokens x_ld and out_ld apart, whose heads lie end to end.
struct Norm {
  DType dtype;
  bool rms;
  const void* x;
  int64_t x_ld;
  const void* x_bias;
  const void* residual;
  int64_t residual_ld;
  const void *weight, *beta;
  float eps;
  void* sum;
  int64_t sum_ld;
  void* out;
  int64_t out_ld;
  float *mean, *rstd;
  int64_t width;
  int64_t heads;  // 1 but for norms of heads, which have no residual and no sum
};

// out[r] = the sum over t of table[t][index[t][r]]; a negative index adds nothing.
constexpr int kMaxTables = 3;
struct Gather {
  DType dtype;
  int tables;
  const void* table[kMaxTables];
  int64_t table_ld[kMaxTables];
  const int64_t* index[kMaxTables];
  void* out;
  int64_t out_ld, width;
};

// Rotates the pairs (c, c + head_dim / 2) of each head by the angles of the row's position; sign -1 turns back.
struct Rotary {
  DType dtype;
  const void* x;
  int64_t x_ld;
  void* out;
  int64_t out_ld, heads, head_dim;
  const float *cos, *sin;  // [positions, head_dim / 2]
  const int64_t* positions;
  float sign;
};

// out[r] = activation(x[r][0:width]) * x[r][width:2 * width], or without the factor where it is not gated
struct Gate {
  DType dtype;
  const void* x;
  int64_t x_ld;
  void* out;
  int64_t out_ld, width;
  Activation activation;
  bool gated;
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
  int64_t (*attention_queries)(int64_t head_dim);  // that an item covers at most
  int64_t (*attention_scratch)(int64_t head_dim);  // floats that a thread needs
  void (*attention)(const Attention&, const AttentionItem&, float* scratch);
  int64_t (*attention_few_scratch)(int64_t head_dim, int64_t group);
  // The same bits for all queries of a sequence, at most kFewQueries, and all heads that read key head item.head; no
  // slopes, bias, lse or dropout.
  void (*attention_few)(const Attention&, const AttentionItem&, float* scratch);
  int64_t (*attention_grad_scratch)(int64_t head_dim, int64_t group, int64_t max_queries);
  void (*attention_grad)(const AttentionGrad&, const AttentionItem&, float* scratch);  // item.head: a key head
  void (*norm_rows)(const Norm&, int64_t begin, int64_t end, float* scratch);          // scratch of `width` + 16 floats
  void (*gather_rows)(const Gather&, int64_t begin, int64_t end);
  void (*rotary_rows)(const Rotary&, int64_t begin, int64_t end);
  void (*gate_rows)(const Gate&, int64_t begin, int64_t end);
  void (*sum_rows)(const SumRows&, int64_t begin, int64_t end);
};

extern const Kernels kernels_portable;
#if WEFT_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace weft
