"""Inference: weights packed once, buffers planned once and reused, one native call for each fused step.

    post-norm   qkv = x Wqkv + b    c = attention(qkv)    y = c Wo + b + x    x = norm(y)
                m = act(x Wu + b)   y = m Wd + b + x      x = norm(y)
    pre-norm    y = norm(x)   qkv = y Wqkv + b   c = attention(qkv)   x = c Wo + b + x
                y = norm(x)   m = act(y Wu + b)  x = m Wd + b + x

After the first call of a size nothing is allocated but the result. Addresses go straight to the core: everything that
`weft.kernels.cpu` would check of each call is checked once, here.
"""

from __future__ import annotations

import threading

from torch import Tensor

from weft import _core
from weft.kernels.cpu import ACTIVATIONS, dtype_code, empty, isa, thread_count
from weft.kernels.door import check_offsets
from weft.packed import spec
from weft.packed.buffers import Buffers
from weft.packed.call import Inputs, Kept
from weft.packed.held import Dense, PackedLayer, Tables, common_dtype
from weft.packed.spec import NormKind, NormOrder

_SCHEDULE = _core.Schedule()
_NOWHERE = (0, 0)


class Program:
    """A transformer ready to run. It holds packed copies of the weights: make a new one when they have changed."""

    def __init__(self, model: spec.Transformer) -> None:
        self.model = model
        self.dtype = common_dtype(list(spec.weights(model)))
        self._code = dtype_code(self.dtype)
        self._kernels = isa()
        self._layers = [PackedLayer.of(layer) for layer in model.layers]
        self._buffers = Buffers(model, self.dtype)
        self._tables = Tables()
        self._lock = threading.Lock()  # calls share the buffers

    def run(self, inputs: Inputs, kept: Kept | None = None) -> Tensor:
        """The hidden states [T, width] after the last layer, in new memory; `kept` gets copies of what it asks for."""
        vectors = inputs.vectors
        if vectors is not None and vectors.dtype != self.dtype:
            raise ValueError(f"the model computes in {self.dtype}, got vectors of {vectors.dtype}; convert them")
        if vectors is not None and (vectors.shape != (inputs.tokens, self.model.width) or not vectors.is_contiguous()):
            raise ValueError(f"vectors must be contiguous [{inputs.tokens}, {self.model.width}]")
        check_offsets(inputs.cu_seqlens, "cu_seqlens", inputs.tokens)  # they may have been written to since
        out = empty(inputs.tokens, self.model.width, dtype=self.dtype)
        with self._lock:
            self._buffers.reserve(max(inputs.tokens, 1))
            _Run(self, inputs, out, kept).all()
        return out


_NOTHING = Kept()


class _Run:
    """One call: the arguments that do not change from step to step."""

    def __init__(self, program: Program, inputs: Inputs, out: Tensor, kept: Kept | None) -> None:
        self.program, self.inputs, self.kept = program, inputs, kept or _NOTHING
        self.kernels, self.code = program._kernels, program._code
        self.rows, self.tokens = program._buffers.rows, inputs.tokens
        self.threads = thread_count(0)
        self.width = program.model.width
        self.out = (out.data_ptr(), self.width)

    def all(self) -> None:
        model = self.program.model
        layers = self.program._layers
        self.embed(model.embedding)
        for i, layer in enumerate(layers):
            if self.kept.states is not None:
                self.kept.states.append(self.program._buffers.copy("x", self.tokens, self.width))
            last = i == len(layers) - 1 and model.final_norm is None
            to = self.out if last else self.rows["x"]
            (self.post_norm if layer.described.order is NormOrder.POST else self.pre_norm)(layer, to)
        if model.final_norm is not None:
            self.norm(model.final_norm, self.rows["x"], self.out)

    def embed(self, embedding: spec.Embedding | None) -> None:
        x, vectors = self.rows["x"], self.inputs.vectors
        tables = []
        if vectors is not None:
            order = self.program._tables.in_order(self.tokens)
            tables = [(vectors.data_ptr(), vectors.stride(0), order.data_ptr())]
        if embedding is not None:
            skipped = len(tables)
            tables += [
                (table.data_ptr(), table.stride(0), index.data_ptr())
                for table, index in zip(embedding.tables[skipped:], self.inputs.indices[skipped:], strict=True)
            ]
        _core.gather(self.kernels, self.code, tables, x, self.tokens, self.width, self.threads)
        if embedding is not None and embedding.norm is not None:
            self.norm(embedding.norm, x, x)

    def post_norm(self, layer: PackedLayer, to: tuple[int, int]) -> None:
        x, y = self.rows["x"], self.rows["y"]
        assert layer.described.attention_norm is not None
        assert layer.described.mlp_norm is not None
        self.attention(layer, x)
        self.linear(layer.out, self.rows["context"], y, residual=x)
        self.norm(layer.described.attention_norm, y, x)
        self.linear(layer.down, self.mlp(layer, x), y, residual=x)
        self.norm(layer.described.mlp_norm, y, to)

    def pre_norm(self, layer: PackedLayer, to: tuple[int, int]) -> None:
        x = self.rows["x"]
        self.attention(layer, self.normed(layer.described.attention_norm))
        self.linear(layer.out, self.rows["context"], x, residual=x)
        self.linear(layer.down, self.mlp(layer, self.normed(layer.described.mlp_norm)), to, residual=x)

    def normed(self, norm: spec.Norm | None) -> tuple[int, int]:
        if norm is None:
            return self.rows["x"]
        self.norm(norm, self.rows["x"], self.rows["y"])
        return self.rows["y"]

    def attention(self, layer: PackedLayer, x: tuple[int, int]) -> None:
        a, cu = layer.described.attention, self.inputs.cu_seqlens
        at, stride = self.rows["wide"][0], layer.qkv.n
        self.linear(layer.qkv, x, (at, stride))
        if a.rotary is not None:
            assert self.inputs.positions is not None
            cos, sin = self.program._tables.of_rotary(a.rotary, self.inputs.farthest + 1)
            _core.rotary(
                self.kernels, self.code, (at, stride), (at, stride), a.heads + a.kv_heads, a.head_dim, cos.data_ptr(),
                sin.data_ptr(), self.inputs.positions.data_ptr(), 1.0, self.tokens, self.threads,
            )  # fmt: skip
        if self.kept.keys_values is not None:
            heads = self.program._buffers.copy("wide", self.tokens, stride)
            heads = heads.view(self.tokens, a.heads + 2 * a.kv_heads, a.head_dim)
            self.kept.keys_values.append((heads[:, a.heads : -a.kv_heads], heads[:, -a.kv_heads :]))
        d, size = a.head_dim, 4 if self.code == 0 else 2
        q, k, v = ((at + first * d * size, stride, d) for first in (0, a.heads, a.heads + a.kv_heads))
        context = (self.rows["context"][0], a.heads * d, d)
        job = _core.Attention(
            q, k, v, context, self.code, a.heads, a.kv_heads, d, self.tokens, a.scale, a.left, a.right, 0, 0, 0, 0,
            0, 0, 1.0,
        )  # fmt: skip
        _core.attention(self.kernels, job, cu.data_ptr(), cu.data_ptr(), cu.numel() - 1, self.threads)

    def mlp(self, layer: PackedLayer, x: tuple[int, int]) -> tuple[int, int]:
        mlp, wide = layer.described.mlp, (self.rows["wide"][0], layer.up.n)
        self.linear(layer.up, x, wide, activation=None if mlp.gated else mlp.activation)
        if not mlp.gated:
            return wide
        gated = (self.rows["gated"][0], layer.up.n // 2)
        _core.gate(
            self.kernels, self.code, wide, gated, ACTIVATIONS[mlp.activation], self.tokens, gated[1], self.threads
        )
        return gated

    def linear(
        self, dense: Dense, x: tuple[int, int], out: tuple[int, int], *, activation: str | None = None,
        residual: tuple[int, int] = _NOWHERE,
    ) -> None:  # fmt: skip
        bias = 0 if dense.bias is None else dense.bias.data_ptr()
        x = (x[0], dense.k)  # buffers are as wide as the widest layer; each layer uses its own width
        _core.linear(
            self.kernels, *x, dense.data.data_ptr(), self.code, self.tokens, dense.n, dense.k, bias,
            ACTIVATIONS[activation], *residual, *_NOWHERE, *out, self.threads, _SCHEDULE,
        )  # fmt: skip

    def norm(self, norm: spec.Norm, x: tuple[int, int], out: tuple[int, int]) -> None:
        weight, bias = (0 if t is None else t.data_ptr() for t in (norm.weight, norm.bias))
        _core.norm(
            self.kernels, self.code, norm.kind is NormKind.RMS, x, 0, _NOWHERE, weight, bias, norm.eps, _NOWHERE, out,
            0, 0, self.tokens, self.width, self.threads,
        )  # fmt: skip
