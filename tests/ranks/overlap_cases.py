"""Random calls of the overlapped ops, for tests with ranks of one host and of several."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from weft import overlap, reference
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.blocks import Axis, chunk_bounds
from weft.overlap.executor.context import context_of


class Case:
    """Random inputs of one op, the same for everybody who has the same seed; each rank takes its own part."""

    def __init__(self, seed: int, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        dice = random.Random(seed)  # the same on all ranks
        size, rank = group.size(), group.rank()
        self.op = dice.choice([Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL])
        self.group, self.dtype = group, dtype
        most = (600, 500, 300) if dice.random() < 0.1 else (90, 150, 80)
        self.m, self.n, k = dice.randint(0, most[0]), dice.randint(1, most[1]), dice.randint(1, most[2])
        own = torch.Generator().manual_seed(1000 * seed + rank)
        shared = torch.Generator().manual_seed(seed)
        shards = chunk_bounds(self.m, size)
        self.rows = shards[rank + 1] - shards[rank]
        if self.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):  # uneven, and empty, shards of K
            bounds = chunk_bounds(k, size)
            k = bounds[rank + 1] - bounds[rank]
        if self.op is Op.ALL_TO_ALL:
            self.m = max(0, self.m + rank * dice.randint(-3, 3))
        self.k = k
        self.x = self._random(self.rows if self.op is Op.ALL_GATHER else self.m, k, generator=own)
        self.w = self._random(self.n, k, generator=own)
        self.bias = self._random(self.n, generator=shared) if dice.random() < 0.7 else None
        self.destinations = torch.randint(0, size, (self.m,), generator=own)
        self.plans = [self._plan(dice) for _ in range(2)]
        self.dy_seed = seed if self.op is Op.ALL_REDUCE else 1000 * seed + rank

    def _random(self, *shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(self.dtype)

    def _plan(self, dice: random.Random) -> OverlapPlan:
        return OverlapPlan(
            self.op, self.m, self.n, self.k, str(self.dtype)[6:],
            hosts=context_of(self.group).hosts,
            transport=dice.choice(list(Transport)),
            axis=Axis.ROWS if self.op.gathers else dice.choice(list(Axis)),
            tile_m=dice.choice([3, 8, 16, 48]),
            tile_n=dice.choice([32, 64]),
            groups=tuple(dice.randint(1, 4) for _ in range(dice.randint(1, 6))),
        )  # fmt: skip

    def sequential(self) -> OverlapPlan:
        return OverlapPlan(**{**vars(self.plans[0]), "groups": (), "tile_m": 48, "axis": Axis.ROWS})

    def call(self, module, x, w, bias, **plan) -> torch.Tensor:
        if self.op is Op.ALL_GATHER:
            return module.all_gather_matmul(x, w, group=self.group, bias=bias, m=self.m, **plan)
        if self.op is Op.ALL_TO_ALL:
            return module.matmul_all_to_all(x, w, self.destinations, group=self.group, bias=bias, **plan)
        return getattr(module, self.op.value)(x, w, group=self.group, bias=bias, **plan)

    def run(self, module, **plan) -> list[torch.Tensor]:
        """The output, and the gradients of x, w and bias."""
        inputs = [t.clone().requires_grad_() for t in (self.x, self.w, self.bias) if t is not None]
        bias = inputs[2] if self.bias is not None else None
        y = self.call(module, inputs[0], inputs[1], bias, **plan)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(self.dy_seed))
        y.backward(dy.to(self.dtype))
        return [y.detach(), *(t.grad for t in inputs)]


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the precision of the type, on the scale of the largest element: sums of many terms cancel."""
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    tolerance = 3e-2 if want.dtype == torch.bfloat16 else 1e-5
    return got.shape == want.shape and bool(((got.float() - want.float()).abs() <= tolerance * scale).all())


def random_calls(seeds: list[int], group: dist.ProcessGroup | None = None) -> int:
    """Each case sequentially, with two random plans and with the group's own, and in plain torch; gradients too.

    Returns the number of calls, 4 a case, each with its backward pass.
    """
    for seed in seeds:
        dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
        case = Case(seed, dist.group.WORLD if group is None else group, dtype)
        want = case.run(overlap, plan=case.sequential())
        for number, (got, twin) in enumerate(zip(want, case.run(reference), strict=True)):
            assert close(got, twin), (seed, case.op, number, (got.float() - twin.float()).abs().max())
        for plan in (*case.plans, None):
            for number, (got, same) in enumerate(zip(case.run(overlap, plan=plan), want, strict=True)):
                assert torch.equal(got, same), (seed, str(plan), number)
    return 4 * len(seeds)
