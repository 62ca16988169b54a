"""What is asked of a reshard: the tensors with their layouts on both sides, and the strategy.

strategy     unit                  sender                  way                        order
send_recv    each taker's box      the least busy source   to each taker              as found
all_gather   each box              the least busy source   to each host, whose ranks  as found
                                                           receive parts in turn
broadcast    each box              the least busy source   from host to host          searched (paper)
optimal      all boxes of a kind   all sources, by flow    whatever loads cards least open shop

On the way terms may be reduced and types cast. What torch cannot do is tried on one element when a plan is made, so
that a type that cannot be added is an error on every rank before a byte moves, and not on one of them in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from weft.layout import Layout, Partial, Replicate


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be moved: what it is called, what it is, and how it lies before and after.

    dtype is the source's, `dst_dtype` the destination's; the values are cast on the way if they differ.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout
    dst_dtype: torch.dtype

    def __post_init__(self) -> None:
        for side in ("src", "dst"):
            object.__setattr__(self, side, getattr(self, side).normal(len(self.shape)))
        op = self.src.reduce_op
        reason = None if op is None else why_not_reduced(self.dtype, op)
        if reason is not None:
            raise ValueError(
                f"tensor {self.name!r} of {self.dtype} has terms that are to be reduced by {op!r}: {reason}; cast it "
                "before, or reduce in another way"
            )
        reason = why_not_cast(self.dtype, self.dst_dtype)
        if reason is not None:
            raise ValueError(f"tensor {self.name!r} of {self.dtype} cannot become {self.dst_dtype}: {reason}")
        if self.dst.partial_axes:
            raise ValueError(
                f"destination of tensor {self.name!r} is {self.dst.placements}, expected Shard or Replicate; "
                "a tensor can be read from Partial terms, but not be made into them"
            )

    @property
    def wire_dtype(self) -> torch.dtype:
        """What travels: the narrower type, so that a cast saves bytes; terms are reduced before the cast."""
        narrower = self.dst_dtype.itemsize <= self.dtype.itemsize
        return self.dst_dtype if narrower and not self.src.partial_axes else self.dtype

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor on the wire."""
        return math.prod(self.shape) * self.wire_dtype.itemsize

    @property
    def terms(self) -> int:
        """How many terms a Partial source has; 1 of any other."""
        return int(self.src.holders(len(self.shape)).shape[1])

    @property
    def gradient(self) -> TensorSpec:
        """The way back, dst -> src, with Replicate where the source is Partial: each term's gradient is the whole one.

        >>> from weft.layout import Mesh
        >>> a = Layout(Mesh.grid(1, 2), [Replicate(), Partial()])
        >>> b = Layout(Mesh.grid(1, 2), [Replicate(), Replicate()])
        >>> TensorSpec("x", (4,), torch.float32, a, b, torch.float32).gradient.dst.notation(1)
        'R'
        """
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in self.src.placements)
        back = Layout(self.src.mesh, whole, self.src.order)
        return replace(self, src=self.dst, dst=back, dtype=self.dst_dtype, dst_dtype=self.dtype)


def hosts_by_rank(tensors: Iterable[TensorSpec]) -> dict[int, int]:
    """The host of each rank of all meshes, which must agree on it."""
    host_of: dict[int, int] = {}
    for mesh in {layout.mesh: None for tensor in tensors for layout in (tensor.src, tensor.dst)}:
        for rank, host in zip(mesh.ranks, mesh.hosts, strict=True):
            if host_of.setdefault(rank, host) != host:
                raise ValueError(
                    f"rank {rank} is on host {host_of[rank]} in one mesh and on host {host} in another, expected one "
                    "host for each rank; number the hosts of both meshes alike"
                )
    return host_of


@dataclass(frozen=True)
class Strategy:
    """How a plan is made; `STRATEGIES` has the named ones.

    each_taker: a rank is served for itself, not through another rank of its host
    relay:      hosts pass a chunk on
    rotate:     the ranks of a host receive chunks in turn
    """

    each_taker: bool = False
    relay: bool = False
    rotate: bool = False
    senders: Literal["balanced", "split"] = "balanced"
    order: Literal["given", "search", "open_shop"] = "given"


STRATEGIES = {
    "send_recv": Strategy(each_taker=True),
    "all_gather": Strategy(rotate=True),
    "broadcast": Strategy(relay=True, order="search"),
    "optimal": Strategy(senders="split", order="open_shop"),
}


def check_options(strategy: str, chunk_bytes: int | None) -> None:
    """Raises unless there is such a strategy, and a message of this size is worth sending."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if chunk_bytes is not None and chunk_bytes < 1024:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, expected 1024 or more, or None to have it chosen")


REDUCE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, term: total.add_(term),
    "avg": lambda total, term: total.add_(term),
    "product": lambda total, term: total.mul_(term),
    "max": lambda total, term: torch.maximum(total, term, out=total),
    "min": lambda total, term: torch.minimum(total, term, out=total),
}
"""How a term is reduced into what came before it."""
LINEAR = ("sum", "avg")
"""Those whose gradient is the same for every term."""


def average(total: Tensor, terms: int) -> None:
    """Makes the sum of all terms their mean."""
    total.div_(terms)


@cache
def why_not_reduced(dtype: torch.dtype, op: str) -> str | None:
    """Why terms of a type cannot be reduced so; None if they can.

    >>> why_not_reduced(torch.float32, "avg")
    >>> why_not_reduced(torch.bool, "sum")
    'sums of torch.bool are not defined'
    """
    if op not in REDUCE:
        return f"expected one of {', '.join(REDUCE)}"
    if dtype == torch.bool and op in LINEAR:
        return f"sums of {dtype} are not defined"
    try:
        total = torch.ones(2, device="cpu").to(dtype)
        REDUCE[op](total, total.clone())
        if op == "avg":
            average(total, 2)
    except (RuntimeError, TypeError) as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None


@cache
def why_not_cast(dtype: torch.dtype, to: torch.dtype) -> str | None:
    """Why elements of a type cannot become another one; None if they can.

    >>> why_not_cast(torch.float32, torch.bfloat16)
    >>> why_not_cast(torch.complex64, torch.float32)
    'the imaginary part would be lost'
    """
    if dtype.is_complex and not to.is_complex:
        return "the imaginary part would be lost"
    try:
        source = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
        torch.empty(2 * to.itemsize, dtype=torch.uint8, device="cpu").view(to).copy_(source)
    except (RuntimeError, TypeError) as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None
