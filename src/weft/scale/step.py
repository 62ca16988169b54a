"""A whole step on a declared cluster: layers, edges, pipeline and gradients put together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from weft.pipeline import Costs, Edge, Schedule, Simulation, Transfers, chain
from weft.pipeline.lower import decide
from weft.scale.edges import cards_of, edge_seconds, gradient_sync_seconds
from weft.scale.job import ALL_PROMISES, Batch, Job, Promise
from weft.scale.layers import Seconds, Wires, stage_seconds
from weft.scale.memory import peak_bytes, stage_parameters
from weft.timeline import Event, Timeline

ALL = "all four"
NONE = "none of them"


@dataclass(frozen=True)
class Step:
    """What a step is predicted to do.

    seconds:  until the last replica has its weights; of inference, until the last micro-batch is through
    exposed:  seconds that would not be there if communication took no time
    bubble:   the part of the pipeline's time in which a rank does not compute
    memory:   bytes on the fullest GPU;  fits: whether it has them
    mfu:      flops that the real tokens need, of what all GPUs could do by their data sheet
    tokens_per_second: real tokens of all replicas; in decoding, new ones
    """

    job: Job
    promises: frozenset[Promise]
    seconds: float
    exposed: float
    bubble: float
    memory: float
    fits: bool
    mfu: float
    tokens_per_second: float
    pipeline: Simulation = field(repr=False, compare=False)

    @property
    def timeline(self) -> Timeline:
        """The pipeline's lanes, and the replicas' gradients after them."""
        ran, end = self.pipeline, self.pipeline.seconds
        events = list(ran.timeline.events)
        if self.seconds > end:
            lanes = (f"rank {rank}/out" for rank in range(len(ran.schedule.ranks)))
            events += [Event(lane, "send", "gradients of the replicas", end, self.seconds) for lane in lanes]
        return Timeline(events, name=f"{self.job.model.name}, {ran.schedule.name}, predicted")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        names = ("seconds", "exposed", "bubble", "memory", "fits", "mfu", "tokens_per_second")
        return {"promises": sorted(p.value for p in self.promises), **{name: getattr(self, name) for name in names}}


def simulate_step(job: Job, promises: frozenset[Promise] = ALL_PROMISES) -> Step:
    """The step with these promises kept.

    >>> from weft.scale import find_gpu, find_model
    >>> job = Job(find_model("gpt3-13b"), find_gpu("A100"), hosts=2, devices=8, tp=8, pp=2, dp=1, microbatches=4)
    >>> simulate_step(job).seconds < simulate_step(job, frozenset()).seconds
    True
    """
    if Promise.PIPELINE not in promises:
        job = replace(job, schedule="1f1b")
    transfers = Transfers.OVERLAPPED if Promise.PIPELINE in promises else Transfers.SYNCHRONOUS
    wires = Wires.OVERLAPPED if Promise.OVERLAP in promises else Wires.SEQUENTIAL
    schedule, batch, cards = job.made_schedule(), job.batch(promises), cards_of(job)
    edges = edge_seconds(job, batch.tokens, promises)
    ran = _run(_Paper(schedule, _stages(job, batch, wires), tuple(edges.items()), cards), transfers)
    free = _seconds(_Paper(schedule, _stages(job, batch, Wires.FREE), tuple(dict.fromkeys(edges, 0.0).items()), cards))
    sync = _sync_seconds(job, schedule)
    seconds = ran.seconds + sync
    memory = max(peak_bytes(job, schedule, batch, promises))
    return Step(
        job=job,
        promises=promises,
        seconds=seconds,
        exposed=max(0.0, seconds - free),
        bubble=ran.bubble,
        memory=memory,
        fits=memory <= job.gpu.memory,
        mfu=job.model_flops / (seconds * job.size * job.gpu.peak_of(job.dtype)),
        tokens_per_second=job.real.tokens * job.microbatches * job.dp / seconds,
        pipeline=ran,
    )


def compare(job: Job) -> dict[str, Step]:
    """The step with all promises, without each of them, and with none."""
    cases = {ALL: ALL_PROMISES}
    cases |= {f"without {promise.value}": ALL_PROMISES - {promise} for promise in Promise}
    return {name: simulate_step(job, promises) for name, promises in (cases | {NONE: frozenset()}).items()}


def ideal_seconds(job: Job) -> float:
    """The flops of the real tokens at the peak of all GPUs."""
    return job.model_flops / (job.size * job.gpu.peak_of(job.dtype))


def _stages(job: Job, batch: Batch, wires: Wires) -> tuple[Seconds, ...]:
    return tuple(stage_seconds(job, stage, batch, wires) for stage in range(job.stages))


@dataclass(frozen=True)
class _Paper:
    """All that a simulation needs, as a value that can be looked up: a promise may change nothing."""

    schedule: Schedule
    stages: tuple[Seconds, ...]
    edges: tuple[tuple[Edge, float], ...]
    cards: tuple[tuple[int, ...], ...]

    @property
    def costs(self) -> Costs:
        return Costs(
            tuple(s.forward for s in self.stages),
            tuple(s.backward for s in self.stages),
            tuple(s.input_gradient for s in self.stages),
            tuple(s.weight_gradient for s in self.stages),
            dict(self.edges),
            cards=self.cards,
        )


@lru_cache(maxsize=32)
def _run(paper: _Paper, transfers: Transfers) -> Simulation:
    return paper.schedule.simulate(paper.costs, transfers=transfers)


@lru_cache(maxsize=32)
def _seconds(paper: _Paper) -> float:
    """The same with transfers beside computing, but only its length: nothing is lowered."""
    run = decide(paper.schedule, chain(paper.schedule.stages), paper.costs).run
    return max(end for _, end in run.actions.values())


def _sync_seconds(job: Job, schedule: Schedule) -> float:
    """The replicas' gradients, after the last backward; nobody hides them here."""
    if not schedule.has_backward:
        return 0.0
    ranks = range(len(schedule.ranks))
    return max(gradient_sync_seconds(job, sum(stage_parameters(job, s) for s in schedule.stages_of(r))) for r in ranks)
