"""Every generated schedule, for every small number of stages and micro-batches."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pipeline_values import SIZES

from weft.pipeline import SCHEDULES, Kind, Schedule, schedule, validate
from weft.pipeline.schedules.generators import interleaved_1f1b


def warm_up(made: Schedule, rank: int) -> int:
    kinds = [action.kind for action in made.ranks[rank]]
    return next(i for i, kind in enumerate(kinds) if kind is not Kind.FORWARD)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_comes_exactly_once_and_nothing_waits_in_a_circle(name: str) -> None:
    for stages, microbatches in SIZES:
        made = schedule(name, stages=stages, microbatches=microbatches)
        count = Counter(action for actions in made.ranks for action in actions)
        assert set(count.values()) == {1}
        kinds = Counter((action.stage, action.kind) for action in count)
        for stage in range(stages):
            assert kinds[stage, Kind.FORWARD] == microbatches
            assert kinds[stage, Kind.BACKWARD] + kinds[stage, Kind.INPUT_GRADIENT] == microbatches
            assert kinds[stage, Kind.WEIGHT_GRADIENT] == kinds[stage, Kind.INPUT_GRADIENT]
        assert not validate(made).stuck
        assert Schedule.parse(str(made)) == made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpipe", lambda i, n, m: m),
        ("1f1b", lambda i, n, m: min(m, n - i)),
        ("eager-1f1b", lambda i, n, m: min(m, 2 * (n - i) - 1)),
        ("eager-1f1b+delay", lambda i, n, m: min(m, 2 * (n - i) - 1)),
        ("zero-bubble", lambda i, n, m: min(m, n - i)),
    ],
)
def test_warm_up_counts(name: str, expected: object) -> None:
    for stages, microbatches in SIZES:
        made = schedule(name, stages=stages, microbatches=microbatches)
        for stage in range(stages):
            assert warm_up(made, stage) == expected(stage, stages, microbatches)  # type: ignore[operator]


def test_peak_activations_are_as_the_papers_say() -> None:
    for n, m in SIZES:
        peaks = {name: schedule(name, stages=n, microbatches=m).peak_activations for name in SCHEDULES}
        assert peaks["gpipe"] == (m,) * n
        assert peaks["1f1b"] == tuple(min(m, n - i) for i in range(n))
        assert peaks["eager-1f1b"] == tuple(min(m, 2 * (n - i) - 1) for i in range(n))
        assert peaks["eager-1f1b+delay"] == peaks["eager-1f1b"]
        if m >= 2 * n:
            assert tuple(e - p for e, p in zip(peaks["eager-1f1b"], peaks["1f1b"], strict=True)) == tuple(
                n - i - 1 for i in range(n)
            )
        assert max(peaks["zero-bubble"]) == max(peaks["1f1b"]) == min(m, n)  # no more than 1F1B's fullest stage


def test_delay_splits_each_backward_of_eager_in_place() -> None:
    eager = schedule("eager-1f1b", stages=3, microbatches=4)
    delay = schedule("eager-1f1b+delay", stages=3, microbatches=4)
    for whole, split in zip(eager.ranks, delay.ranks, strict=True):
        words = " ".join(map(str, whole))
        assert " ".join(map(str, split)) == re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", words)


def test_zero_bubble_keeps_back_as_many_weight_gradients_as_the_stage_is_far_down() -> None:
    made = schedule("zero-bubble", stages=3, microbatches=4)
    assert " ".join(map(str, made.ranks[0])) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert " ".join(map(str, made.ranks[2])) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_interleaved_runs_on_any_number_of_ranks() -> None:
    for stages in range(1, 9):
        for ranks in range(1, stages + 1):
            for microbatches in (1, 2, 3, 5, 8, 11):
                made = interleaved_1f1b(stages, microbatches, ranks=ranks)
                validate(made)
                assert [made.rank_of(s) for s in range(stages)] == [s % ranks for s in range(stages)]


def test_interleaved_halves_the_bubble_with_two_stages_a_rank() -> None:
    ranks, microbatches = 4, 8
    steps = validate(schedule("interleaved-1f1b", stages=2 * ranks, microbatches=microbatches, ranks=ranks))
    plain = validate(schedule("1f1b", stages=ranks, microbatches=microbatches))
    assert plain.count == 2 * microbatches + 2 * (ranks - 1)
    assert steps.count == 2 * (2 * microbatches) + 2 * (ranks - 1)  # in steps of half the length


def test_forwards_only_is_a_schedule_of_its_own() -> None:
    made = schedule("eager-1f1b+delay", stages=3, microbatches=5).forward_only()
    assert not made.has_backward
    assert made.peak_activations == (1, 1, 1)
    assert validate(made).count == 7
    assert Schedule.parse(str(made)) == made


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("2f2b", {"stages": 2, "microbatches": 2}, "got the schedule '2f2b'; expected one of: gpipe, 1f1b"),
        ("1f1b", {"stages": 0, "microbatches": 2}, "got 0 stages"),
        ("1f1b", {"stages": 2, "microbatches": 0}, "0 micro-batches"),
        ("1f1b", {"stages": 4, "microbatches": 2, "ranks": 2}, "expected a rank for each stage; interleaved-1f1b"),
        ("interleaved-1f1b", {"stages": 4, "microbatches": 2, "ranks": 5}, "got ranks=5 for 4 stages"),
        ("interleaved-1f1b", {"stages": 4, "microbatches": 2, "ranks": 0}, "got ranks=0 for 4 stages"),
    ],
)
def test_what_cannot_be_generated_is_refused(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(name, **options)  # type: ignore[arg-type]
