"""What the speed of links and the bounds of `weft bench end_to_end` are chosen by: this machine, and torch's own step.

The links of a place are as slow as it takes for torch's packed training step to spend `share` of its time on them:
its time on a link that hardly limits it, and the bytes that leave a card meanwhile, are both measured.

What a trace of a whole call says: how much communication nothing hid, and what the plans had promised.

The rows of one place of `weft bench end_to_end` on the ranks of its lab: systems in turns, and one traced call.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.bench import machine
from weft.bench.end_to_end.cases import Load, Place, WorkKind
from weft.bench.end_to_end.inputs import token_lists, train_batch
from weft.bench.end_to_end.measure import (
    NO_OVERLAP,
    PLAIN,
    SYSTEMS,
    Engines,
    Form,
    Generate,
    TorchTrainer,
    Trainer,
    check_losses,
    check_tokens,
    first_losses,
    make_systems,
    make_trainers,
)
from weft.bench.harness import Case, Measurement, System, measure, measure_ranks, slowest, start_together
from weft.kernels import linear
from weft.lab import Cluster, Rank
from weft.lab.network import MAX_GBPS, MIN_GBPS
from weft.overlap.executor.resources import pack
from weft.timeline import Event, Timeline, TracedCall, record

RUN_TIMEOUT = 7200.0  # of all systems of a place, vLLM loading included
FAST_GBPS = 40.0  # beyond what gloo sends here
_STEPS = 3
_PROBE = (256, 1024, 1024)  # m, k, n
_READ_FLOATS = 1 << 26  # 256 MB: no cache holds it


@dataclass(frozen=True)
class Machine:
    """What all cores together can do: flops a second in matmuls, bytes a second read from memory (0: not measured)."""

    flops: float
    bandwidth: float


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


def measure_machine(*, decoding: bool) -> Machine:
    """With one rank a core, as the rows have them; only decoding is bound by memory."""
    with Cluster(1, min(2, os.cpu_count() or 1), None) as lab:
        found = lab.run(_rank_machine, decoding)
    return Machine(sum(m.flops for m in found), sum(m.bandwidth for m in found))


def _rank_machine(rank: Rank, decoding: bool) -> Machine:
    """One rank's part while all are at work."""
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    flops = 2.0 * m * k * n / _seconds(lambda: linear(x, w))
    data = torch.ones(_READ_FLOATS if decoding else 0)
    return Machine(flops, data.nbytes / _seconds(data.sum) if decoding else 0.0)


def _seconds(call: System) -> float:
    return measure(Case("probe", {"call": call}), meter=machine.NoiseMeter(root=os.getppid()), agree=slowest).median(
        "call"
    )


def torch_step(place: Place, load: Load) -> TorchStep:
    """Measures it, in a lab of its own."""
    with Cluster(place.hosts, place.devices, FAST_GBPS) as lab:
        found = lab.run(_rank_step, place, load, timeout=RUN_TIMEOUT)
    return TorchStep(max(step.seconds for step in found), max(step.card_bytes for step in found))


def _rank_step(rank: Rank, place: Place, load: Load) -> TorchStep:
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    trainer = TorchTrainer(place.size, batch, rank_mesh(rank))
    trainer.step(Form.PACKED)  # the first one connects ranks and makes the optimiser's state
    seconds, before = [], sent_bytes()
    for _ in range(_STEPS):
        start_together()
        start = time.perf_counter()
        trainer.step(Form.PACKED)
        seconds.append(slowest(time.perf_counter() - start))
    return TorchStep(statistics.median(seconds), (sent_bytes() - before) / _STEPS)


def rank_mesh(rank: Rank) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))


def sent_bytes(card: str = "eth0") -> int:
    """What this host's card has sent so far, headers and all; 0 on a host without one."""
    return parse_sent(Path("/proc/net/dev").read_text(encoding="ascii"), card)


def parse_sent(table: str, card: str) -> int:
    """The bytes that a card has sent, from the text of `/proc/net/dev`.

    >>> parse_sent("  eth0:  10 1 0 0 0 0 0 0  77 2 0 0 0 0 0 0", "eth0")
    77
    """
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == card:
            return int(counters.split()[8])
    return 0


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


Call = Callable[[], object]
FIRST = "_first"  # ends the name of a system that stops after the first token
DECODE_SEED = 1


@dataclass(frozen=True)
class EndToEndOutcome:
    """What a row gave: times; the part of weft's time that was communication in plain sight; a call as it was.

    `predicted` is the same call as the plans promised it; None where no op was traced.
    """

    measured: Measurement
    exposed: float | None
    happened: Timeline
    predicted: Timeline | None


def measure_train(rank: Rank, place: Place, load: Load, rounds: int, names: Sequence[str]) -> EndToEndOutcome:
    """Training steps by the systems of these names; losses must agree."""
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    trainers = make_trainers(place.size, batch, rank_mesh(rank), {SYSTEMS[name].trainer for name in names})
    check_losses(first_losses(trainers))
    calls = {name: _step(trainers[SYSTEMS[name].trainer], SYSTEMS[name].form) for name in names}
    # Every trainer has made a step in each form.
    measured = measure_ranks(Case(f"train: {place.name}", calls), rank, rounds, warmup=0)
    return _traced(calls["weft"], rank, measured)


def measure_generate(
    rank: Rank,
    place: Place,
    load: Load,
    rounds: int,
    kinds: Sequence[WorkKind],
    folder: str,
    engines: Engines | None,
    promises: bool,
) -> dict[WorkKind, EndToEndOutcome]:
    """Prefill, decoding or both; tokens must agree. With `promises`, prefill is also measured without overlap."""
    with ExitStack() as stack:
        systems = make_systems(place.size, rank_mesh(rank), folder, engines, stack, promises=promises)
        found = {}
        for kind in kinds:
            names = [*(engines.names if engines else ()), *PLAIN[kind]]
            names += [NO_OVERLAP] if promises and kind is WorkKind.PREFILL else []
            found[kind] = _generations(rank, place, load, rounds, kind, {name: systems[name] for name in names})
        return found


def _generations(
    rank: Rank, place: Place, load: Load, rounds: int, kind: WorkKind, systems: Mapping[str, Generate]
) -> EndToEndOutcome:
    vocabulary = place.size.vocabulary
    if kind is WorkKind.PREFILL:
        prompts, tokens = token_lists(load.prompt_lengths, vocabulary), 1
    else:
        prompts, tokens = token_lists(load.decode_lengths, vocabulary, seed=DECODE_SEED), load.new_tokens + 1
    answers = {name: generate(prompts, tokens) for name, generate in systems.items()}
    check_tokens({name: found for name, found in answers.items() if found})  # of the systems that this rank is part of
    calls = {name: _generation(generate, prompts, tokens) for name, generate in systems.items()}
    if kind is WorkKind.DECODE:
        calls |= {name + FIRST: _generation(generate, prompts, 1) for name, generate in systems.items()}
    measured = measure_ranks(Case(f"{kind.value}: {place.name}", calls), rank, rounds, warmup=0)
    return _traced(calls["weft"], rank, measured)


def _step(trainer: Trainer, form: Form) -> Call:
    return lambda: trainer.step(form)


def _generation(generate: Generate, prompts: list[list[int]], tokens: int) -> Call:
    return lambda: generate(prompts, tokens)


def _traced(call: Call, rank: Rank, measured: Measurement) -> EndToEndOutcome:
    start_together()
    start = record.now()
    with record.trace() as trace:
        call()
    seconds = slowest(record.now() - start)
    happened = Timeline(trace.gather(group=rank.group).events, name="measured")
    predicted = predicted_step(trace.calls, happened)
    return EndToEndOutcome(measured, exposed_fraction(happened, rank.world, seconds), happened, predicted)
