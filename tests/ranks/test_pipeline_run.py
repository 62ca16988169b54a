"""Schedules that are executed, against the same model in one process: equal losses and gradients, bit by bit."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from pipeline_cases import UNET, check_step, make_batch, make_layers, make_nodes
from torch import nn

from weft.pipeline import SCHEDULES, Action, Schedule, schedule


def copies(make, *args, **options) -> tuple[list[nn.Module], list[nn.Module]]:
    return make(*args, **options), make(*args, **options)


# Every schedule -----------------------------------------------------------------------------------------------


def run_sample(world: int) -> int:
    """Every schedule that fits, over stages and micro-batches; returns how many were run."""
    count = 0
    for name in sorted(SCHEDULES):
        for stages in {1: (1, 2), 2: (2, 4), 3: (3,), 4: (4,)}[world]:
            for microbatches in {1: (1, 4), 2: (1, 2, 5), 3: (2, 5), 4: (3, 6)}[world]:
                try:
                    made = schedule(name, stages=stages, microbatches=microbatches)
                except ValueError:
                    continue
                if len(made.ranks) != world:
                    continue
                check_step(made, *copies(make_layers, stages), *make_batch(microbatches))
                count += 1
    return count


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(world: int) -> None:
    counts = run_ranks(run_sample, world, world, timeout=120.0)
    assert counts[0] >= 6, counts


def run_own_order() -> None:
    """A schedule whose stages take micro-batches in different orders, and one that mixes B with I and W."""
    lists = (
        ["0F0", "0F1", "0F2", "0B0", "0I2", "0W2", "0B1"],
        ["1F1", "1F0", "1F2", "1B0", "1I2", "1B1", "1W2"],
    )
    mine = Schedule("mine", 2, 3, tuple(tuple(map(Action.parse, actions)) for actions in lists))
    check_step(mine, *copies(make_layers, 2), *make_batch(3), exact=False, steps=2)


def test_a_schedule_of_ones_own() -> None:
    run_ranks(run_own_order, 2)


# Graphs with skips --------------------------------------------------------------------------------------------


def run_skips() -> None:
    for name in ("1f1b", "eager-1f1b", "gpipe", "eager-1f1b+delay", "zero-bubble"):
        made = schedule(name, stages=4, microbatches=5)
        check_step(made, *copies(make_nodes, UNET), *make_batch(5), graph=UNET, steps=2)


def run_skips_on_two_ranks() -> None:
    """Two stages on each rank: some edges stay on their rank, and a tensor that two stages use comes once."""
    made = schedule("interleaved-1f1b", stages=4, microbatches=4)
    check_step(made, *copies(make_nodes, UNET), *make_batch(4), graph=UNET)


def test_skips_over_four_ranks() -> None:
    run_ranks(run_skips, 4, timeout=120.0)


def test_skips_over_two_ranks() -> None:
    run_ranks(run_skips_on_two_ranks, 2)


# Shapes -------------------------------------------------------------------------------------------------------


def run_shapes() -> None:
    made = schedule("eager-1f1b", stages=2, microbatches=4)
    # Lengths differ between micro-batches, and from step to step; one has no rows at all.
    for lengths in ((3, 5, 1, 7), (7, 1, 5, 3)):
        batch = [torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length)) for length in lengths]
        targets = [torch.zeros_like(x) for x in batch]
        found = check_step(made, *copies(make_layers, 2), batch, targets, steps=2)
        assert found["buffer_bytes"] < 64 << 10
    # A batch that does not divide: the first micro-batches have one row more.
    check_step(made, *copies(make_layers, 2), torch.randn(7, 3, 8), torch.randn(7, 3, 8))
    half = [layer.to(torch.bfloat16) for layer in make_layers(2)]
    alone = [layer.to(torch.bfloat16) for layer in make_layers(2)]
    x, target = (t.to(torch.bfloat16) for t in make_batch(4))
    check_step(made, half, alone, x, target)


def test_shapes_and_types_of_micro_batches() -> None:
    run_ranks(run_shapes, 2)


# Options ------------------------------------------------------------------------------------------------------


def run_options() -> None:
    made = schedule("eager-1f1b+delay", stages=2, microbatches=4)
    # Dropout: the same random numbers whatever the schedule, others in the next step.
    check_step(made, *copies(make_layers, 2, dropout=0.5), *make_batch(4), seed=7, steps=2)
    check_step(made, *copies(make_layers, 2, dropout=0.5), *make_batch(4), seed=7, checkpoint=True, steps=2)
    check_step(made, *copies(make_layers, 2), *make_batch(4), checkpoint=[0])
    check_step(made, *copies(make_layers, 2), *make_batch(4), transfers="synchronous", steps=2)
    for strategy in ("send_recv", "all_gather", "broadcast"):
        check_step(made, *copies(make_layers, 2), *make_batch(4), strategy=strategy)
    plain = schedule("1f1b", stages=2, microbatches=4)
    check_step(plain, *copies(make_layers, 2), *make_batch(4), transfers="synchronous")


def test_options() -> None:
    run_ranks(run_options, 2)


def run_synchronous_skips() -> None:
    for name in ("1f1b", "gpipe"):
        made = schedule(name, stages=4, microbatches=4)
        check_step(made, *copies(make_nodes, UNET), *make_batch(4), graph=UNET, transfers="synchronous")


def test_synchronous_transfers_with_skips() -> None:
    run_ranks(run_synchronous_skips, 4)
