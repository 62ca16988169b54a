"""Chunks as pieces of local tensors: which slices, and copying them in and out of flat bytes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.layout import Box, Layout
from weft.reshard.plan import Plan
from weft.reshard.spec import REDUCE

Index = tuple[slice, ...]


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> Iterator[Index]:
    """The elements [first, last) of a box, row by row, as few smaller boxes in the same order.

    >>> list(boxes_of_range((3, 4), 2, 8))
    [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None))]
    """
    if first >= last:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (row, start), (end, rest) = divmod(first, inner), divmod(last, inner)
    if row == end:
        yield from ((slice(row, row + 1), *box) for box in boxes_of_range(shape[1:], start, rest))
        return
    if start:
        yield from ((slice(row, row + 1), *box) for box in boxes_of_range(shape[1:], start, inner))
        row += 1
    if row < end:
        yield (slice(row, end), *(slice(0, size) for size in shape[1:]))
    yield from ((slice(end, end + 1), *box) for box in boxes_of_range(shape[1:], 0, rest))


@dataclass(frozen=True)
class _Unit:
    """A unit's place in its stream, and in the local tensor; plain numbers, because numpy's are slow one by one."""

    start: int
    stop: int
    tensor: Tensor
    low: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def flat(self) -> Tensor | None:
        """All its elements as one row, where they lie so in memory: most chunks are then one slice of it."""
        box = self.whole
        return box.view(-1) if box.is_contiguous() else None

    @property
    def whole(self) -> Tensor:
        """The unit's box in the local tensor."""
        return _cut(self.tensor, self.low, tuple(slice(0, size) for size in self.shape))


class Parts:
    """Finds the parts of chunks in the local tensors of one side of a plan.

    tensors: this rank's local tensor of each tensor of the plan that it has, by index
    boxes:   where each lies in the whole tensor
    """

    def __init__(self, plan: Plan, tensors: Mapping[int, Tensor], boxes: Mapping[int, Box]) -> None:
        self.plan = plan
        self._tensors = tensors
        self._boxes = boxes
        streams = np.arange(len(plan.streams) + 1)
        self._first = np.searchsorted(plan.units.stream, streams)  # the units of stream s: first[s] .. first[s+1]
        self._known: dict[int, tuple[list[int], list[_Unit]]] = {}
        self._views: dict[int, list[Tensor]] = {}

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The local tensors by their names in the plan."""
        return {self.plan.tensors[index].name: tensor for index, tensor in self._tensors.items()}

    def is_of(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether these tensors lie where those lie that it was made for, which it keeps alive."""
        return {i: _place(tensor) for i, tensor in tensors.items()} == {i: _place(t) for i, t in self._tensors.items()}

    def of_chunk(self, chunk: int) -> list[Tensor]:
        """Views of the local tensors, in the order of the chunk's bytes; found once."""
        if chunk not in self._views:
            self._views[chunk] = self._find(chunk)
        return self._views[chunk]

    def _find(self, chunk: int) -> list[Tensor]:
        stream, start, stop = self.plan.chunk_rows[chunk]
        if stream not in self._known:
            found = [self._unit(i) for i in range(self._first[stream], self._first[stream + 1])]
            self._known[stream] = ([unit.start for unit in found], found)
        starts, units = self._known[stream]
        item = self.plan.streams.kinds[self.plan.streams.kind[stream]][0].itemsize
        views: list[Tensor] = []
        nth = bisect_right(starts, start) - 1
        while start < stop:
            unit = units[nth]
            end = min(stop, unit.stop)
            first, last = (start - unit.start) // item, (end - unit.start) // item
            if unit.flat is not None:
                views.append(unit.flat[first:last])
            else:
                views += (_cut(unit.tensor, unit.low, box) for box in boxes_of_range(unit.shape, first, last))
            start, nth = end, nth + 1
        return views

    def of_unit(self, index: int) -> Tensor:
        """The view of a whole unit."""
        return self._unit(index).whole

    def _unit(self, index: int) -> _Unit:
        units = self.plan.units
        number, start = int(units.tensor[index]), int(units.start[index])
        box = self._boxes[number]
        low, high = units.low[index, : len(box)].tolist(), units.high[index, : len(box)].tolist()
        local = tuple(a - first for a, (first, _) in zip(low, box, strict=True))
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return _Unit(start, start + int(units.nbytes[index]), self._tensors[number], local, shape)

    def describe(self, chunk: int) -> str:
        """What a chunk is, for errors: `chunk 3 of 64, unit 1 = 'w'[0:512, 0:64]`."""
        units = self.plan.units
        stream, start, _ = self.plan.chunk_rows[chunk]
        low, high = int(self._first[stream]), int(self._first[stream + 1])
        index = low + int(np.searchsorted(units.start[low:high], start, side="right")) - 1
        tensor = self.plan.tensors[int(units.tensor[index])]
        ranges = zip(units.low[index].tolist(), units.high[index].tolist(), tensor.shape, strict=False)
        box = ", ".join(f"{a}:{b}" for a, b, _ in ranges)
        return f"chunk {chunk} of {len(self.plan.chunks)}, unit {index} = {tensor.name!r}[{box}]"

    def terms(self, chunk: int) -> int:
        """How many terms are reduced to a chunk."""
        streams = self.plan.streams
        return len(streams.holder_sets[streams.holders[self.plan.chunks.stream[chunk]]])


def check_locals(plan: Plan, rank: int, tensors: Mapping[int, Tensor], side: str) -> dict[int, Box]:
    """The boxes of this rank's tensors, by index, once they are what the plan says; `side` is "src" or "dst"."""
    boxes = plan.boxes_of(rank, side)
    for index, box in boxes.items():
        spec = plan.tensors[index]
        expected = tuple(b - a for a, b in box), spec.dtype if side == "src" else spec.dst_dtype
        given = tensors.get(index)
        got = None if given is None else (tuple(given.shape), given.dtype)
        if got != expected:
            layout: Layout = getattr(spec, side)
            raise ValueError(
                f"local {side} tensor of {spec.name!r} on rank {rank} is {got}, expected {expected} (shape, dtype) for "
                f"{layout.notation(len(spec.shape))} of {spec.shape}; give the shard that the layout says"
            )
    return boxes


def _place(tensor: Tensor) -> tuple[object, ...]:
    signs = tensor.is_conj(), tensor.is_neg()  # the same memory read in another way
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, signs


def _cut(tensor: Tensor, low: Sequence[int], box: Index) -> Tensor:
    """The box of a tensor, `low` being where its origin lies; dims that it spans are left alone."""
    for dim, (first, part) in enumerate(zip(low, box, strict=True)):
        size = part.stop - part.start
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first + part.start, size)
    return tensor


def as_flat(views: Sequence[Tensor], wire: torch.dtype) -> Tensor | None:
    """The memory of the views as one flat tensor of the wire's type; None where a copy is needed."""
    if len(views) != 1:
        return None
    (view,) = views
    ready = view.dtype == wire and view.device.type == "cpu" and view.is_contiguous()
    if not ready or view.is_conj() or view.is_neg():
        return None
    if view.dim() == 1 and view.stride(0) == 1:
        return view
    return view.as_strided((view.numel(),), (1,))  # the one element of a strided tensor may have any stride


def pack(views: Sequence[Tensor], wire: torch.dtype, memory: Tensor) -> None:
    """Copies the views, end to end and cast to the wire's type, into `memory`: uint8 [bytes]."""
    _each(views, wire, memory, lambda flat, view: flat.copy_(view))


def unpack(memory: Tensor, wire: torch.dtype, views: Sequence[Tensor]) -> None:
    """Copies what `pack` wrote into the views."""
    _each(views, wire, memory, lambda flat, view: view.copy_(flat))


def reduce_into(memory: Tensor, wire: torch.dtype, views: Sequence[Tensor], op: str) -> None:
    """Reduces the views into `memory`: what is there comes first, so that terms are added in order."""
    _each(views, wire, memory, REDUCE[op])


def _each(views: Sequence[Tensor], wire: torch.dtype, memory: Tensor, act: Callable[[Tensor, Tensor], object]) -> None:
    flat = memory.view(wire)
    at = 0
    for view in views:
        size = view.numel()
        part = flat if size == flat.numel() else flat[at : at + size]
        act(part if view.dim() == 1 else part.view(view.shape), view)
        at += size
