"""A pipeline over hosts with cards of their own: what crosses them, and what a dead host does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.errors import RankFailed
from weft.lab import Cluster, Rank
from weft.pipeline import Pipeline, schedule
from weft.reference import step_reference

MICROBATCHES, ROWS, WIDTH = 4, 512, 256
TENSOR_BYTES = 4 * ROWS * WIDTH


@pytest.fixture(scope="module", params=["tcp", "dma"])
def lab(namespaces: None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(hosts=3, devices=2, gbps=1.0, cards=request.param) as cluster:
        yield cluster


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), factor))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.factor)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def train(rank: Rank, strategy: str) -> tuple[int, int]:
    """A step of three stages of two ranks each, with replicated tensors between; what crossed the card in it."""
    modules = [Scale(1.0 + stage) for stage in range(3)]
    alone = [Scale(1.0 + stage) for stage in range(3)]
    x = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    target = torch.zeros_like(x)
    made = schedule("eager-1f1b", stages=3, microbatches=MICROBATCHES)
    with Pipeline(modules, [[0, 1], [2, 3], [4, 5]], made, loss_fn=loss_fn, timeout=30.0, strategy=strategy) as pipe:
        pipe.step(x, target)
        dist.barrier()  # all that belongs to the step before has arrived
        before = rank.carried()
        dist.barrier()  # or another rank of this host would send before this one has looked
        losses = pipe.step(x, target)
        dist.barrier()
        after = rank.carried()
        for _ in range(2):
            expected = step_reference(alone, x, target, microbatches=MICROBATCHES, loss_fn=loss_fn)
        (stage,) = pipe.stages
        assert torch.equal(modules[stage].factor.grad, alone[stage].factor.grad)
        assert not pipe.has_last_stage or torch.equal(losses, expected)
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize(("strategy", "copies"), [("optimal", 1), ("all_gather", 1), ("send_recv", 2)])
def test_every_tensor_enters_a_host_once(lab: Cluster, strategy: str, copies: int) -> None:
    edges = (1, 2, 1)  # each host has one or two neighbours, to which a tensor goes and from which one comes
    for rank, crossed in enumerate(lab.run(train, strategy, timeout=120.0)):
        planned = MICROBATCHES * edges[rank // 2] * copies * TENSOR_BYTES
        for measured in crossed:
            # Packet headers and the acknowledgements of as much the other way; notes and barriers.
            assert planned <= measured <= 1.12 * planned + 250_000, (rank, strategy)


def die(rank: Rank) -> None:
    class Fatal(Scale):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError("no more room on this host")

    modules = [Scale(1.0), Fatal(1.0) if rank.rank == 3 else Scale(1.0), Scale(1.0)]
    made = schedule("1f1b", stages=3, microbatches=2)
    pipe = Pipeline(modules, [[0, 1], [2, 3], [4, 5]], made, loss_fn=loss_fn, timeout=10.0)
    pipe.step(torch.ones(2, 4, WIDTH), torch.ones(2, 4, WIDTH))


def test_a_failure_is_told_over_hosts(lab: Cluster) -> None:
    with pytest.raises(RankFailed) as caught:
        lab.run(die, timeout=60.0)
    text = str(caught.value)
    assert "MemoryError: no more room on this host" in text
    assert "1F0 (stage 1, forward, micro-batch 0)" in text
