"""Units, streams and demands: which box of a tensor goes from which ranks to which.

    boxes of the source x boxes of the destination -> units -> streams -> demands

A *unit* is the overlap of a source box and a destination box: each of its terms is held alike by some ranks,
and some ranks need it. The boxes of a layout are a product of intervals, one for each dim, so overlaps are
found dim by dim by merging two sorted lists, and a unit is one overlap of each dim: no pair of ranks is ever
looked at that has nothing in common.

A *stream* is all units, of all tensors, that the same ranks hold and the same ranks need, end to end as bytes.
All that follows (senders, chunks, order) works on streams: a model has hundreds of thousands of units, but
few kinds of them.

A *demand* is all streams that lie on the same hosts and are needed on the same hosts, their bytes end to end. The
choice of senders and the order are made for demands, because a host's network card is what is scarce.

Everything is in columns (numpy arrays): two meshes of 1,024 devices can have a million units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from weft.layout import Ints, Layout
from weft.reshard.spec import TensorSpec

Ranks = tuple[int, ...]
Hosts = tuple[int, ...]
Kind = tuple[torch.dtype, str | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Units:
    """n units, sorted by stream; `dims` is that of the tensor with the most.

    tensor:  [n] index of the tensor
    low:     [n, dims] first index of the box in the tensor, 0 for dims that it does not have
    high:    [n, dims] past the last index, 1 for dims that it does not have
    stream:  [n] index of the stream
    start:   [n] first byte in the stream
    nbytes:  [n] bytes on the wire
    """

    tensor: Ints
    low: Ints
    high: Ints
    stream: Ints
    start: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True)
class Streams:
    """s streams in columns, and the sets of ranks that the columns point to.

    kind:     [s] index into `kinds`: the type on the wire, and how terms are reduced
    holders:  [s] index into `holder_sets`: for each term the ranks that hold it
    takers:   [s] index into `taker_sets`: the ranks that need it
    nbytes:   [s] size
    """

    kind: Ints
    holders: Ints
    takers: Ints
    nbytes: Ints
    kinds: tuple[Kind, ...]
    holder_sets: tuple[tuple[Ranks, ...], ...]
    taker_sets: tuple[Ranks, ...]

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def itemsize(self) -> Ints:
        """[s] bytes of one element."""
        return np.array([dtype.itemsize for dtype, _ in self.kinds], np.int64)[self.kind]


def find_units(tensors: Sequence[TensorSpec], *, each_taker: bool = False) -> tuple[Units, Streams]:
    """The units and streams of some tensors; `each_taker` makes a unit for each rank that needs a box."""
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    known: dict[object, _Overlaps] = {}
    sets = _Sets(each_taker)
    columns: list[list[Ints]] = []
    for index, tensor in enumerate(tensors):
        key = (tensor.shape, tensor.src, tensor.dst)
        if key not in known:
            known[key] = _overlaps(*key)
        columns.append(_columns(index, tensor, known[key], sets, dims))
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)] if columns else _nothing(dims)
    return _stream(joined, sets)


@dataclass(frozen=True)
class _Overlaps:
    """The units of one shape and pair of layouts: cells of both sides, boxes, elements."""

    src: Ints
    dst: Ints
    low: Ints
    high: Ints


def _overlaps(shape: tuple[int, ...], src: Layout, dst: Layout) -> _Overlaps:
    """Every overlap of a source box and a destination box that is not empty."""
    src_cell, dst_cell = np.zeros(1, np.int64), np.zeros(1, np.int64)
    lows: list[Ints] = []
    highs: list[Ints] = []
    for (a_low, a_high), (b_low, b_high) in zip(src.intervals(shape), dst.intervals(shape), strict=True):
        a, b = _meeting(a_low, a_high, b_low, b_high)
        low, high = np.maximum(a_low[a], b_low[b]), np.minimum(a_high[a], b_high[b])
        count, before = len(a), len(src_cell)
        src_cell = (src_cell[:, None] * len(a_low) + a).reshape(-1)
        dst_cell = (dst_cell[:, None] * len(b_low) + b).reshape(-1)
        lows = [np.repeat(x, count) for x in lows] + [np.tile(low, before)]
        highs = [np.repeat(x, count) for x in highs] + [np.tile(high, before)]
    empty = np.zeros((len(src_cell), 0), np.int64)
    boxes = [np.stack(x, axis=1) if x else empty for x in (lows, highs)]
    return _Overlaps(src_cell, dst_cell, *boxes)


def _meeting(a_low: Ints, a_high: Ints, b_low: Ints, b_high: Ints) -> tuple[Ints, Ints]:
    """Which intervals of two lists meet; each list is sorted and without gaps, and may have empty ones."""
    (some_a,), (some_b,) = np.nonzero(a_high > a_low), np.nonzero(b_high > b_low)
    starts = np.union1d(a_low[some_a], b_low[some_b])
    if len(some_a) == 0 or len(some_b) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    a = some_a[np.searchsorted(a_low[some_a], starts, side="right") - 1]
    b = some_b[np.searchsorted(b_low[some_b], starts, side="right") - 1]
    return a, b


class _Sets:
    """Numbers for sets of ranks, the same for the same set whatever the layout that it comes from."""

    def __init__(self, each_taker: bool) -> None:
        self.each_taker = each_taker
        self.holders: dict[tuple[Ranks, ...], int] = {}
        self.takers: dict[Ranks, int] = {}
        self.kinds: dict[Kind, int] = {}
        self._known: dict[object, Ints] = {}

    def of_source(self, layout: Layout, ndim: int) -> Ints:
        """[cells] the number of each cell's holders."""
        key = (layout, ndim, "src")
        if key not in self._known:
            rows = (tuple(map(tuple, cell)) for cell in layout.holders(ndim).tolist())
            self._known[key] = np.array([self.holders.setdefault(row, len(self.holders)) for row in rows])
        return self._known[key]

    def of_destination(self, layout: Layout, ndim: int) -> Ints:
        """[cells, 1] the number of each cell's takers; [cells, replicas] with `each_taker`."""
        key = (layout, ndim, "dst")
        if key not in self._known:
            cells = layout.holders(ndim)[:, 0, :].tolist()
            rows = [[(rank,) for rank in cell] if self.each_taker else [tuple(sorted(cell))] for cell in cells]
            numbers = [[self.takers.setdefault(one, len(self.takers)) for one in row] for row in rows]
            self._known[key] = np.array(numbers, np.int64)
        return self._known[key]


def _columns(index: int, tensor: TensorSpec, found: _Overlaps, sets: _Sets, dims: int) -> list[Ints]:
    ndim, item = len(tensor.shape), tensor.wire_dtype.itemsize
    takers = sets.of_destination(tensor.dst, ndim)[found.dst]
    copies = takers.shape[1]
    holders = np.repeat(sets.of_source(tensor.src, ndim)[found.src], copies)
    low, high = np.repeat(found.low, copies, axis=0), np.repeat(found.high, copies, axis=0)
    elements = np.prod(high - low, axis=1, dtype=np.int64)
    padding = ((0, 0), (0, dims - ndim))
    low, high = np.pad(low, padding), np.pad(high, padding, constant_values=1)
    count = len(elements)
    kind = sets.kinds.setdefault((tensor.wire_dtype, tensor.src.reduce_op), len(sets.kinds))
    numbers = [np.full(count, value, np.int64) for value in (index, kind)]
    return [numbers[0], low, high, elements * item, numbers[1], holders, takers.reshape(-1)]


def _nothing(dims: int) -> list[Ints]:
    flat, boxes = np.zeros(0, np.int64), np.zeros((0, dims), np.int64)
    return [flat, boxes, boxes, flat, flat, flat, flat]


def _stream(columns: Sequence[Ints], sets: _Sets) -> tuple[Units, Streams]:
    tensor, low, high, nbytes, kind, holders, takers = columns
    key = (kind * (len(sets.holders) + 1) + holders) * (len(sets.takers) + 1) + takers
    _, first, stream = np.unique(key, return_index=True, return_inverse=True)
    # Streams are numbered in the order of their first unit, which is that of the tensors.
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    stream, first = rank[stream.reshape(-1)], np.sort(first)
    order = np.argsort(stream, kind="stable")
    ends = np.cumsum(nbytes[order])
    total = np.bincount(stream, weights=nbytes, minlength=len(first)).astype(np.int64)
    start = ends - nbytes[order] - (np.cumsum(total) - total)[stream[order]]
    units = Units(tensor[order], low[order], high[order], stream[order], start, nbytes[order])
    columns = kind[first], holders[first], takers[first], total
    streams = Streams(*columns, tuple(sets.kinds), tuple(sets.holders), tuple(sets.takers))
    return units, streams


@dataclass(frozen=True)
class Demand:
    """Bytes that some hosts hold and others need.

    sources: the hosts that hold all of it; with `chain`, the one where the reduced value comes to lie
    targets: the hosts that need it and do not hold it
    chain:   the hosts of the terms that are to be reduced, in order; neighbours differ; `()` without terms

    >>> Demand(nbytes=64, itemsize=4, sources=(0, 1), targets=(2,)).hops
    ()
    """

    nbytes: int
    itemsize: int
    sources: Hosts
    targets: Hosts
    chain: Hosts = ()

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The transfers between hosts that reduce the terms."""
        return tuple(zip(self.chain[:-1], self.chain[1:], strict=True))


@dataclass(frozen=True)
class Demands:
    """The demands of a set of streams.

    of_stream: [s] the demand of each stream, -1 where nothing crosses between ranks of different hosts
    start:     [s] the stream's first byte in its demand
    shares:    [h, 2] pairs (stream, host): takers on a host that holds the stream, served inside it
    chains:    for each set of holders the ranks that reduce its terms, in order; `()` for one term
    """

    demands: tuple[Demand, ...]
    of_stream: Ints
    start: Ints
    shares: Ints
    chains: tuple[Ranks, ...]


def find_demands(streams: Streams, host_of: Mapping[int, int], *, merge: bool = True) -> Demands:
    """Groups streams by the hosts of both sides; without `merge` each stream is a demand of its own."""
    chains = tuple(_chain(terms, host_of) for terms in streams.holder_sets)
    sides = [_places(terms, chain, host_of) for terms, chain in zip(streams.holder_sets, chains, strict=True)]
    needs = [tuple(sorted({host_of[rank] for rank in takers})) for takers in streams.taker_sets]
    side_index, side_of = _intern(sides)
    need_index, need_of = _intern(needs)
    side, need = side_of[streams.holders], need_of[streams.takers]
    # One number for (hosts that hold, hosts that need, size of an element).
    key = (streams.itemsize * len(side_index) + side) * len(need_index) + need
    _, first, kind = np.unique(key if merge else np.arange(len(streams)), return_index=True, return_inverse=True)
    totals = np.bincount(kind, weights=streams.nbytes, minlength=len(first)).astype(np.int64)
    demands: list[Demand] = []
    number = np.full(len(first), -1, np.int64)
    common: list[Hosts] = []
    for i, stream in enumerate(first.tolist()):
        (sources, chain), takers = side_index[side[stream]], need_index[need[stream]]
        targets = tuple(host for host in takers if host not in sources)
        common.append(() if chain else tuple(host for host in takers if host in sources))
        if (targets or chain) and totals[i]:
            number[i] = len(demands)
            item = int(streams.itemsize[stream])
            demands.append(Demand(int(totals[i]), item, sources, targets, _squeeze(chain)))
    start = np.zeros(len(streams), np.int64)
    order = np.argsort(kind, kind="stable")
    ends = np.cumsum(streams.nbytes[order])
    start[order] = ends - streams.nbytes[order] - (np.cumsum(totals) - totals)[kind[order]]
    return Demands(tuple(demands), number[kind], start, _shares(streams, kind, common, host_of), chains)


def _chain(terms: tuple[Ranks, ...], host_of: Mapping[int, int]) -> Ranks:
    """One holder of each term, in order; on the host of the one before it where that is possible."""
    if len(terms) == 1:
        return ()
    chain: list[int] = []
    for replicas in terms:
        near = [rank for rank in replicas if chain and host_of[rank] == host_of[chain[-1]]]
        chain.append((near or list(replicas))[0])
    return tuple(chain)


def _places(terms: tuple[Ranks, ...], chain: Ranks, host_of: Mapping[int, int]) -> tuple[Hosts, Hosts]:
    """The hosts that can send, and the hosts of the chain."""
    if chain:
        return (host_of[chain[-1]],), tuple(host_of[rank] for rank in chain)
    return tuple(sorted({host_of[rank] for rank in terms[0]})), ()


def _shares(streams: Streams, kind: Ints, common: Sequence[Hosts], host_of: Mapping[int, int]) -> Ints:
    """Streams with a taker that does not hold them on a host that does."""
    near = np.array([bool(hosts) for hosts in common], bool)
    found: list[tuple[int, int]] = []
    for stream in np.nonzero(near[kind])[0].tolist() if len(common) else []:
        (holders,) = streams.holder_sets[streams.holders[stream]]
        takers = {host_of[rank] for rank in streams.taker_sets[streams.takers[stream]] if rank not in holders}
        found += [(stream, host) for host in common[kind[stream]] if host in takers]
    return np.array(found, np.int64).reshape(-1, 2)


def _intern(values: Sequence[T]) -> tuple[list[T], Ints]:
    """The distinct values, and for each value its place among them."""
    index: dict[T, int] = {}
    places = [index.setdefault(value, len(index)) for value in values]
    return list(index), np.array(places, np.int64)


def _squeeze(hosts: Hosts) -> Hosts:
    return tuple(host for i, host in enumerate(hosts) if i == 0 or hosts[i - 1] != host)
