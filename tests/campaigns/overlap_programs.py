"""What a case of the overlap campaign is: a random program of overlapped matmuls, and what it must give.

Every rank makes the inputs of all ranks from the case's number, so it knows by itself, in float64 and without a
message, what its own part of every result and gradient must be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft import overlap
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.blocks import Axis, chunk_bounds

OPS = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL)
MODES = ("grad", "no_grad", "inference", "checkpoint", "compile")
# Few shapes where the group makes the plan: it is predicted once for each.
SHAPES = ((0, 5, 3), (1, 1, 1), (7, 33, 20), (48, 64, 32), (90, 150, 80), (130, 40, 65))


@dataclass(frozen=True)
class Shape:
    """Of one rank's matmul."""

    op: Op
    m: int  # all rows
    n: int
    k: int
    dtype: torch.dtype


class Inputs:
    """Of all ranks, the same on all of them: x, w and bias of each, where rows go, and the gradient of the result."""

    def __init__(self, shape: Shape, world: int, seed: str) -> None:
        self.shape, self.world = shape, world
        dice = random.Random(seed)
        own = [torch.Generator().manual_seed(dice.getrandbits(40)) for _ in range(world)]
        ks = [shape.k] * world
        if shape.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
            bounds = chunk_bounds(shape.k, world)
            ks = [b - a for a, b in pairwise(bounds)]
        self.rows = [shape.m] * world
        if shape.op is Op.ALL_GATHER:
            bounds = chunk_bounds(shape.m, world)
            self.rows = [b - a for a, b in pairwise(bounds)]
        elif shape.op is Op.ALL_TO_ALL:
            self.rows = [max(0, shape.m - 2 * rank) for rank in range(world)]
        self.x = [_random(own[r], shape.dtype, self.rows[r], ks[r]) for r in range(world)]
        self.w = [_random(own[r], shape.dtype, shape.n, ks[r]) for r in range(world)]
        shared = _random(own[0], shape.dtype, shape.n)
        self.bias = [shared if shape.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) else _random(g, shape.dtype, shape.n)
                     for g in own]  # fmt: skip
        self.to = [torch.randint(0, world, (self.rows[r],), generator=own[r]) for r in range(world)]
        self.dy_seed = dice.getrandbits(40)

    def dy(self, rank: int, rows: int) -> Tensor:
        number = 0 if self.shape.op is Op.ALL_REDUCE else rank
        generator = torch.Generator().manual_seed(self.dy_seed + number)
        return _random(generator, self.shape.dtype, rows, self.shape.n)

    def expected(self, weights: list[Tensor], rank: int, *, bias: bool) -> list[Tensor]:
        """This rank's result, and the gradients of its x, w and bias, in float64."""
        xs, ws = ([t.detach().double().requires_grad_() for t in ts] for ts in (self.x, weights))
        bs = [t.detach().double().requires_grad_() for t in self.bias]
        add = [b if bias else b * 0 for b in bs]
        op, world = self.shape.op, self.world
        products = [x @ w.t() for x, w in zip(xs, ws, strict=True)] if op is not Op.ALL_GATHER else []
        if op is Op.ALL_GATHER:
            ys = [torch.cat(xs) @ ws[r].t() + add[r] for r in range(world)]
        elif op is Op.ALL_TO_ALL:
            full = [p + b for p, b in zip(products, add, strict=True)]
            ys = [torch.cat([full[s][self.to[s] == r] for s in range(world)]) for r in range(world)]
        else:
            total = sum(products[1:], products[0])
            bounds = chunk_bounds(self.shape.m, world)
            ys = [total + add[r] for r in range(world)]
            if op is Op.REDUCE_SCATTER:
                ys = [y[bounds[r] : bounds[r + 1]] for r, y in enumerate(ys)]
        mine = range(world) if op is not Op.ALL_REDUCE else [rank]
        loss = sum((ys[r] * self.dy(r, ys[r].shape[0]).double()).sum() for r in mine)
        loss.backward()  # type: ignore[union-attr]
        grads = [xs[rank].grad, ws[rank].grad, bs[rank].grad if bias else None]
        return [ys[rank].detach(), *(g for g in grads if g is not None)]


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def random_shape(dice: random.Random, *, few: bool) -> Shape:
    dtype = torch.bfloat16 if dice.random() < 0.25 else torch.float32
    if few:
        return Shape(dice.choice(OPS), *dice.choice(SHAPES), dtype)
    most = (400, 300, 200) if dice.random() < 0.05 else (90, 150, 80)
    return Shape(dice.choice(OPS), dice.randint(0, most[0]), dice.randint(1, most[1]), dice.randint(1, most[2]), dtype)


def random_plan(dice: random.Random, inputs: Inputs, rank: int, hosts: tuple[int, ...]) -> OverlapPlan:
    """The same on all ranks but for their own number of rows and columns."""
    shape = inputs.shape
    gathers = shape.op is Op.ALL_GATHER
    return OverlapPlan(
        shape.op, shape.m if shape.op is not Op.ALL_TO_ALL else inputs.rows[rank], shape.n, inputs.x[rank].shape[1],
        str(shape.dtype)[6:], hosts,
        transport=dice.choice(list(Transport)),
        axis=Axis.ROWS if gathers else dice.choice(list(Axis)),
        tile_m=dice.choice([3, 8, 16, 48]), tile_n=dice.choice([32, 64]),
        groups=tuple(dice.randint(1, 4) for _ in range(dice.randint(0, 5))),
    )  # fmt: skip


def call(inputs: Inputs, rank: int, x: Tensor, w: Any, bias: Tensor | None, group: Any, plan: Any) -> Tensor:
    """The op of a case, of this rank."""
    op = inputs.shape.op
    if op is Op.ALL_GATHER:
        return overlap.all_gather_matmul(x, w, group=group, bias=bias, m=inputs.shape.m, plan=plan)
    if op is Op.ALL_TO_ALL:
        return overlap.matmul_all_to_all(x, w, inputs.to[rank], group=group, bias=bias, plan=plan)
    run = overlap.matmul_reduce_scatter if op is Op.REDUCE_SCATTER else overlap.matmul_all_reduce
    return run(x, w, group=group, bias=bias, plan=plan)


# How a weight changes between two calls -------------------------------------------------------------------------


def _in_place(p: nn.Parameter, new: Tensor) -> None:
    with torch.no_grad():
        p.mul_(0.5).add_(new)


def _copy(p: nn.Parameter, new: Tensor) -> None:
    with torch.no_grad():
        p.copy_(new)


def _data(p: nn.Parameter, new: Tensor) -> None:
    p.data.mul_(0.5).add_(new)


def _data_copy(p: nn.Parameter, new: Tensor) -> None:
    p.data.copy_(new)


def _new_data(p: nn.Parameter, new: Tensor) -> None:
    p.data = new.clone()


def _numpy(p: nn.Parameter, new: Tensor) -> None:
    if p.dtype == torch.float32:
        p.detach().numpy()[...] = new.numpy()
    else:
        p.data.copy_(new)


def _stepped(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Parameter, Tensor], None]:
    def change(p: nn.Parameter, new: Tensor) -> None:
        optimizer = kind([p], lr=0.1, **options)
        p.grad = new.clone()
        optimizer.step()
        p.grad = None

    return change


CHANGES: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "in place": _in_place,
    "copy_": _copy,
    ".data in place": _data,
    ".data copy_": _data_copy,
    "new .data": _new_data,
    "numpy": _numpy,
    "sgd": _stepped(torch.optim.SGD, foreach=False),
    "sgd foreach": _stepped(torch.optim.SGD, foreach=True),
    "sgd fused": _stepped(torch.optim.SGD, fused=True),
    "adamw": _stepped(torch.optim.AdamW, foreach=False),
    "adamw foreach": _stepped(torch.optim.AdamW, foreach=True),
    "adamw fused": _stepped(torch.optim.AdamW, fused=True),
}
SWAP = "another parameter"


def close(got: Tensor, want: Tensor) -> bool:
    """To the precision of the type, on the scale of the largest element: sums of many terms cancel."""
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    tolerance = 3e-2 if got.dtype == torch.bfloat16 else 2e-5
    return got.shape == want.shape and bool(((got.double() - want).abs() <= tolerance * scale).all())
