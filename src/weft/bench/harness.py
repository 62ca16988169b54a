"""Systems measured in turns, so that a figure is a ratio within one run.

A *round* gives each system one *turn*, in a new order each time. A turn repeats a short call until it lasts
long enough to be timed. A round in which others used more than a tenth of a core is repeated, as often as
`max_retries` allows in all; if there are still too few, the least disturbed ones count, and the measurement
says how many.

In a group of ranks every rank calls `measure` with the same case, and with `agree` set to a function that
returns the largest of the ranks' values (an all-reduce). Then all of them make the same number of calls, keep
the same rounds, and report the slowest rank's time. `measure_ranks` does so in a lab. Alone, `agree` is the identity.

    Case          systems that do the same work
    Measurement   their times
    Result        a measurement, and what was predicted of it and bounds it
    Row           plain values made of a result: the table shows them, `--json` stores them, `case` and labels tell them
                  apart. A summary is made of rows and of nothing else, so a row from a file counts like a new one
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from rich import progress
from rich.console import Console

from weft.bench import machine
from weft.lab import Rank
from weft.report import Column, Figure, Headline, Report, Row
from weft.timeline import Timeline, record
from weft.timeline.text import format_seconds

FOREIGN_LIMIT = 0.1
"""Cores. A round in which others used more is disturbed."""
T = TypeVar("T")
System = Callable[[], object]
Agree = Callable[[float], float]


@dataclass(frozen=True)
class BenchOptions:
    """What the command line asks of every benchmark: `quick` means the fewest rows that fill the summary.

    `cards` are the kinds of network cards that a lab's rows are measured on, one after the other.
    """

    quick: bool = False
    cards: tuple[str, ...] = ("tcp",)


def over_cards(options: BenchOptions, run: Callable[[str], Report]) -> Report:
    """`run` on each kind of cards: one table, in which a row says what it was measured on.

    The summary is that of the first kind; keys of the others begin with their names.
    """
    reports = {cards: run(cards) for cards in options.cards}
    first = reports[options.cards[0]]
    summary = dict(first.summary)
    for cards in options.cards[1:]:
        summary |= {f"{cards}_{key}": value for key, value in reports[cards].summary.items()}
    return replace(
        first,
        rows=[{**row, "cards": cards} for cards, report in reports.items() for row in report.rows],
        summary=summary,
        columns=[Column("cards", "cards"), *first.columns],
        notes=[*first.notes, CARDS_NOTE],
        figures=[
            replace(figure, title=f"{cards}: {figure.title}") for cards, r in reports.items() for figure in r.figures
        ],
    )


CARDS_NOTE = "cards: tcp, a message takes about 2 ms of the rank's core for each MB; dma, a copy"


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: the systems that do the same work, and what the work is.

    >>> Case("add", {"python": lambda: sum(range(9))}, labels={"n": 9}).labels["n"]
    9
    """

    name: str
    systems: Mapping[str, System]
    labels: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """Seconds per call of each system in one round, and the cores that others used meanwhile."""

    seconds: Mapping[str, float]
    foreign: float


@dataclass(frozen=True)
class Measurement:
    """The rounds of a case that count; `disturbed` is how many of them others disturbed."""

    case: Case
    rounds: tuple[Round, ...]
    disturbed: int

    def seconds(self, system: str) -> tuple[float, ...]:
        """Seconds per call, one a round."""
        return tuple(r.seconds[system] for r in self.rounds)

    def median(self, system: str) -> float:
        """The median seconds per call."""
        return statistics.median(self.seconds(system))

    def best(self, system: str) -> float:
        """The fewest seconds per call of all rounds: what a bound is made of."""
        return min(self.seconds(system))

    def spread(self, system: str) -> float:
        """The interquartile range over the median: half of the rounds lie within it."""
        return relative_spread(self.seconds(system))

    def ratio(self, slower: str, faster: str) -> float:
        """How many times as long `slower` takes as `faster`, by their medians."""
        return self.median(slower) / self.median(faster)

    def row(self) -> dict[str, object]:
        """The values of a row: the case's name and labels, and for each system its median and spread.

        `{"case": ..., **labels, "torch_ms": ..., "torch_spread": ..., "disturbed": 0}`
        """
        row: dict[str, object] = {"case": self.case.name, **self.case.labels}
        for system in self.case.systems:
            row[f"{system}_ms"] = self.median(system) * 1e3
            row[f"{system}_spread"] = self.spread(system)
        return {**row, "disturbed": self.disturbed}

    def without_functions(self) -> Measurement:
        """The same with the names of systems only, to be sent from the rank where the functions stay."""
        return replace(self, case=replace(self.case, systems=dict.fromkeys(self.case.systems, _elsewhere)))


@dataclass(frozen=True)
class Result:
    """A case, measured; it can travel from a rank.

    bound:      seconds that no system can beat; None where that is not known
    predicted:  seconds by system, of those that follow a plan
    timelines:  one call as its plan promised it, and under it as it was; the latter alone where nothing was promised
    facts:      what else the row says, in plain values
    """

    measured: Measurement
    bound: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    timelines: tuple[Timeline, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def prediction_errors(self) -> list[float]:
        """|predicted / measured - 1| of each system that has a plan."""
        return [abs(seconds / self.measured.median(name) - 1) for name, seconds in self.predicted.items()]

    def figure(self, title: str, *notes: str) -> Figure:
        """The timelines one above the other, with what each took."""
        words = ("predicted", "measured")[-len(self.timelines) :]
        took = ", ".join(f"{format_seconds(t.seconds)} {word}" for t, word in zip(self.timelines, words, strict=True))
        return Figure(title, self.timelines, [took, *notes])

    def headline(
        self, what: str, *, today: str, ours: str = "weft", unit: str = "ms", figures: Sequence[Figure] = ()
    ) -> Headline:
        """The line of `weft demo`: the system `ours` against the system `today`."""
        scale = 1e3 if unit == "ms" else 1.0
        seconds = self.measured.median(today), self.measured.median(ours)
        bound = None if self.bound is None else self.bound * scale
        ratio = seconds[0] / seconds[1]
        return Headline(
            what, seconds[0] * scale, seconds[1] * scale, bound, unit, ratio, self.measured.disturbed, figures
        )


def column(rows: Iterable[Row], key: str) -> list[float]:
    """The numbers under a key, of the rows that have one.

    >>> column([{"case": "a", "ratio": 2.0}, {"case": "b", "ratio": None}, {"case": "c"}], "ratio")
    [2.0]
    """
    return [float(value) for row in rows if isinstance(value := row.get(key), int | float)]


class Meter(Protocol):
    """What reads the CPU use; `machine.NoiseMeter` does so on Linux."""

    def sample(self) -> machine.Sample:
        """The readings of now."""


def measure(
    case: Case,
    *,
    rounds: int = 7,
    warmup: int = 1,
    min_seconds: float = 0.05,
    max_retries: int = 7,
    seed: int = 0,
    meter: Meter | None = None,
    clock: Callable[[], float] = time.perf_counter,
    agree: Agree = float,
    start: Callable[[], object] = bool,
) -> Measurement:
    """Times the systems of a case against each other.

    `start` is called right before each turn, for ranks that wait for each other to start together.

    `warmup` calls of each system come first and are not timed. A turn lasts at least `min_seconds`, and
    longer where there are few systems, so that a round is long enough for its noise to be read.
    """
    if not case.systems or rounds < 1:
        raise ValueError(
            f"case {case.name!r} has {len(case.systems)} systems and rounds={rounds}; expected at least one of each"
        )
    meter = meter or machine.NoiseMeter()
    turn_seconds = max(min_seconds, machine.SHORTEST_SECONDS / len(case.systems))
    calls = {}
    for name, system in case.systems.items():
        for _ in range(warmup):
            system()
        calls[name] = _calls_per_turn(system, turn_seconds, clock=clock, agree=agree)
    shuffle = random.Random(seed).sample

    def take() -> Round:
        order = {name: calls[name] for name in shuffle(list(calls), len(calls))}
        return _round(case, order, meter=meter, clock=clock, agree=agree, start=start)

    kept, disturbed = take_rounds(take, rounds=rounds, max_retries=max_retries)
    return Measurement(case, tuple(kept), disturbed)


def take_rounds(take: Callable[[], Round], *, rounds: int, max_retries: int) -> tuple[list[Round], int]:
    """Takes rounds until enough were quiet, or no retry is left; those that count, and how many are disturbed."""
    taken: list[Round] = []
    while sum(r.foreign <= FOREIGN_LIMIT for r in taken) < rounds and len(taken) < rounds + max_retries:
        taken.append(take())
    return select_rounds(taken, wanted=rounds)


def relative_spread(values: Sequence[float]) -> float:
    """The interquartile range over the median; 0 for fewer than two values.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.6666666666666666
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def select_rounds(taken: Sequence[Round], *, wanted: int, limit: float = FOREIGN_LIMIT) -> tuple[list[Round], int]:
    """The rounds that count (quiet ones first, then the least noisy), and how many of them are disturbed."""
    quiet = [r for r in taken if r.foreign <= limit][:wanted]
    noisy = sorted((r for r in taken if r.foreign > limit), key=lambda r: r.foreign)[: wanted - len(quiet)]
    return quiet + noisy, len(noisy)


def _calls_per_turn(system: System, turn_seconds: float, *, clock: Callable[[], float], agree: Agree) -> int:
    """How many calls fill a turn: grows the number until the time is long enough to extrapolate from."""
    calls = 1
    while True:
        seconds = agree(_time(system, calls, clock=clock))
        enough = math.ceil(calls * turn_seconds / max(seconds, 1e-9))
        if seconds >= turn_seconds / 2:
            return enough
        calls = min(enough, calls * 10)


def _round(
    case: Case,
    calls: Mapping[str, int],
    *,
    meter: Meter,
    clock: Callable[[], float],
    agree: Agree,
    start: Callable[[], object],
) -> Round:
    """One turn of each system, in the order of `calls`."""
    before = meter.sample()
    seconds = {}
    for name, count in calls.items():
        agree(0.0)  # all ranks are here
        start()
        seconds[name] = agree(_time(case.systems[name], count, clock=clock)) / count
    return Round(seconds, agree(machine.foreign_cores(before, meter.sample())))


def _time(system: System, calls: int, *, clock: Callable[[], float]) -> float:
    """Seconds of `calls` calls, without Python's garbage collector, which would run at random times."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in range(calls):
            system()
        return clock() - start
    finally:
        if collecting:
            gc.enable()


def track(items: Iterable[T], *, title: str, total: int | None = None) -> Iterable[T]:
    """The items, with a progress bar on stderr while they are gone through, if that is a terminal.

    `for case in track(cases, title="gemm"): measure(case)`
    """
    console = Console(stderr=True)
    return progress.track(items, title, total=total, console=console, transient=True, disable=not console.is_terminal)


# ---- on the ranks of a lab -------------------------------------------------------------------------------------------

# Seconds after which the last rank, too, knows when all begin.
_GATHERING = 0.03


class _NoMeter:
    """Reads nothing: one rank meters for all."""

    def sample(self) -> machine.Sample:
        return machine.Sample(time.perf_counter(), 0.0, 0.0)


def lab_meter() -> Meter:
    """A rank's meter. The ranks are children of the lab's process: its descendants are our own, not noise."""
    return machine.NoiseMeter(root=os.getppid())


def measure_ranks(case: Case, rank: Rank, rounds: int, *, agree: Agree | None = None, warmup: int = 1) -> Measurement:
    """`measure` on every rank of a lab, with half as many retries as rounds; systems come back as names only."""
    meter = lab_meter() if rank.rank == 0 else _NoMeter()
    return measure(
        case, rounds=rounds, meter=meter, agree=agree or slowest, start=start_together, warmup=warmup,
        max_retries=rounds // 2,
    ).without_functions()  # fmt: skip


def rank_seconds(call: System) -> float:
    """The median seconds of a call that all ranks make at once, the slowest rank's."""
    return measure(Case("probe", {"call": call}), meter=lab_meter(), agree=slowest).median("call")


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def start_together() -> None:
    """Returns on all ranks at the same moment: the lab's hosts are on one machine, and read one clock.

    A barrier alone lets 16 ranks go over some 15 ms, one after the other.
    """
    begin = slowest(record.now()) + _GATHERING
    time.sleep(max(0.0, begin - record.now()))


def traced(call: System, rank: Rank) -> Timeline:
    """One call on all ranks, on one clock."""
    start_together()
    with record.trace() as trace:
        call()
    return Timeline(trace.gather(group=rank.group).events, name="measured")


def _elsewhere() -> None:
    """Stands for a system whose function has stayed on its rank."""
