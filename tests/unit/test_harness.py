"""The benchmark harness: its choices under a clock and a load that are told what to say, and one real run."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import BENCHMARKS, load, machine
from weft.bench.harness import Case, Measurement, Round, measure, relative_spread, select_rounds, track


@dataclass
class World:
    """A clock that only systems move, and a load by script: the cores that others use in each round."""

    foreign: Sequence[float] = ()
    now: float = 0.0
    calls: list[str] = field(default_factory=list)
    samples: int = 0
    others: float = 0.0
    last: float = 0.0

    def clock(self) -> float:
        return self.now

    def sample(self) -> machine.Sample:
        if self.samples % 2:  # the end of a round
            number = self.samples // 2
            cores = self.foreign[number] if number < len(self.foreign) else 0.0
            self.others += cores * (self.now - self.last)
        self.samples += 1
        self.last = self.now
        return machine.Sample(self.now, self.now + self.others, self.now)

    def system(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds

        return call


def measured(world: World, times: dict[str, float], **options: object) -> Measurement:
    case = Case("case", {name: world.system(name, seconds) for name, seconds in times.items()}, labels={"n": 3})
    return measure(case, meter=world, clock=world.clock, **options)  # type: ignore[arg-type]


def test_a_short_call_is_repeated_until_it_can_be_timed() -> None:
    world = World()
    result = measured(world, {"short": 0.001, "long": 0.2}, rounds=7, warmup=1, min_seconds=0.05)
    assert result.median("short") == pytest.approx(0.001)
    assert result.median("long") == pytest.approx(0.2)
    assert result.ratio("long", "short") == pytest.approx(200)
    # Two systems: a turn lasts 0.125 s, so that a round lasts 0.25 s. 1 warm-up; 1, 10 and 100 calls to
    # calibrate.
    assert world.calls.count("short") == 1 + 1 + 10 + 100 + 7 * 125
    assert world.calls.count("long") == 1 + 1 + 7


def test_the_order_changes_from_round_to_round_and_follows_the_seed() -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        world = World()
        measured(world, dict.fromkeys("abc", 1.0), rounds=20, warmup=0, seed=seed)
        rounds = world.calls[3:]
        return [tuple(rounds[i : i + 3]) for i in range(0, len(rounds), 3)]

    assert orders(0) == orders(0) != orders(1)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders(0))
    followers = {pair for order in orders(0) for pair in itertools.pairwise(order)}
    assert len(followers) == 6, "each system follows each other one at some time"


def test_a_disturbed_round_is_thrown_away_and_repeated() -> None:
    result = measured(World(foreign=[0.0, 0.5, 0.09, 0.2]), {"a": 1.0}, rounds=3, warmup=0)
    assert result.disturbed == 0
    assert [r.foreign for r in result.rounds] == pytest.approx([0.0, 0.09, 0.0])


def test_what_could_not_be_had_undisturbed_is_marked() -> None:
    world = World(foreign=[0.9, 0.3, 0.05, 0.6, 0.4])
    result = measured(world, {"a": 1.0}, rounds=3, warmup=0, max_retries=2)
    assert len(world.calls) == 1 + 5
    assert sorted(r.foreign for r in result.rounds) == pytest.approx([0.05, 0.3, 0.4])
    assert result.disturbed == 2
    assert result.row()["disturbed"] == 2


def test_ranks_agree_on_calls_times_and_rounds() -> None:
    """`agree` returns the slowest rank's value: here another rank takes twice as long."""
    world = World()
    asked: list[float] = []

    def agree(value: float) -> float:
        asked.append(value)
        return 2 * value

    result = measured(world, {"a": 0.01}, rounds=2, warmup=0, agree=agree)
    assert result.median("a") == pytest.approx(0.02)
    # Calibration: 1 call (0.02 s agreed), then 10 (0.2 s), enough for 13 calls in a turn of 0.25 s.
    assert len(world.calls) == 1 + 10 + 2 * 13
    assert asked.count(0.0) == 2 * 2, "a common start before each turn, and the load after each round"


def test_row_holds_the_case_its_labels_and_each_system() -> None:
    row = measured(World(), {"torch": 0.5, "weft": 0.25}, rounds=7).row()
    assert row == {
        "case": "case",
        "n": 3,
        "torch_ms": pytest.approx(500.0),
        "torch_spread": pytest.approx(0.0, abs=1e-9),
        "weft_ms": pytest.approx(250.0),
        "weft_spread": pytest.approx(0.0, abs=1e-9),
        "disturbed": 0,
    }


@pytest.mark.parametrize(("systems", "rounds"), [({}, 7), ({"a": 1.0}, 0)])
def test_a_case_without_systems_or_rounds_is_refused(systems: dict[str, float], rounds: int) -> None:
    with pytest.raises(ValueError, match="expected at least one of each"):
        measured(World(), systems, rounds=rounds)


def test_an_error_in_a_system_is_not_swallowed() -> None:
    def broken() -> None:
        raise RuntimeError("broken system")

    with pytest.raises(RuntimeError, match="broken system"):
        measure(Case("case", {"broken": broken}))


@given(st.lists(st.floats(0, 1), max_size=20), st.integers(1, 10))
def test_selection_prefers_quiet_rounds_in_order_then_the_least_noisy(foreign: list[float], wanted: int) -> None:
    taken = [Round({"a": float(i)}, cores) for i, cores in enumerate(foreign)]
    kept, disturbed = select_rounds(taken, wanted=wanted, limit=0.1)
    assert len(kept) == min(wanted, len(taken))
    quiet = [r for r in taken if r.foreign <= 0.1]
    assert disturbed == sum(r.foreign > 0.1 for r in kept) == max(0, len(kept) - len(quiet))
    assert kept[: len(kept) - disturbed] == quiet[: len(kept) - disturbed]
    left_out = [r.foreign for r in taken if r not in kept]
    if disturbed and left_out:
        assert max(r.foreign for r in kept) <= min(left_out)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20), st.floats(0.1, 10))
def test_spread_does_not_depend_on_the_unit(values: list[float], factor: float) -> None:
    assert relative_spread([factor * v for v in values]) == pytest.approx(relative_spread(values), abs=1e-9)
    assert relative_spread(values) <= (max(values) - min(values)) / statistics.median(values) + 1e-12


def test_one_value_has_no_spread() -> None:
    assert relative_spread([3.0]) == 0.0


# -- the machine we run on
# -----------------------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_our_own_work_is_counted_as_our_own() -> None:
    meter = machine.NoiseMeter()
    before = meter.sample()
    burn(0.3)
    after = meter.sample()
    assert after.own - before.own >= 0.3
    assert after.own - before.own <= (after.wall - before.wall) * 1.5, "one thread cannot use more than one core"


def test_work_of_children_living_and_ended_is_our_own() -> None:
    meter = machine.NoiseMeter()
    before = meter.sample()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = meter.sample()
        child.communicate(b"\n", timeout=60)
    ended = meter.sample()
    assert living.own - before.own >= 0.3
    # What an ended child used is counted in ticks, user and system time apart: two may be lost.
    assert ended.own - before.own >= 0.3 - 0.03


def test_work_of_others_is_foreign() -> None:
    """A meter whose root is a sleeping child sees this process as somebody else."""
    code = "input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        meter = machine.NoiseMeter(root=child.pid)
        time.sleep(0.3)  # past the child's own start
        before = meter.sample()
        burn(0.5)
        after = meter.sample()
        child.communicate(b"\n", timeout=60)
    # The other processes of this machine can only add to it. Ticks of 10 ms, and sampled, hence the margin.
    assert machine.foreign_cores(before, after) * (after.wall - before.wall) >= 0.3


def test_a_real_measurement() -> None:
    case = Case("sleep", {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)})
    result = measure(case, rounds=3, max_retries=0)
    assert len(result.rounds) == 3
    assert min(result.seconds("short")) >= 0.002
    assert min(result.seconds("long")) >= 0.02
    assert all(r.foreign >= 0 for r in result.rounds)
    assert result.disturbed == sum(r.foreign > 0.1 for r in result.rounds)


def test_tracking_gives_the_items_and_prints_nothing_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(track(range(3), title="counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_every_benchmark_of_the_table_is_one() -> None:
    for name in BENCHMARKS:
        benchmark = load(name)
        assert name == benchmark.NAME
        assert benchmark.HELP
        assert callable(benchmark.run)
