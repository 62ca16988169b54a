"""What the ranks of a lab run for `weft bench end_to_end`: a place's systems in turns, a trace, and two calibrations.

The links of a place are as slow as it takes for torch's packed training step to spend `share` of its time on them:
its time on a link that hardly limits it, and the bytes that leave a card meanwhile, are both measured (`TorchStep`).
The bounds need what this machine's cores can do (`Machine`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.bench.harness import (
    Case,
    Measurement,
    Result,
    System,
    lab_meter,
    measure,
    measure_ranks,
    slowest,
    start_together,
)
from weft.bench.systems.end_to_end import Load, Place, WorkKind, token_lists, train_batch
from weft.bench.systems.overlap import peak_flops
from weft.bench.systems.parallel import (
    GENERATE_SYSTEMS,
    NO_OVERLAP,
    TRAIN_SYSTEMS,
    Engines,
    Form,
    Generate,
    TorchTrainer,
    check_losses,
    check_tokens,
    first_losses,
    make_generators,
    make_trainers,
)
from weft.lab import Cluster, Rank
from weft.lab.linux import MAX_GBPS, MIN_GBPS
from weft.timeline import Event, Timeline, TracedCall, record

FIRST = "_first"  # ends the name of a system that stops after the first token
DECODE_SEED = 1
RUN_TIMEOUT = 7200.0  # of all systems of a place, vLLM loading included
FAST_GBPS = 40.0  # beyond what gloo sends here
_STEPS = 3
_READ_FLOATS = 1 << 26  # 256 MB: no cache holds it


def measure_train(rank: Rank, place: Place, load: Load, rounds: int, names: Sequence[str]) -> Result:
    """Training steps by the systems of these names; losses must agree."""
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    systems = {name: TRAIN_SYSTEMS[name] for name in names}
    trainers = make_trainers(place.size, batch, rank_mesh(rank), {system.trainer for system in systems.values()})
    check_losses(first_losses(trainers))
    calls: dict[str, System] = {
        name: partial(trainers[system.trainer].step, system.form) for name, system in systems.items()
    }
    # Every trainer has made a step in each form.
    measured = measure_ranks(Case(f"train: {place.name}", calls), rank, rounds, warmup=0)
    return _with_trace(calls["weft"], rank, measured)


def measure_generate(
    rank: Rank,
    place: Place,
    load: Load,
    rounds: int,
    kinds: Sequence[WorkKind],
    folder: str,
    engines: Engines | None,
    promises: bool,
) -> dict[WorkKind, Result]:
    """Prefill, decoding or both; tokens must agree. With `promises`, prefill is also measured without overlap."""
    with ExitStack() as stack:
        systems = make_generators(place.size, rank_mesh(rank), folder, engines, stack, promises=promises)
        found = {}
        for kind in kinds:
            names = [*(engines.names if engines else ()), *GENERATE_SYSTEMS[kind]]
            names += [NO_OVERLAP] if promises and kind is WorkKind.PREFILL else []
            found[kind] = _generations(rank, place, load, rounds, kind, {name: systems[name] for name in names})
        return found


def _generations(
    rank: Rank, place: Place, load: Load, rounds: int, kind: WorkKind, systems: Mapping[str, Generate]
) -> Result:
    vocabulary = place.size.vocabulary
    if kind is WorkKind.PREFILL:
        prompts, tokens = token_lists(load.prompt_lengths, vocabulary), 1
    else:
        prompts, tokens = token_lists(load.decode_lengths, vocabulary, seed=DECODE_SEED), load.new_tokens + 1
    answers = {name: generate(prompts, tokens) for name, generate in systems.items()}
    check_tokens({name: found for name, found in answers.items() if found})  # of the systems that this rank is part of
    calls: dict[str, System] = {name: partial(generate, prompts, tokens) for name, generate in systems.items()}
    if kind is WorkKind.DECODE:
        calls |= {name + FIRST: partial(generate, prompts, 1) for name, generate in systems.items()}
    measured = measure_ranks(Case(f"{kind.value}: {place.name}", calls), rank, rounds, warmup=0)
    return _with_trace(calls["weft"], rank, measured)


def _with_trace(call: System, rank: Rank, measured: Measurement) -> Result:
    """The measurement with one traced call: as the plans promised it, as it was, and how much of it was exposed."""
    start_together()
    start = record.now()
    with record.trace() as trace:
        call()
    seconds = slowest(record.now() - start)
    happened = Timeline(trace.gather(group=rank.group).events, name="measured")
    predicted = predicted_step(trace.calls, happened)
    timelines = (happened,) if predicted is None else (predicted, happened)
    exposed = exposed_fraction(happened, rank.world, seconds)
    return Result(measured, timelines=timelines, facts={"exposed": exposed})


def exposed_fraction(happened: Timeline, ranks: int, seconds: float) -> float | None:
    """Communication under which nothing was computed, over the ranks' time; None where nothing was traced.

    >>> events = [Event("rank 0/cpu", "compute", "y", 0.0, 2.0), Event("rank 0/nic", "send", "y", 1.0, 3.0)]
    >>> exposed_fraction(Timeline(events), ranks=1, seconds=4.0)
    0.25
    """
    if not happened.events:
        return None
    total = happened.summary().total
    return (total.communication - total.overlapped) / (ranks * seconds)


def predicted_step(calls: Sequence[TracedCall], happened: Timeline) -> Timeline | None:
    """The traced ops one after the other, each as its plan promised; what lies between two of them stays as it was.

    None where no op says what it promised. Lanes that the ops do not have are not drawn.
    """
    known = [call for call in calls if call.predicted is not None and call.timeline.events]
    if not known:
        return None
    events: list[Event] = []
    clock, before = 0.0, happened.start
    for call in sorted(known, key=lambda call: call.timeline.start):
        assert call.predicted is not None
        promised = call.predicted()
        clock += max(0.0, call.timeline.start - before)
        events += promised.shifted(clock - promised.start).events
        clock += promised.seconds
        before = max(before, call.timeline.end)
    return Timeline(events, name="predicted")


def rank_mesh(rank: Rank) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))


@dataclass(frozen=True)
class Machine:
    """The most that all cores together showed: flops a second in matmuls, bytes a second read (0: not asked).

    >>> Machine(3e9, 1e9).best(Machine(2e9, 4e9))
    Machine(flops=3000000000.0, bandwidth=4000000000.0)
    """

    flops: float = 0.0
    bandwidth: float = 0.0

    def best(self, other: Machine) -> Machine:
        """The best of both: a bound must hold in every moment of a run."""
        return Machine(max(self.flops, other.flops), max(self.bandwidth, other.bandwidth))


def measure_machine(*, decoding: bool) -> Machine:
    """With one rank a core, as the rows have them; only decoding is bound by memory."""
    with Cluster(1, min(2, os.cpu_count() or 1), None) as lab:
        found = lab.run(_rank_machine, decoding)
    return Machine(sum(m.flops for m in found), sum(m.bandwidth for m in found))


def _rank_machine(rank: Rank, decoding: bool) -> Machine:
    """One rank's part while all are at work."""
    flops, bandwidth = peak_flops(), 0.0
    if decoding:
        data = torch.ones(_READ_FLOATS)
        case = Case("reading", {"sum": data.sum})
        bandwidth = data.nbytes / measure(case, max_retries=0, meter=lab_meter(), agree=slowest).best("sum")
    return Machine(flops, bandwidth)


@dataclass(frozen=True)
class TorchStep:
    """torch's packed training step where links hardly limit it, and the bytes that it sends from each card."""

    seconds: float
    card_bytes: float

    def gbps(self, share: float) -> float:
        """The rate at which sending takes `share` of the step.

        >>> TorchStep(seconds=2.0, card_bytes=1e9).gbps(0.5)
        4.0
        """
        sending = self.seconds * share / (1 - share)
        return min(MAX_GBPS, max(MIN_GBPS, self.card_bytes * 8e-9 / sending))


def torch_step(place: Place, load: Load, cards: str) -> TorchStep:
    """Measures it, in a lab of its own."""
    with Cluster(place.hosts, place.devices, FAST_GBPS, cards=cards) as lab:
        found = lab.run(_rank_step, place, load, timeout=RUN_TIMEOUT)
    return TorchStep(max(step.seconds for step in found), max(step.card_bytes for step in found))


def _rank_step(rank: Rank, place: Place, load: Load) -> TorchStep:
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    trainer = TorchTrainer(place.size, batch, rank_mesh(rank))
    trainer.step(Form.PACKED)  # the first one connects ranks and makes the optimiser's state
    seconds, before = [], rank.carried()[0]
    for _ in range(_STEPS):
        start_together()
        start = time.perf_counter()
        trainer.step(Form.PACKED)
        seconds.append(slowest(time.perf_counter() - start))
    return TorchStep(statistics.median(seconds), (rank.carried()[0] - before) / _STEPS)
