"""`Pass`: one pass of inference through the layers where every rank has all rows: alone, or with the ranks of one host.

    prefill     T tokens of many prompts end to end, no padding; only rows asked for leave the last layer's attention
    decode      one token (or a few) for each sequence: T rows on every rank, keys and values in a `RankCache`

    pre-norm    y = norm(x += p)    qkv = y Wqkv_r + b    c = attention(qkv)    p = sum_r(c Wo_r) + b
                y = norm(x += p)    m = act(y Wu_r + b)                         p = sum_r(m Wd_r) + b
    post-norm   the same with x = y = norm(x + p)

`p` is what the last matmul gave and the next norm adds. A rank alone adds x in the matmul itself: x = c Wo + b + x.
With others, all steps of a chunk of rows run one after the other, so that what lies between them stays in the caches,
and ranks compute while they wait. Where the group spans hosts, long inputs are split and overlapped instead
(`network.py`). A row's bits depend on its own sequence only: not on the batch, nor on whether a token came in the
prompt or was decoded.

Addresses go straight to the core: what `weft.kernels` would check of each call follows from the model, and what came
from outside was checked before (`call.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft import _core
from weft.comm.host_collectives import CHUNK_ROWS, Fill, HostWire, Rows
from weft.kernels.cpu import ACTIVATIONS, thread_count
from weft.models.spec import Embedding, NormOrder
from weft.transformer.call import InferenceCall, Keys
from weft.transformer.memory import NormAddresses, PackedDense, PackedLayer, PassBuffers, Workspace

if TYPE_CHECKING:
    pass

_SCHEDULE = _core.Schedule()
_NOWHERE = (0, 0)


class Pass:
    """One call: the arguments that do not change from step to step.

    `fuses`: a block's last matmul adds the residual, and not the norm behind it.
    """

    def __init__(self, work: Workspace, buffers: PassBuffers, wire: HostWire | None, call: InferenceCall) -> None:
        self.work, self.buffers, self.wire, self.call = work, buffers, wire, call
        self.fuses = wire is None
        self.inputs = call.inputs
        self.kernels, self.code, self.size = work.kernels, work.code, work.dtype.itemsize
        self.threads, self.width, self.at = thread_count(0), work.width, buffers.at
        self.rows = self.inputs.tokens  # of x; fewer once those not asked for are left out
        self.keys = None if call.cache is None and call.rows is None else Keys(call)

    def run(self, out: Tensor) -> None:
        """Fills out [n, width]."""
        wanted, layers = self.call.rows, self.work.layers
        hands_out = not self.call.extras.is_empty
        self._begin()
        self._embed(self.work.transformer.embedding)
        for number, layer in enumerate(layers):
            self._qkv(layer, number)
            if hands_out:
                self._hand_out(layer)
            last = number == len(layers) - 1
            if last and wanted is not None and layer.spec.attention.right == 0:
                self._attend_to_last(layer, number, wanted)
                wanted = None
            else:
                keys = None if self.keys is None else self.keys.all
                self._attend(layer, number, self.at["qkv"], self.inputs.cu_seqlens, keys)
            self._out(layer)
            self._mlp(layer)
        self._finish(wanted, out)

    def _begin(self) -> None:
        if self.wire is not None:
            self.wire.begin(self.call.tag(), self.call.what)

    # What comes before the layers and after them ------------------------------------------------------------

    def _embed(self, embedding: Embedding | None) -> None:
        width = self.work.input_width
        x, vectors = (self.at["embedded"], width), self.inputs.vectors
        tables = []
        if vectors is not None:
            order = self.work.tables.in_order(self.rows)
            tables.append((vectors.data_ptr(), vectors.stride(0), order.data_ptr()))
        elif self.wire is not None:
            assert embedding is not None
            self._words(embedding.tables[0], x)
            tables.append((*x, self.work.tables.in_order(self.rows).data_ptr()))
        if embedding is not None:
            first = len(tables)
            pairs = zip(embedding.tables[first:], self.inputs.indices[first:], strict=True)
            tables += [(t.data_ptr(), t.stride(0), index.data_ptr()) for t, index in pairs]
        _core.gather(self.kernels, self.code, tables, x, self.rows, width, self.threads)
        if vectors is None and self.work.scale != 1.0:
            self.buffers.view("embedded", self.rows, width).mul_(self.work.scale)
        self._embedded(x)

    def _embedded(self, x: Rows) -> None:
        """What follows the sum of an embedding's rows."""
        if self.work.embedding_norm is not None:
            self._norm(self.work.embedding_norm, x, x, self.rows, width=self.work.input_width)
        if self.work.projection is not None:
            self._linear(self.work.projection, x, (self.at["x"], self.width), self.rows)

    def _words(self, table: Tensor, x: Rows) -> None:
        """Rows of this rank's words, zeros for others'; their sum over ranks is every word's row."""
        words, ids = self.work.model.words, self.inputs.indices[0]
        mine = ids - words.first
        mine[(ids < words.first) | (ids >= words.end)] = -1

        def fill(first: int, count: int, to: Rows) -> None:
            tables = [(table.data_ptr(), table.stride(0), mine.data_ptr() + 8 * first)]
            _core.gather(self.kernels, self.code, tables, to, count, table.shape[1], self.threads)

        self._sum(fill, 0, x, table.shape[1])

    def _hand_out(self, layer: PackedLayer) -> None:
        """Copies of what went into a layer, and of its keys and values; ordinary tensors, whatever the mode."""
        extras = self.call.extras
        with torch.inference_mode(False):
            if extras.states is not None:
                extras.states.append(self.buffers.view("x", self.rows, self.width).clone())
            if extras.keys_values is not None:
                a = layer.spec.attention
                heads = self.buffers.view("qkv", self.rows, layer.qkv.n).clone()
                heads = heads.view(self.rows, a.heads + 2 * a.kv_heads, a.head_dim)
                extras.keys_values.append((heads[:, a.heads : -a.kv_heads], heads[:, -a.kv_heads :]))

    def _finish(self, wanted: Tensor | None, out: Tensor) -> None:
        """The last norm; the rows `wanted` of it where the layers did not leave out the others."""
        to = out if wanted is None else torch.empty(self.rows, self.width, dtype=out.dtype)
        self._last_norm(to)
        if wanted is not None:
            torch.index_select(to, 0, wanted, out=out)

    def _last_norm(self, out: Tensor) -> None:
        x, part, to = (self.at["x"], self.width), (self.at["part"], self.width), (out.data_ptr(), self.width)
        last, final = self.work.last_norm, self.work.final_norm
        residual = _NOWHERE if self.fuses else x
        if last is not None:  # post-norm
            self._norm(last, part, to if final is None else x, self.rows, residual=residual)
            if final is not None:
                self._norm(final, x, to, self.rows)
        elif final is not None:
            self._norm(final, x if self.fuses else part, to, self.rows, residual=residual)
        else:
            self._add([x] if self.fuses else [x, part], to, self.rows)

    # The steps of a layer -----------------------------------------------------------------------------------

    def _entered(self, norm: NormAddresses | None, order: NormOrder, first: int, count: int, *, adds: bool) -> Rows:
        """What a matmul of rows [first, first + count) reads: x, with the last `part` where it `adds`, normed."""
        at = first * self.width * self.size
        x, part = (self.at["x"] + at, self.width), (self.at["part"] + at, self.width)
        if order is NormOrder.POST:
            if adds:
                assert norm is not None
                self._norm(norm, part, x, count, residual=_NOWHERE if self.fuses else x)
            return x
        waits = adds and not self.fuses
        if norm is None:
            if waits:
                self._add([x, part], x, count)
            return x
        y = (self.at["y"], self.width)
        if waits:
            self._norm(norm, part, y, count, residual=x, total=x)
        else:
            self._norm(norm, x, y, count)
        return y

    def _qkv(self, layer: PackedLayer, number: int) -> None:
        n, a = layer.qkv.n, layer.spec.attention
        places = a.rotary is not None or a.q_norm is not None or a.k_norm is not None or self.call.cache is not None
        step = max(self.rows, 1) if self.wire is None else CHUNK_ROWS
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            to = (self.at["qkv"] + first * n * self.size, n)
            self._linear(layer.qkv, self._attention_input(layer, number, first, count), to, count)
            if places:
                self._place(layer, number, first, count)

    def _attention_input(self, layer: PackedLayer, number: int, first: int, count: int) -> Rows:
        return self._entered(layer.into_attention, layer.spec.order, first, count, adds=number > 0)

    def _place(self, layer: PackedLayer, number: int, first: int, count: int) -> None:
        """Norms the queries and keys of these tokens, rotates them by their positions, and puts keys and values into
        the cache."""
        a, n, cache = layer.spec.attention, layer.qkv.n, self.call.cache
        d, at = a.head_dim, self.at["qkv"] + first * n * self.size
        for norm, skipped, heads in ((layer.q_norm, 0, a.heads), (layer.k_norm, a.heads, a.kv_heads)):
            if norm is not None:
                rows = (at + skipped * d * self.size, n)
                self._norm(norm, rows, rows, count, width=d, heads=heads)
        if a.rotary is not None:
            assert self.inputs.positions is not None
            cos, sin = self.inputs.rotated(a.rotary, self.work.tables)
            _core.rotary(
                self.kernels, self.code, (at, n), (at, n), a.heads + a.kv_heads, d, cos.data_ptr(), sin.data_ptr(),
                self.inputs.positions.data_ptr() + 8 * first, 1.0, count, self.threads,
            )  # fmt: skip
        if cache is None:
            return
        assert self.keys is not None
        place, to_head = self.keys.places.data_ptr() + 8 * first, cache.capacity * d * self.size
        for skipped, stored in ((a.heads, cache.keys), (a.heads + a.kv_heads, cache.values)):
            _core.store_heads(
                at + skipped * d * self.size, n * self.size, stored[number].data_ptr(), to_head, place,
                a.kv_heads, d * self.size, count, self.threads,
            )  # fmt: skip

    def _attend(
        self, layer: PackedLayer, number: int, q_at: int, cu_q: Tensor, keys: tuple[Tensor, Tensor] | None
    ) -> None:
        """From the queries at `q_at`, which lie as in qkv, to keys by start and length (None: their own); fills
        `context`."""
        a, n, qkv = layer.spec.attention, layer.qkv.n, self.at["qkv"]
        d = a.head_dim
        if self.keys is not None and self.keys.in_cache:
            cache = self.call.cache
            assert cache is not None
            to_head = cache.capacity * d
            k, v = (cache.keys[number].data_ptr(), d, to_head), (cache.values[number].data_ptr(), d, to_head)
        else:
            k, v = ((qkv + first * d * self.size, n, d) for first in (a.heads, a.heads + a.kv_heads))
        job = _core.Attention(
            (q_at, n, d), k, v, (self.at["context"], a.heads * d, d), self.code, a.heads, a.kv_heads, d,
            self.inputs.tokens, a.scale, a.left, a.right, 0, *_bias_of(layer), 0, 0, 0, 1.0,
        )  # fmt: skip
        at, count = cu_q.data_ptr(), cu_q.numel() - 1
        if keys is None:
            _core.attention(self.kernels, job, at, at, count, self.threads)
        else:
            _core.attention_at(self.kernels, job, at, keys[0].data_ptr(), keys[1].data_ptr(), count, self.threads)

    def _attend_to_last(self, layer: PackedLayer, number: int, wanted: Tensor) -> None:
        """The last layer, for the tokens asked for only: from here on x has their rows."""
        assert self.keys is not None
        qkv = self.buffers.view("qkv", self.inputs.tokens, layer.qkv.n).index_select(0, wanted)
        self._leave_out(wanted)
        one_each = torch.arange(self.rows + 1, dtype=torch.int32)
        self._attend(layer, number, qkv.data_ptr(), one_each, self.keys.of(wanted))

    def _leave_out(self, wanted: Tensor) -> None:
        x = self.buffers.view("x", self.inputs.tokens, self.width)
        x[: wanted.numel()] = x.index_select(0, wanted)
        self.rows = wanted.numel()

    def _out(self, layer: PackedLayer) -> None:
        context, k = self.at["context"], layer.out.k
        norm = layer.out_of_attention
        self._close(layer, layer.out, norm, lambda first, count: (context + first * k * self.size, k))

    def _mlp(self, layer: PackedLayer) -> None:
        self._close(layer, layer.down, layer.out_of_mlp, lambda first, count: self._middle(layer, first, count))

    def _middle(self, layer: PackedLayer, first: int, count: int) -> Rows:
        """What the last matmul of an MLP reads for rows [first, first + count)."""
        mlp, wide = layer.spec.mlp, (self.at["wide"], layer.up.n)
        activation = ACTIVATIONS[mlp.activation]
        y = self._mlp_input(layer, first, count)
        self._linear(layer.up, y, wide, count, activation=0 if mlp.gated else activation)
        if not mlp.gated:
            return wide
        gated = (self.at["gated"], layer.up.n // 2)
        _core.gate(self.kernels, self.code, wide, gated, activation, count, gated[1], self.threads)
        return gated

    def _mlp_input(self, layer: PackedLayer, first: int, count: int) -> Rows:
        return self._entered(layer.into_mlp, layer.spec.order, first, count, adds=True)

    def _close(
        self, layer: PackedLayer, dense: PackedDense, norm: NormAddresses | None, read: Callable[[int, int], Rows]
    ) -> None:  # fmt: skip
        """The last matmul of a block, of what `read` gives for some rows, and the `norm` of what it gives: into `part`,
        or into x itself where the matmul adds x and no norm follows."""
        x, part = (self.at["x"], self.width), (self.at["part"], self.width)
        if self.wire is not None:
            run: Fill = lambda f, n, to: self._linear(dense, read(f, n), to, n, with_bias=False)  # noqa: E731
            self._sum(run, dense.bias_at, part, self.width)
            if norm is not None:
                self._norm(norm, part, part, self.rows)
        elif norm is None:
            out = x if layer.spec.order is NormOrder.PRE else part
            self._linear(dense, read(0, self.rows), out, self.rows, residual=x)
        else:
            self._linear(dense, read(0, self.rows), part, self.rows)
            self._norm(norm, part, part, self.rows)
            self._add([x, part], x, self.rows)

    def _sum(self, fill: Fill, bias: int, out: Rows, width: int) -> None:
        """out = the sum over ranks of what `fill` gives, + bias."""
        assert self.wire is not None
        self.wire.sum_rows(self.kernels, self.code, fill, self.rows, width, bias=bias, out=out, threads=self.threads)

    # Single native calls --------------------------------------------------------------------------------------

    def _linear(
        self, dense: PackedDense, x: Rows, out: Rows, rows: int, *, activation: int = 0, with_bias: bool = True,
        residual: Rows = _NOWHERE,
    ) -> None:  # fmt: skip
        _core.linear(
            self.kernels, *x, dense.at, self.code, rows, dense.n, dense.k, dense.bias_at if with_bias else 0,
            activation, *residual, *_NOWHERE, *out, self.threads, _SCHEDULE,
        )  # fmt: skip

    def _norm(
        self, norm: NormAddresses, x: Rows, out: Rows, rows: int, *, residual: Rows = _NOWHERE, total: Rows = _NOWHERE,
        width: int | None = None, heads: int = 1,
    ) -> None:  # fmt: skip
        _core.norm(
            self.kernels, self.code, norm.is_rms, x, 0, residual, norm.weight, norm.bias, norm.eps, total, out,
            0, 0, rows, self.width if width is None else width, heads, self.threads,
        )  # fmt: skip

    def _add(self, terms: list[Rows], out: Rows, rows: int) -> None:
        order = self.work.tables.in_order(rows).data_ptr()
        _core.gather(self.kernels, self.code, [(*t, order) for t in terms], out, rows, self.width, self.threads)


def _bias_of(layer: PackedLayer) -> tuple[int, int]:
    """The address of the bias by distance, and how far it reaches."""
    return (0, 0) if layer.bias is None else (layer.bias.data_ptr(), layer.bias.shape[1] // 2)
