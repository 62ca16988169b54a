"""What is said about a tensor before it comes: its shape and type, as numbers. Never a pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import PeerMismatch
from weft.layout import Layout

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
