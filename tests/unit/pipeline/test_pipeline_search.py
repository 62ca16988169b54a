"""The search for a schedule, against all schedules that there are, and against the known ones within its limits."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.pipeline import SCHEDULES, Costs, Schedule, schedule, simulate
from weft.pipeline.schedules.search import actions_of


def all_words(microbatches: int, limit: int) -> list[str]:
    """Every order in which a rank can take its micro-batches without keeping more than `limit`."""
    found: list[str] = []

    def grow(word: str, forwards: int, gradients: int, owed: int, live: int) -> None:
        if forwards == gradients == microbatches and not owed:
            found.append(word)
        if forwards < microbatches and live < limit:
            grow(word + "F", forwards + 1, gradients, owed, live + 1)
        if gradients < forwards:
            grow(word + "I", forwards, gradients + 1, owed + 1, live)
            grow(word + "B", forwards, gradients + 1, owed, live - 1)
        if owed:
            grow(word + "W", forwards, gradients, owed - 1, live - 1)

    grow("", 0, 0, 0, 0)
    return found


def brute_force(limits: list[int], microbatches: int, costs: Costs) -> float:
    """Seconds of the shortest step that there is."""
    seconds = float("inf")
    for words in itertools.product(*(all_words(microbatches, limit) for limit in limits)):
        lists = tuple(actions_of(stage, word) for stage, word in enumerate(words))
        made = Schedule("any", len(words), microbatches, lists)
        if not made.steps().stuck:
            seconds = min(seconds, simulate(made, costs).seconds)
    return seconds


def random_case(rng: random.Random, stages: int, microbatches: int) -> tuple[Costs, list[int]]:
    forward, inputs, weights = ([rng.randint(1, 6) / 2 for _ in range(stages)] for _ in range(3))
    together = [i + w - rng.choice((0.0, 0.0, 0.25)) for i, w in zip(inputs, weights, strict=True)]
    costs = Costs(tuple(forward), tuple(together), tuple(inputs), tuple(weights), rng.randint(0, 6) / 4)
    return costs, [rng.randint(1, microbatches) for _ in range(stages)]


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_two_percent_shorter(seed: int) -> None:
    rng = random.Random(seed)
    stages, microbatches = rng.choice([(2, 2), (3, 2), (2, 3)])
    costs, limits = random_case(rng, stages, microbatches)
    if microbatches == 3:
        limits[rng.randrange(2)] = 1  # else there are 15,000 orders
    found = schedule("search", stages=stages, microbatches=microbatches, memory=limits, costs=costs)
    assert all(peak <= limit for peak, limit in zip(found.peak_activations, limits, strict=True))
    assert found.simulate(costs).seconds <= 1.02 * brute_force(limits, microbatches, costs)


def test_no_known_schedule_within_the_limits_is_shorter() -> None:
    costs, _ = random_case(random.Random(100), 3, 4)
    for memory in (3, [3, 2, 1], None):
        limits = [memory] * 3 if isinstance(memory, int) else memory or [4, 4, 4]
        found = schedule("search", stages=3, microbatches=4, memory=memory, costs=costs)
        assert found.name == "search"
        assert all(peak <= limit for peak, limit in zip(found.peak_activations, limits, strict=True))
        for name in SCHEDULES:
            known = schedule(name, stages=3, microbatches=4)
            fits = all(p <= limit for p, limit in zip(known.peak_activations, limits, strict=True))
            if fits and len(known.ranks) == 3:
                assert found.simulate(costs).seconds <= known.simulate(costs).seconds, (name, memory)


def test_less_memory_is_never_faster_and_one_micro_batch_is_no_pipeline() -> None:
    costs = Costs.uniform(3, transfer=0.25)
    times = []
    for memory in (1, 2, 3):
        found = schedule("search", stages=3, microbatches=3, memory=memory, costs=costs)
        times.append(found.simulate(costs).seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.7 * times[-1]


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got memory=0; expected the most micro-batches .* at least 1"):
        schedule("search", stages=2, microbatches=2, memory=0)
    with pytest.raises(ValueError, match=r"got memory=\[1\]; expected .* one for each of the 2 ranks"):
        schedule("search", stages=2, microbatches=2, memory=[1])
    with pytest.raises(ValueError, match="got costs of 3 stages for 2"):
        schedule("search", stages=2, microbatches=2, costs=Costs.uniform(3))
    with pytest.raises(ValueError, match="got ranks=1 for 2 stages of search; expected a rank for each stage"):
        schedule("search", stages=2, microbatches=2, ranks=1)
    with pytest.raises(ValueError, match="got memory or costs for the schedule 1f1b"):
        schedule("1f1b", stages=2, microbatches=2, memory=3)
