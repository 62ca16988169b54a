// The bindings of attention, norms and row operations; see bindings.cpp for how buffers are passed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "attention.h"
#include "bindings.h"
#include "norm.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weft;

namespace {

// A matrix or a packed [tokens, heads, head_dim] tensor: address, stride of rows, stride of heads.
using Strided = std::tuple<Address, int64_t, int64_t>;

Attention make_attention(const Strided& q, const Strided& k, const Strided& v, const Strided& out, int dtype,
                         int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t total_q, float scale, int64_t left,
                         int64_t right, Address slopes, Address bias, int64_t reach, Address lse, uint64_t seed,
                         uint32_t drop_below, float kept_factor) {
  const auto& [q_at, q_row, q_head] = q;
  const auto& [k_at, k_row, k_head] = k;
  const auto& [v_at, v_row, v_head] = v;
  const auto& [out_at, out_row, out_head] = out;
  return {at<void>(q_at), at<void>(k_at), at<void>(v_at), at<void>(out_at), q_row, k_row, v_row, out_row,
          q_head, k_head, v_head, out_head, static_cast<DType>(dtype), heads, kv_heads, head_dim, total_q,
          scale, left, right, at<float>(slopes), at<float>(bias), reach, at<float>(lse), seed, drop_below, kept_factor};
}

void call_attention(const Kernels& kernels, const Attention& job, Address cu_q, Address cu_k, int64_t count,
                    int threads) {
  nb::gil_scoped_release release;
  attention(kernels, job, {at<int32_t>(cu_q), at<int32_t>(cu_k), count}, threads);
}

void call_attention_at(const Kernels& kernels, const Attention& job, Address cu_q, Address k_start, Address k_len,
                       int64_t count, int threads) {
  nb::gil_scoped_release release;
  attention(kernels, job, {at<int32_t>(cu_q), nullptr, count, at<int64_t>(k_start), at<int64_t>(k_len)}, threads);
}

void call_attention_grad(const Kernels& kernels, const Attention& job, const Strided& dout, const Strided& dq,
                         const Strided& dk, const Strided& dv, Address dbias, Address cu_q, Address cu_k,
                         int64_t count, int threads) {
  const auto& [dout_at, dout_row, dout_head] = dout;
  const auto& [dq_at, dq_row, dq_head] = dq;
  const auto& [dk_at, dk_row, dk_head] = dk;
  const auto& [dv_at, dv_row, dv_head] = dv;
  const AttentionGrad grad{job, at<void>(dout_at), dout_row, dout_head, at<void>(dq_at), at<void>(dk_at),
                           at<void>(dv_at), dq_row, dk_row, dv_row, dq_head, dk_head, dv_head, at<float>(dbias)};
  nb::gil_scoped_release release;
  attention_grad(kernels, grad, {at<int32_t>(cu_q), at<int32_t>(cu_k), count}, threads);
}

using Rows = std::tuple<Address, int64_t>;  // address and stride

void call_norm(const Kernels& kernels, int dtype, bool rms, const Rows& x, Address x_bias, const Rows& residual,
               Address weight, Address beta, float eps, const Rows& sum, const Rows& out, Address mean, Address rstd,
               int64_t rows, int64_t width, int64_t heads, int threads) {
  const Norm job{static_cast<DType>(dtype), rms, at<void>(std::get<0>(x)), std::get<1>(x), at<void>(x_bias),
                 at<void>(std::get<0>(residual)), std::get<1>(residual), at<void>(weight), at<void>(beta), eps,
                 at<void>(std::get<0>(sum)), std::get<1>(sum), at<void>(std::get<0>(out)), std::get<1>(out),
                 at<float>(mean), at<float>(rstd), width, heads};
  nb::gil_scoped_release release;
  norm(kernels, job, rows * heads, threads);
}

// Each table is an address, its row stride, and the address of its index.
void call_gather(const Kernels& kernels, int dtype, const std::vector<std::tuple<Address, int64_t, Address>>& tables,
                 const Rows& out, int64_t rows, int64_t width, int threads) {
  Gather job{static_cast<DType>(dtype), int(tables.size()), {}, {}, {}, at<void>(std::get<0>(out)), std::get<1>(out),
             width};
  if (job.tables > kMaxTables) throw nb::value_error("gather takes at most 3 tables");
  for (int t = 0; t < job.tables; ++t) {
    const auto& [table, ld, index] = tables[t];
    job.table[t] = at<void>(table), job.table_ld[t] = ld, job.index[t] = at<int64_t>(index);
  }
  nb::gil_scoped_release release;
  gather(kernels, job, rows, threads);
}

void call_rotary(const Kernels& kernels, int dtype, const Rows& x, const Rows& out, int64_t heads, int64_t head_dim,
                 Address cos, Address sin, Address positions, float sign, int64_t rows, int threads) {
  const Rotary job{static_cast<DType>(dtype), at<void>(std::get<0>(x)), std::get<1>(x), at<void>(std::get<0>(out)),
                   std::get<1>(out), heads, head_dim, at<float>(cos), at<float>(sin), at<int64_t>(positions), sign};
  nb::gil_scoped_release release;
  rotary(kernels, job, rows, threads);
}

void call_gate(const Kernels& kernels, int dtype, const Rows& x, const Rows& out, int activation, int64_t rows,
               int64_t width, int threads, bool gated) {
  const Gate job{static_cast<DType>(dtype), at<void>(std::get<0>(x)), std::get<1>(x), at<void>(std::get<0>(out)),
                 std::get<1>(out), width, static_cast<Activation>(activation), gated};
  nb::gil_scoped_release release;
  gate(kernels, job, rows, threads);
}

}  // namespace

void bind_packed(nb::module_& m) {
  nb::class_<Attention>(m, "Attention", "One attention call, without its sequences.")
      .def("__init__", [](Attention* job, Strided q, Strided k, Strided v, Strided out, int dtype, int64_t heads,
                          int64_t kv_heads, int64_t head_dim, int64_t total_q, float scale, int64_t left, int64_t right,
                          Address slopes, Address bias, int64_t reach, Address lse, uint64_t seed, uint32_t drop_below,
                          float kept_factor) {
        new (job) Attention(make_attention(q, k, v, out, dtype, heads, kv_heads, head_dim, total_q, scale, left, right,
                                           slopes, bias, reach, lse, seed, drop_below, kept_factor));
      });
  m.def("attention", &call_attention);
  m.def("attention_at", &call_attention_at, "Attention to keys that start anywhere: k_start and k_len, int64.");
  m.def("attention_grad", &call_attention_grad);
  m.def("norm", &call_norm);
  m.def("gather", &call_gather);
  m.def("rotary", &call_rotary);
  m.def("gate", &call_gate, "kernels"_a, "dtype"_a, "x"_a, "out"_a, "activation"_a, "rows"_a, "width"_a, "threads"_a,
        "gated"_a = true);
}
