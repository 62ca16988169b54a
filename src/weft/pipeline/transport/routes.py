"""What is said about a tensor before it comes: its shape and type, as numbers. Never a pickle.

Which transfers follow each other on the same way, and how many of them may be under way at once. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.errors import PeerMismatch
from weft.layout import Layout
from weft.pipeline.predict.lowered import Direction, Lowered, TensorTransfer
from weft.pipeline.schedules.schedule import Action, Kind

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_MOST_DIMS = 8
_MOST_BYTES = 1 << 40
_FIXED = 4
LENGTH = _FIXED + _MOST_DIMS


@dataclass(frozen=True)
class Header:
    """A tensor that is on its way.

    step:  of which step of the pipeline, counted from its making; odd calls are told from even by `train`
    train: whether a backward pass will follow
    """

    step: int
    train: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    def to_tensor(self) -> Tensor:
        """int64 [LENGTH]."""
        if len(self.shape) > _MOST_DIMS or self.dtype not in _DTYPES or self._nbytes > _MOST_BYTES:
            raise ValueError(
                f"a tensor of shape {self.shape} and {self.dtype} leaves a stage, expected up to {_MOST_DIMS} dims, up "
                f"to {_MOST_BYTES >> 40} TiB, and one of "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            )
        rest = [0] * (_MOST_DIMS - len(self.shape))
        numbers = [self.step, int(self.train), _DTYPES.index(self.dtype), len(self.shape), *self.shape, *rest]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @property
    def _nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> Header:
        """What `to_tensor` made; numbers that it cannot have made are refused, as memory is taken by them.

        >>> header = Header(3, True, torch.bfloat16, (2, 5))
        >>> Header.from_tensor(header.to_tensor()) == header
        True

        `PeerMismatch` for numbers that say nothing of a tensor: memory is taken by them.
        """
        step, train, dtype, ndim, *sizes = given = numbers.tolist()
        is_sound = step >= 0 and train in (0, 1) and 0 <= dtype < len(_DTYPES) and 0 <= ndim <= _MOST_DIMS
        if is_sound and min(sizes) >= 0 and not any(sizes[ndim:]):
            header = cls(step, bool(train), _DTYPES[dtype], tuple(sizes[:ndim]))
            if header._nbytes <= _MOST_BYTES and max(sizes) <= _MOST_BYTES:
                return header
        raise PeerMismatch(
            f"a peer announces a tensor as {given}, expected step, 0 or 1, a type below {len(_DTYPES)}, up to "
            f"{_MOST_DIMS} dims and as many sizes; the ranks run different versions of weft, or the message is damaged"
        )


def is_cut(layout: Layout) -> bool:
    """Whether one rank's shard does not tell the whole shape."""
    cut = {axis for axes in layout.dim_axes(_MOST_DIMS) for axis in axes}
    return any(layout.mesh.shape[axis] > 1 for axis in cut)


def whole_shape(layout: Layout, shards: Mapping[int, tuple[int, ...]], what: str) -> tuple[int, ...]:
    """The shape of the whole tensor from its shards' shapes by rank; they must be what the layout makes of it.

    >>> from torch.distributed.tensor import Shard
    >>> from weft.layout import Mesh
    >>> whole_shape(Layout(Mesh.of([0, 1], hosts=[0, 0]), [Shard(0)]), {0: (3, 4), 1: (2, 4)}, "x")
    (5, 4)
    """
    first = shards[layout.mesh.ranks[0]]
    for rank, given in shards.items():
        if len(given) != len(first):
            raise ValueError(
                f"{what} has the shape {given} on rank {rank} and {first} on rank {layout.mesh.ranks[0]}, expected "
                "shards of one tensor, with the same number of dims"
            )
    shape = tuple(_total(layout, shards, dim, axes) for dim, axes in enumerate(layout.dim_axes(len(first))))
    for rank, given in shards.items():
        expected = layout.local_shape(shape, rank)
        if given != expected:
            raise ValueError(
                f"{what} on rank {rank} has the shape {given}, expected {expected} as {layout.notation(len(shape))} of "
                f"{shape}; shards follow torch.chunk; for other sizes give ShardSizes in layouts="
            )
    return shape


def _total(layout: Layout, shards: Mapping[int, tuple[int, ...]], dim: int, axes: Sequence[int]) -> int:
    along = layout.mesh.array[tuple(slice(None) if axis in axes else 0 for axis in range(len(layout.mesh.shape)))]
    return sum(shards[int(rank)][dim] for rank in along.reshape(-1))


@dataclass(frozen=True, order=True)
class Route:
    """All transfers of one tensor, or of its gradient, from one stage to another.

    >>> print(Route(0, "skip", 1, 2))
    0.skip 1->2
    """

    producer: int
    tensor: str
    source: int
    target: int

    @classmethod
    def of(cls, transfer: TensorTransfer) -> Route:
        """The route that a transfer takes."""
        return cls(transfer.producer, transfer.tensor, transfer.source, transfer.target)

    @property
    def direction(self) -> Direction:
        """Forwards to a later stage, gradients to an earlier one."""
        return Direction.FORWARD if self.source < self.target else Direction.GRADIENT

    @property
    def user(self) -> int:
        """The stage that uses the tensor: where the gradient comes from."""
        return self.target if self.direction is Direction.FORWARD else self.source

    def __str__(self) -> str:
        return f"{self.producer}.{self.tensor} {self.source}->{self.target}"


@dataclass(frozen=True)
class Leg:
    """One transfer's place: the n-th on its route, on which of the route's channels, and how urgent."""

    transfer: TensorTransfer
    route: Route
    number: int
    channel: int
    urgency: int


class Routes:
    """The routes of a lowered schedule, and the place of every transfer.

    A route has as many *channels* as its producer keeps micro-batches at once: so many tensors can exist that were
    sent and are not used yet. Transfer n takes channel n modulo that, and a receiver opens the channel again once the
    tensor is used. So a sender never waits for room unless the schedule itself is ahead of what it keeps.

    >>> from weft.pipeline import schedule
    >>> from weft.pipeline.predict.lower import lower
    >>> routes = Routes(lower(schedule("1f1b", stages=2, microbatches=4)))
    >>> {str(route): count for route, count in routes.channels.items()}
    {'0.x 0->1': 2, '0.x 1->0': 2}
    """

    def __init__(self, lowered: Lowered, channels: Mapping[Route, int] | None = None) -> None:
        """`channels` are those of several schedules that run in turn, as `join` makes them; else as many as needed."""
        self.lowered = lowered
        by_route: dict[Route, list[TensorTransfer]] = {}
        for transfer in lowered.transfers:
            by_route.setdefault(Route.of(transfer), []).append(transfer)
        urgency = {transfer: i for i, transfer in enumerate(lowered.transfers)}
        place = {a: i for actions in lowered.schedule.ranks for i, a in enumerate(actions)}
        self.channels: dict[Route, int] = {}
        self.legs: dict[TensorTransfer, Leg] = {}
        self.of: dict[Route, list[Leg]] = {}
        for route, transfers in sorted(by_route.items()):
            # In the order in which the sender makes them: it is the same on both sides, whatever is used first.
            transfers.sort(key=lambda t: place[self.maker(t)])
            used = [place[self.first_user(t)] for t in transfers]
            keeps = lowered.schedule.peak_activations[route.producer]
            wanted = max(2, keeps) if used == sorted(used) else len(transfers)
            self.channels[route] = count = min(len(transfers), wanted) if channels is None else channels[route]
            self.of[route] = [Leg(t, route, n, n % count, urgency[t]) for n, t in enumerate(transfers)]
            self.legs |= {leg.transfer: leg for leg in self.of[route]}
        if channels is not None:
            self.channels = dict(channels)

    @cached_property
    def first_channel(self) -> dict[Route, int]:
        """Channels of all routes in one row: where each route's begin."""
        first, total = {}, 0
        for route, count in self.channels.items():
            first[route], total = total, total + count
        return first

    @cached_property
    def passed_on(self) -> dict[TensorTransfer, list[Leg]]:
        """For each transfer those that its receiver makes of it: it sends the tensor on as soon as it has it."""
        found: dict[TensorTransfer, list[Leg]] = {}
        arriving = {(t.producer, t.tensor, t.microbatch, t.target): t for t in self.legs if t.source < t.target}
        for leg in self.legs.values():
            t = leg.transfer
            brought = arriving.get((t.producer, t.tensor, t.microbatch, t.source))
            if t.direction is Direction.FORWARD and brought is not None:
                found.setdefault(brought, []).append(leg)
        return found

    @property
    def total(self) -> int:
        """How many channels there are."""
        return sum(self.channels.values())

    def maker(self, transfer: TensorTransfer) -> Action:
        """The action of the sending stage after which it has the tensor, or the gradient."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.source, Kind.FORWARD, transfer.microbatch)
        return self._gradient(transfer.source, transfer.microbatch)

    def first_user(self, transfer: TensorTransfer) -> Action:
        """The action of the receiving stage that needs it."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.target, Kind.FORWARD, transfer.microbatch)
        return self._gradient(transfer.target, transfer.microbatch)

    def _gradient(self, stage: int, microbatch: int) -> Action:
        split = self.lowered.schedule.splits_backward(stage, microbatch)
        return Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, microbatch)


def join(*lowered: Lowered) -> list[Routes]:
    """The routes of several schedules that run in turn, such as training and evaluation: with channels in common."""
    channels: dict[Route, int] = {}
    for routes in map(Routes, lowered):
        for route, count in routes.channels.items():
            channels[route] = max(count, channels.get(route, 0))
    channels = dict(sorted(channels.items()))
    return [Routes(each, channels) for each in lowered]
