"""One pass of a `RankProgram` where every rank has all rows: alone, or with the ranks of one host.

    pre-norm    y = norm(x += p)    qkv = y Wqkv_r + b    c = attention(qkv)    p = sum_r(c Wo_r) + b
                y = norm(x += p)    m = act(y Wu_r + b)                         p = sum_r(m Wd_r) + b
    post-norm   the same with x = y = norm(x + p)

`p` is what the last matmul gave and the next norm adds. All steps of a chunk of rows run one after the other, so that
what lies between them stays in the caches. Addresses go straight to the core: what `weft.kernels` would check of each
call follows from the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import _core
from weft.kernels.cpu import ACTIVATIONS
from weft.packed import spec
from weft.packed.held import Dense, PackedLayer
from weft.packed.spec import NormOrder
from weft.parallel.inference.calls import Calls
from weft.parallel.inference.host_wire import CHUNK_ROWS, Fill, HostWire, Rows
from weft.parallel.inference.memory import Keys

if TYPE_CHECKING:
    from weft.parallel.inference.memory import Job
    from weft.parallel.inference.program import RankProgram


class Pass(Calls):
    """One call: the arguments that do not change from step to step."""

    def __init__(self, program: RankProgram, wire: HostWire | None, job: Job) -> None:
        super().__init__(program)
        self.wire, self.job, self.inputs = wire, job, job.inputs
        self.memory = program.memory
        self.rows = self.inputs.tokens  # of x; fewer once those not asked for are left out
        self.keys = Keys(job)

    def run(self, out: Tensor) -> None:
        """Fills out [n, width]."""
        model, wanted = self.program.transformer, self.job.rows
        self._begin()
        self.memory.reserve(self.inputs.tokens)
        self._embed(model.embedding)
        previous: spec.Layer | None = None
        for number, layer in enumerate(self.program.layers):
            self._qkv(layer, number, previous)
            last = number == len(self.program.layers) - 1
            if last and wanted is not None and layer.described.attention.right == 0:
                self._attend_to_last(layer, number, wanted)
                wanted = None
            else:
                self._attend(layer, number, self.memory.at("qkv"), self.inputs.cu_seqlens, *self.keys.all)
            self._out(layer)
            self._mlp(layer)
            previous = layer.described
        assert previous is not None
        self._finish(previous, wanted, out)

    def _begin(self) -> None:
        if self.wire is not None:
            self.wire.begin(self.job.tag(), self.job.what)

    # What comes before the layers and after them ------------------------------------------------------------

    def _embed(self, embedding: spec.Embedding | None) -> None:
        x, rest = (self.memory.at("x"), self.width), []
        order = self.program.tables.in_order(self.rows)
        if self.inputs.vectors is not None:
            vectors = self.inputs.vectors
            rest.append((vectors.data_ptr(), vectors.stride(0), order.data_ptr()))
        else:
            assert embedding is not None
            self._words(embedding.tables[0], x)
            rest.append((*x, order.data_ptr()))
        if embedding is not None:
            pairs = zip(embedding.tables[1:], self.inputs.indices[1:], strict=True)
            rest += [(t.data_ptr(), t.stride(0), index.data_ptr()) for t, index in pairs]
        if len(rest) > 1 or self.inputs.vectors is not None:
            _core.gather(self.kernels, self.code, rest, x, self.rows, self.width, self.threads)
        if embedding is not None and embedding.norm is not None:
            self._norm(embedding.norm, x, x, self.rows)

    def _words(self, table: Tensor, x: Rows) -> None:
        """Rows of this rank's words, zeros for others'; their sum over ranks is every word's row."""
        words, ids = self.program.model.words, self.inputs.indices[0]
        mine = ids - words.first
        mine[(ids < words.first) | (ids >= words.end)] = -1

        def fill(first: int, count: int, to: Rows) -> None:
            tables = [(table.data_ptr(), table.stride(0), mine.data_ptr() + 8 * first)]
            _core.gather(self.kernels, self.code, tables, to, count, self.width, self.threads)

        self._summed(fill, 0, x)

    def _finish(self, last: spec.Layer, wanted: Tensor | None, out: Tensor) -> None:
        """The last norm; the rows `wanted` of it where the layers did not leave out the others."""
        to = out if wanted is None else torch.empty(self.rows, self.width, dtype=out.dtype)
        self._last_norm(last, to)
        if wanted is not None:
            torch.index_select(to, 0, wanted, out=out)

    def _last_norm(self, last: spec.Layer, out: Tensor) -> None:
        norm = last.mlp_norm if last.order is NormOrder.POST else self.program.transformer.final_norm
        x, part = (self.memory.at("x"), self.width), (self.memory.at("part"), self.width)
        to = (out.data_ptr(), self.width)
        if norm is None:
            self._add(x, part, to, self.rows)
        else:
            self._norm(norm, part, to, self.rows, residual=x)

    # The steps of a layer -----------------------------------------------------------------------------------

    def _entered(self, norm: spec.Norm | None, order: NormOrder, first: int, count: int, *, adds: bool) -> Rows:
        """What a matmul of rows [first, first + count) reads: x, with the last `part` where it `adds`, normed."""
        at = first * self.width * self.size
        x, part = (self.memory.at("x") + at, self.width), (self.memory.at("part") + at, self.width)
        if order is NormOrder.POST:
            if adds:
                assert norm is not None
                self._norm(norm, part, x, count, residual=x)
            return x
        if norm is None:
            if adds:
                self._add(x, part, x, count)
            return x
        y = (self.memory.at("y"), self.width)
        if adds:
            self._norm(norm, part, y, count, residual=x, total=x)
        else:
            self._norm(norm, x, y, count)
        return y

    def _qkv(self, layer: PackedLayer, number: int, previous: spec.Layer | None) -> None:
        n = layer.qkv.n
        for first in range(0, self.rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, self.rows - first)
            at = self.memory.at("qkv") + first * n * self.size
            self._linear(layer.qkv, self._attention_input(layer, previous, first, count), (at, n), count)
            self._place(layer, number, first, count)

    def _attention_input(self, layer: PackedLayer, previous: spec.Layer | None, first: int, count: int) -> Rows:
        described = layer.described
        norm = described.attention_norm
        if described.order is NormOrder.POST:
            norm = None if previous is None else previous.mlp_norm
        return self._entered(norm, described.order, first, count, adds=previous is not None)

    def _place(self, layer: PackedLayer, number: int, first: int, count: int) -> None:
        """Rotates the queries and keys of these tokens by their positions, and puts keys and values into the cache."""
        a, n, cache = layer.described.attention, layer.qkv.n, self.job.cache
        d, at = a.head_dim, self.memory.at("qkv") + first * n * self.size
        if a.rotary is not None:
            assert self.inputs.positions is not None
            cos, sin = self.program.tables.of_rotary(a.rotary, self.inputs.farthest + 1)
            _core.rotary(
                self.kernels, self.code, (at, n), (at, n), a.heads + a.kv_heads, d, cos.data_ptr(), sin.data_ptr(),
                self.inputs.positions.data_ptr() + 8 * first, 1.0, count, self.threads,
            )  # fmt: skip
        if cache is None:
            return
        place, to_head = self.keys.places.data_ptr() + 8 * first, cache.capacity * d * self.size
        for skipped, stored in ((a.heads, cache.keys), (a.heads + a.kv_heads, cache.values)):
            _core.store_heads(
                at + skipped * d * self.size, n * self.size, stored[number].data_ptr(), to_head, place,
                a.kv_heads, d * self.size, count, self.threads,
            )  # fmt: skip

    def _attend(
        self, layer: PackedLayer, number: int, q_at: int, cu_q: Tensor, k_start: Tensor, k_len: Tensor
    ) -> None:  # fmt: skip
        """From the queries at `q_at`, which lie as in qkv, to the keys; fills `context`."""
        a, n, cache = layer.described.attention, layer.qkv.n, self.job.cache
        d, qkv = a.head_dim, self.memory.at("qkv")
        if self.keys.in_cache:
            assert cache is not None
            to_head = cache.capacity * d
            k, v = (cache.keys[number].data_ptr(), d, to_head), (cache.values[number].data_ptr(), d, to_head)
        else:
            k, v = ((qkv + first * d * self.size, n, d) for first in (a.heads, a.heads + a.kv_heads))
        context = (self.memory.at("context"), a.heads * d, d)
        job = _core.Attention(
            (q_at, n, d), k, v, context, self.code, a.heads, a.kv_heads, d, self.inputs.tokens, a.scale, a.left,
            a.right, 0, 0, 0, 0, 0, 0, 1.0,
        )  # fmt: skip
        _core.attention_at(
            self.kernels, job, cu_q.data_ptr(), k_start.data_ptr(), k_len.data_ptr(), k_len.numel(), self.threads
        )

    def _attend_to_last(self, layer: PackedLayer, number: int, wanted: Tensor) -> None:
        """The last layer, for the tokens asked for only: from here on x has their rows."""
        qkv = self.memory.view("qkv", self.inputs.tokens, layer.qkv.n).index_select(0, wanted)
        self._leave_out(wanted)
        one_each = torch.arange(self.rows + 1, dtype=torch.int32)
        self._attend(layer, number, qkv.data_ptr(), one_each, *self.keys.of(wanted))

    def _leave_out(self, wanted: Tensor) -> None:
        x = self.memory.view("x", self.inputs.tokens, self.width)
        x[: wanted.numel()] = x.index_select(0, wanted)
        self.rows = wanted.numel()

    def _out(self, layer: PackedLayer) -> None:
        self._reduce(layer.out, self._fill_out(layer))

    def _mlp(self, layer: PackedLayer) -> None:
        self._reduce(layer.down, self._fill_mlp(layer))

    def _fill_out(self, layer: PackedLayer) -> Fill:
        context = self.memory.at("context")

        def fill(first: int, count: int, to: Rows) -> None:
            x = (context + first * layer.out.k * self.size, layer.out.k)
            self._linear(layer.out, x, to, count, with_bias=self.wire is None)

        return fill

    def _fill_mlp(self, layer: PackedLayer) -> Fill:
        mlp = layer.described.mlp
        wide, gated = (self.memory.at("wide"), layer.up.n), (self.memory.at("gated"), layer.up.n // 2)
        activation = ACTIVATIONS[mlp.activation]

        def fill(first: int, count: int, to: Rows) -> None:
            y = self._mlp_input(layer.described, first, count)
            self._linear(layer.up, y, wide, count, activation=0 if mlp.gated else activation)
            if mlp.gated:
                _core.gate(self.kernels, self.code, wide, gated, activation, count, gated[1], self.threads)
            self._linear(layer.down, gated if mlp.gated else wide, to, count, with_bias=self.wire is None)

        return fill

    def _mlp_input(self, described: spec.Layer, first: int, count: int) -> Rows:
        norm = described.attention_norm if described.order is NormOrder.POST else described.mlp_norm
        return self._entered(norm, described.order, first, count, adds=True)

    def _reduce(self, dense: Dense, fill: Fill) -> None:
        bias = 0 if dense.bias is None else dense.bias.data_ptr()
        self._summed(fill, bias, (self.memory.at("part"), self.width))

    def _summed(self, fill: Fill, bias: int, out: Rows) -> None:
        """out = the sum over ranks of what `fill` gives, + bias; a rank alone has added the bias itself."""
        if self.wire is not None:
            self.wire.sum_rows(
                self.kernels, self.code, fill, self.rows, self.width, bias=bias, out=out, threads=self.threads
            )
            return
        for first in range(0, self.rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, self.rows - first)
            fill(first, count, (out[0] + first * out[1] * self.size, out[1]))
