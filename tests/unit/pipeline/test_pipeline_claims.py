"""What the papers say of the schedules, in the simulator: who is faster, by how much, and when not."""

from __future__ import annotations

import pytest
from pipeline_values import SIZES

from weft.pipeline import Costs, Transfers, schedule

EPSILON = 1e-9


@pytest.mark.parametrize("comm", [0.1, 0.5, 1.0, 2.0])
def test_eager_is_never_slower_than_1f1b(comm: float) -> None:
    faster = 0
    for stages, microbatches in SIZES:
        spent = Costs.uniform(stages, transfer=comm)
        plain, eager = (
            schedule(name, stages=stages, microbatches=microbatches).simulate(spent) for name in ("1f1b", "eager-1f1b")
        )
        assert eager.seconds <= plain.seconds + EPSILON
        faster += eager.seconds < plain.seconds - EPSILON
        if comm <= 1:  # what fits behind a forward is hidden altogether
            assert eager.seconds == pytest.approx(eager.lower_bound)
    assert faster == 50  # all with two or more stages and three or more micro-batches


def test_eager_equals_1f1b_and_the_bound_if_transfers_cost_nothing() -> None:
    for stages, microbatches in SIZES:
        spent = Costs.uniform(stages)
        expected = 3 * (microbatches + stages - 1)
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            found = schedule(name, stages=stages, microbatches=microbatches).simulate(spent)
            assert found.seconds == found.lower_bound == expected
            assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("comm", [0.0, 0.5, 1.0])
def test_delay_is_never_slower_than_eager(comm: float) -> None:
    for stages, microbatches in SIZES:
        spent = Costs.uniform(stages, transfer=comm)
        names = ("eager-1f1b", "eager-1f1b+delay")
        eager, delay = (schedule(n, stages=stages, microbatches=microbatches).simulate(spent).seconds for n in names)
        assert delay <= eager + EPSILON
        if stages > 1:
            assert delay < eager  # the last gradient's way is shorter


def test_zero_bubble_leaves_a_third_of_the_bubble() -> None:
    """The bubble of ZB-H1 is (n-1)(F+I-W), that of 1F1B (n-1)(F+I+W)."""
    for stages in range(1, 7):
        for microbatches in range(stages, 13):
            found = schedule("zero-bubble", stages=stages, microbatches=microbatches).simulate(Costs.uniform(stages))
            assert found.seconds == 3 * microbatches + stages - 1
            assert found.seconds == found.lower_bound


def test_stopping_for_transfers_is_slower() -> None:
    for stages, microbatches in SIZES[::2]:
        made = schedule("1f1b", stages=stages, microbatches=microbatches)
        spent = Costs.uniform(stages, transfer=0.5)
        stopping = made.simulate(spent, transfers=Transfers.SYNCHRONOUS).seconds
        assert stopping >= made.simulate(spent).seconds - EPSILON
        free = Costs.uniform(stages)
        assert made.simulate(free, transfers=Transfers.SYNCHRONOUS).seconds == made.simulate(free).seconds
