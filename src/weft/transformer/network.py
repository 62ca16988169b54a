"""A pass whose ranks are on several hosts: the same steps on the overlapped matmuls. And which wire a group needs.

    split     long inputs: a rank has T_r rows of x; all-gather + matmul in, matmul + reduce-scatter out
    whole     short ones, as in decoding: T rows on every rank; matmul in, matmul + all-reduce out

Both give the same bits. bfloat16 without a gate is never split: a split matmul rounds before its activation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft import _core
from weft.comm.deadline import timeout_of
from weft.comm.host_collectives import HostWire, Rows
from weft.comm.window import hosts_of
from weft.kernels import PackedWeight
from weft.kernels.cpu import ACTIVATIONS, empty
from weft.models.spec import Embedding
from weft.overlap.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.transformer.call import InferenceCall
from weft.transformer.exchange import agree, exchange, gather_rows, lookup
from weft.transformer.memory import NormAddresses, PackedDense, PackedLayer, PassBuffers, Workspace
from weft.transformer.parts import Share
from weft.transformer.passes import Pass


def wire_of(
    group: ProcessGroup, width: int, dtype: torch.dtype, before: HostWire | NetworkWire | None
) -> HostWire | NetworkWire:
    """How the ranks of a group reach each other: through memory, or through the group. Collective.

    `before` is the wire of an earlier program of the same group; it is used again where it fits.
    """
    if isinstance(before, NetworkWire) or (before is not None and before.fits(width, dtype)):
        return before
    timeout = timeout_of(group)
    if len(set(hosts_of(group, timeout=timeout))) == 1:
        return HostWire(group, width, dtype, timeout=timeout)
    return NetworkWire(group)


class NetworkWire:
    """The group itself."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def gather(self, mine: Tensor, parts: list[Tensor]) -> None:
        """parts[r] becomes what rank r gave; all contiguous and of one shape and dtype."""
        exchange(self.group, [mine] * self.size, parts, what=f"gather {list(mine.shape)} {mine.dtype}")

    def new_pass(self, work: Workspace, buffers: PassBuffers, call: InferenceCall) -> NetworkPass:
        """One call."""
        return NetworkPass(work, buffers, self, call)


class NetworkPass(Pass):
    """One call."""

    def __init__(self, work: Workspace, buffers: PassBuffers, wire: NetworkWire, call: InferenceCall) -> None:
        super().__init__(work, buffers, None, call)
        self.fuses, self.group = False, wire.group
        rank, size, tokens = self.group.rank(), self.group.size(), self.inputs.tokens
        splits = work.dtype == torch.float32 or all(layer.spec.mlp.gated for layer in work.layers)
        self.share = Share.of(tokens, rank=rank, size=size) if splits else Share(tokens, rank, size, split=False)
        self.rows = self.share.mine.count

    def _begin(self) -> None:
        agree(self.group, f"{self.call.what}, inputs {self.call.tag():08x}, split={self.share.split}")

    def _embed(self, embedding: Embedding | None) -> None:
        take, vectors, width = self.share.take, self.inputs.vectors, self.work.input_width
        x = self.buffers.view("embedded", self.rows, width)
        if vectors is not None:
            x.copy_(take(vectors))
        else:
            assert embedding is not None
            x.copy_(lookup(embedding.tables[0], self.inputs.indices[0], self.work.model.words, self.share, self.group))
            if self.work.scale != 1.0:
                x.mul_(self.work.scale)
        if embedding is None:
            return
        at, order = (x.data_ptr(), width), self.work.tables.in_order(self.rows)
        indices = [take(index).contiguous() for index in self.inputs.indices[1:]]
        pairs = zip(embedding.tables[1:], indices, strict=True)
        tables = [(*at, order.data_ptr()), *((t.data_ptr(), t.stride(0), i.data_ptr()) for t, i in pairs)]
        if len(tables) > 1:
            _core.gather(self.kernels, self.code, tables, at, self.rows, width, self.threads)
        self._embedded(at)

    def _qkv(self, layer: PackedLayer, number: int) -> None:
        y = self._attention_input(layer, number, 0, self.rows)
        self._column(layer.qkv, y, self.buffers.view("qkv", self.inputs.tokens, layer.qkv.n))
        self._place(layer, number, 0, self.inputs.tokens)

    def _column(self, dense: PackedDense, y: Rows, out: Tensor, *, activation: int = 0) -> None:
        """out [tokens, N] = activation(all rows of y times the rank's columns)."""
        if not self.share.split:
            self._linear(dense, y, (out.data_ptr(), dense.n), self.rows, activation=activation)
            return
        name = "x" if y[0] == self.at["x"] else "y"
        rows = self.buffers.view(name, self.rows, self.width)
        out.copy_(all_gather_matmul(rows, self._weight(dense), group=self.group, bias=dense.bias, m=self.share.tokens))
        if activation:
            at = (out.data_ptr(), dense.n)
            _core.gate(
                self.kernels, self.code, at, at, activation, out.shape[0], dense.n, self.threads, gated=False
            )  # fmt: skip

    def _row(self, dense: PackedDense, x: Tensor, norm: NormAddresses | None) -> None:
        """part = the `norm` of the sum over ranks of x times the rank's rows, + bias."""
        op = matmul_reduce_scatter if self.share.split else matmul_all_reduce
        y = op(x, self._weight(dense), group=self.group, bias=dense.bias)
        self.buffers.view("part", self.rows, self.width).copy_(y)
        if norm is not None:
            part = (self.at["part"], self.width)
            self._norm(norm, part, part, self.rows)

    def _out(self, layer: PackedLayer) -> None:
        self._row(layer.out, self.buffers.view("context", self._tokens, layer.out.k), layer.out_of_attention)

    def _mlp(self, layer: PackedLayer) -> None:
        mlp, n = layer.spec.mlp, layer.up.n
        y, wide = self._mlp_input(layer, 0, self.rows), self.buffers.view("wide", self._tokens, n)
        activation = ACTIVATIONS[mlp.activation]
        self._column(layer.up, y, wide, activation=0 if mlp.gated else activation)
        if mlp.gated:
            gated = self.buffers.view("gated", self._tokens, n // 2)
            at, to = (wide.data_ptr(), n), (gated.data_ptr(), n // 2)
            _core.gate(self.kernels, self.code, at, to, activation, self._tokens, n // 2, self.threads)
            wide = gated
        self._row(layer.down, wide, layer.out_of_mlp)

    def _leave_out(self, wanted: Tensor) -> None:
        """The rows asked for, from whoever has them, to all ranks; from here on nothing is split."""
        share, count = self.share, wanted.numel()
        x = self.buffers.view("x", self.rows, self.width)
        if not share.split:
            super()._leave_out(wanted)
        else:
            runs = [share.of_rank(r) for r in range(share.size)]
            places = [((wanted >= r.first) & (wanted < r.end)).nonzero().squeeze(1) for r in runs]
            mine = x.index_select(0, wanted[places[share.rank]] - share.mine.first)
            incoming = [x.new_empty(at.numel(), self.width) for at in places]
            what = f"{count} of {share.tokens} rows, {self.width} {x.dtype}"
            exchange(self.group, [mine] * share.size, incoming, what=what)
            self.rows = count
            x = self.buffers.view("x", count, self.width)
            for at, rows in zip(places, incoming, strict=True):
                x[at] = rows
        self.share = Share(count, share.rank, share.size, split=False)

    def _finish(self, wanted: Tensor | None, out: Tensor) -> None:
        rows = empty(self.rows, self.width, dtype=out.dtype)
        self._last_norm(rows)
        whole = gather_rows(rows, self.share, self.group)
        out.copy_(whole if wanted is None else whole.index_select(0, wanted))

    @property
    def _tokens(self) -> int:
        return self.share.tokens

    def _weight(self, dense: PackedDense) -> PackedWeight:
        return PackedWeight(dense.data, dense.n, dense.k, self.kernels.name)
