"""The training loop: data, a step, the optimiser, a checkpoint now and then, and the figures of every step.

A lab imports this module once and forks its ranks from there, so all that a run needs is imported here.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.models.llama import modeling_llama  # noqa: F401

from weft.comm.tell import tell_all
from weft.errors import WeftError
from weft.jobs.train.job import Corpus, TrainJob, documents_of
from weft.jobs.train.model import TrainModel, build, make_mesh
from weft.jobs.train.replicas import Replicas
from weft.lab import Rank
from weft.parallel.files.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from weft.parallel.files.checkpoint_folder import CheckpointFolder
from weft.parallel.files.shards import together
from weft.timeline import Event, Timeline, record
from weft.timeline.events import difference, length, union

T = TypeVar("T")

# What a model can be loaded without and computes something else with.
_UNSEEN_IN_SHAPES = ("hidden_act", "rms_norm_eps", "rope_parameters", "num_attention_heads", "num_key_value_heads")


def train(job: TrainJob, *, report: Callable[[StepFigures], None] | None = None) -> TrainResult:
    """Runs a job on all ranks of the default process group; every rank gets the same figures. Collective.

    `report` is called on each rank after each step. Whatever ends one rank ends all, within the timeout; the last
    checkpoint is whole then, and the same job with `resume=True` goes on to the losses that it would have had. With
    `on_failure="shrink"` only the copies of the model that lost a rank end; the others go on, with a warning. A loss
    that is not a number ends the run before it is saved. Under torchrun with `--max-restarts` it warns if these could
    not work.
    """
    _warn_of_restarts()
    job = job.on(dist.get_world_size())
    text = Corpus.of(documents_of(job.data), context=job.context, tokens=job.tokens, seed=job.seed)
    _agree(job, text)
    mesh = make_mesh((job.pp, job.copies, job.tp), timeout=job.timeout)
    with _folder_of(job), build(job, mesh) as model:
        return _train(job, mesh, text, model, report)


def _warn_of_restarts() -> None:
    """torchrun's workers would meet in the store of their agents, where those before a restart have left addresses."""
    restarts, shares_store = (
        os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("MAX_RESTARTS", "USE_AGENT_STORE")
    )
    if dist.get_rank() == 0 and shares_store == "True" and restarts not in ("", "0"):
        warnings.warn(
            f"torchrun may restart these ranks (--max-restarts {restarts}), and would do so in vain: new ranks find "
            "the addresses of dead ones in the store that torchrun shares with them. Set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, on all hosts",
            stacklevel=3,
        )


def _train(
    job: TrainJob, mesh: DeviceMesh, text: Corpus, model: TrainModel, report: Callable[[StepFigures], None] | None
) -> TrainResult:
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=job.lr)
    first = _resume(job, text, model, optimizer)
    found: list[StepFigures] = []
    last = record.Trace()
    copies = Replicas(mesh, timeout=job.timeout)
    is_kept = job.on_failure == "shrink"

    def once(step: int) -> StepFigures:
        nonlocal last
        with record.trace(name=f"step {step + 1}") as last:  # where there is no step, it stays empty
            return _step(job, mesh, text, model, optimizer, step, last, copies)

    def save(step: int) -> None:
        save_checkpoint(
            job.checkpoint, step + 1, model.module, optimizer, {"data": _data(job, text)},
            keep=job.keep, timeout=job.timeout, group=copies.world,
        )  # fmt: skip

    def attempt(step: int, call: Callable[[int], T]) -> T:
        if not is_kept:
            return call(step)
        return copies.keep(step, lambda: call(step), optimizer.zero_grad, partial(warnings.warn, stacklevel=2))

    for step in range(first, job.steps):
        found.append(attempt(step, once))
        if job.checkpoint and ((step + 1) % job.every == 0 or step + 1 == job.steps):
            attempt(step, save)
        if report is not None:
            report(found[-1])
    return TrainResult(tuple(found), last.gather(group=copies.world))


def _agree(job: TrainJob, text: Corpus) -> None:
    """Raises where ranks were given different jobs, or see different texts; where their files are may differ."""
    same = {name: value for name, value in asdict(job).items() if name not in ("data", "init", "checkpoint")}
    said = tell_all("training job", {**same, "text": text.digest}, group=None, timeout=job.timeout)
    for rank, theirs in enumerate(said):
        differing = {name: (said[0][name], value) for name, value in theirs.items() if value != said[0][name]}
        if differing:
            texts = [f"{name} is {a!r} on rank 0 and {b!r} on rank {rank}" for name, (a, b) in differing.items()]
            raise ValueError(f"{'; '.join(texts)}; expected one job, and the same texts, on all ranks")


@contextmanager
def _folder_of(job: TrainJob) -> Iterator[None]:
    """The checkpoint directory for this run alone; refused on all ranks if another one has it, or had it."""
    folder = CheckpointFolder(Path(job.checkpoint)) if job.checkpoint else None
    with ExitStack() as stack:
        with together("claiming the checkpoint directory", group=None, timeout=job.timeout):
            if folder is not None and dist.get_rank() == 0:
                stack.enter_context(folder.claimed())
                if not job.resume and folder.whole():
                    raise ValueError(
                        f"{folder.root} has {folder.whole()[-1].name} of an earlier run; expected an empty directory "
                        "for a run from the start; go on with resume, or give another directory"
                    )
        yield


def _resume(job: TrainJob, text: Corpus, model: TrainModel, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint if the job says so; after how many steps to go on."""
    if not job.resume or not has_checkpoint(job.checkpoint):
        return 0
    found = load_checkpoint(job.checkpoint, model.module, optimizer, timeout=job.timeout)
    stored, mine = found.extra.get("data", {}), _data(job, text)
    differing = {name: (stored[name], mine[name]) for name in mine.keys() & stored.keys() if stored[name] != mine[name]}
    if differing or not stored:
        texts = [f"{name} was {a!r} and is {b!r}" for name, (a, b) in sorted(differing.items())]
        raise ValueError(
            f"{found.path} is of another run: {'; '.join(texts) or 'it does not say which'}; expected the same, or the "
            "run would see other data than it would have; use another checkpoint directory for another run"
        )
    for group in optimizer.param_groups:  # the checkpoint has that of the run which saved it
        group["lr"] = job.lr
    return found.step


def _data(job: TrainJob, text: Corpus) -> dict[str, Any]:
    """What the losses follow from, besides weights, the number of steps and the learning rate."""
    config = job.config()
    said = {name: getattr(job, name) for name in ("model", "seed", "tokens", "microbatches", "context")}
    said |= {name: getattr(config, name, None) for name in _UNSEEN_IN_SHAPES}
    return {**said, "text": text.digest}


def _step(
    job: TrainJob,
    mesh: DeviceMesh,
    text: Corpus,
    model: TrainModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    trace: record.Trace,
    copies: Replicas,
) -> StepFigures:
    micros = [text.microbatch(step * job.microbatches + i) for i in range(job.microbatches)]
    total = sum(micro.counted for micro in micros)
    stage, _, place = mesh.get_coordinate() or (0, 0, 0)
    is_kept = job.on_failure == "shrink"
    start = time.perf_counter()
    part = model.step(copies.share(micros), total)
    if is_kept:
        copies.add_gradients(model.module)
    is_sound = all(math.isfinite(_local(p.grad).sum()) for p in model.module.parameters() if p.grad is not None)
    if not is_kept:
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    tells = stage == job.pp - 1 and place == 0  # the ranks of a stage have the same loss
    mine = [part if tells else 0.0, seconds, exposed_in_step(trace.timeline.events), is_sound]
    said = tell_all("training step", mine, group=copies.world, timeout=job.timeout)
    loss, exposed = sum(row[0] for row in said), sum(row[2] for row in said) / len(said)
    if not math.isfinite(loss) or not all(row[3] for row in said):
        what = f"loss {loss}" if not math.isfinite(loss) else "gradients that are not numbers"
        raise WeftError(
            f"step {step + 1} has {what}, expected numbers; it was not saved: go on from the last checkpoint with a "
            "smaller lr, or look at the data"
        )
    if is_kept:  # now that all ranks have said that they have these gradients
        optimizer.step()
        optimizer.zero_grad()
    return StepFigures(step + 1, loss, job.microbatches * job.tokens, max(row[1] for row in said), exposed)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def train_on(rank: Rank, job: TrainJob) -> TrainResult:
    """Runs a job on a rank; rank 0 prints the figures of each step."""
    progress = RunProgress(job, rank.world)
    if rank.rank == 0:
        print(progress)

    def report(figures: StepFigures) -> None:
        if rank.rank == 0:
            print(progress.line(figures))

    return train(job, report=report)


class RunProgress:
    """What a run says of itself: how long it is, then a line for each step with the time that is left."""

    def __init__(self, job: TrainJob, ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._ranks, self._clock = job, ranks, clock
        self._first: tuple[int, float] | None = None  # the first step that was seen, and when

    def __str__(self) -> str:
        """
        >>> print(RunProgress(TrainJob(steps=50), 4))
        50 steps of 2,048 tokens on 4 ranks: tensor 1 x pipeline 1 x data 1
        """
        job = self._job
        return (
            f"{job.steps} steps of {job.microbatches * job.tokens:,} tokens on {self._ranks} ranks: "
            f"tensor {job.tp} x pipeline {job.pp} x data {job.dp}"
        )

    def line(self, figures: StepFigures) -> str:
        """The figures of a step and the time left, at the pace of the steps after the first, which makes plans."""
        now, left = self._clock(), self._job.steps - figures.step
        if self._first is None:
            self._first = figures.step, now
            return f"{figures}  {left} steps left"
        step, since = self._first
        return f"{figures}  {_duration(left * (now - since) / (figures.step - step))} left"


def _duration(seconds: float) -> str:
    """
    >>> _duration(75.4), _duration(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class TrainResult:
    """The figures of the steps that this call made, and the timeline of all ranks in the last of them."""

    steps: tuple[StepFigures, ...]
    timeline: Timeline

    @property
    def losses(self) -> list[float]:
        return [figures.loss for figures in self.steps]


@dataclass(frozen=True)
class StepFigures:
    """One step of a run.

    step:    counts from 1
    loss:    the mean over all tokens that have something to predict
    seconds: of the slowest rank, without checkpoints
    exposed: seconds in which a rank communicated or waited and multiplied nothing; the mean over ranks
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    exposed: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def exposed_fraction(self) -> float:
        return self.exposed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"step {self.step:5d}  loss {self.loss:8.4f}  {self.tokens_per_second:10,.0f} tokens/s  "
            f"exposed communication {1000 * self.exposed:8.1f} ms ({self.exposed_fraction:4.0%})"
        )


def exposed_in_step(events: Sequence[Event]) -> float:
    """Seconds of one rank's step in which it communicated, or waited for it, while no matmul ran.

    Transfers of a pipeline count only while a stage waits for them: they run beside whole passes. Passes themselves
    (`2F0`) are no evidence of computing: overlapped matmuls wait inside of them.

    >>> matmul = Event("compute", "compute", "all_gather_matmul: matmul", 1.0, 3.0)
    >>> rows = Event("comm", "recv", "all_gather_matmul: rows", 0.0, 2.0)
    >>> late = Event("compute", "wait", "0.x#0 0->1", 5.0, 5.5)
    >>> exposed_in_step([matmul, rows, late, Event("in", "recv", "0.x#0 0->1", 4.0, 5.5)])
    1.5
    """
    waits = [(e.start, e.end) for e in events if e.kind == "wait"]
    wires = [(e.start, e.end) for e in events if e.kind in ("send", "recv") and e.lane not in ("in", "out")]
    matmuls = union((e.start, e.end) for e in events if e.kind == "compute" and ": " in e.name)
    return length(difference(union([*waits, *wires]), difference(matmuls, union(waits))))


class LossLog:
    """A run's figures as JSON lines; a run that is resumed goes on after the step that it resumed from."""

    def __init__(self, file: str | Path, *, after: int) -> None:
        self._file = Path(file)
        kept = read_log(file, until=after) if self._file.exists() else []
        new = self._file.with_name(f".{self._file.name}.part")
        new.write_text("".join(_line(figures) for figures in kept), encoding="utf-8")
        new.replace(self._file)  # at once: a kill leaves the old lines or these

    def add(self, figures: StepFigures) -> None:
        """Writes one step, at once."""
        with self._file.open("a", encoding="utf-8") as out:
            out.write(_line(figures))


def read_log(file: str | Path, *, until: int | None = None) -> list[StepFigures]:
    """What `LossLog` wrote, up to step `until`; a last line that a kill cut off is left out."""
    found = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        try:
            figures = StepFigures(**json.loads(line))
        except ValueError:
            break
        if until is None or figures.step <= until:
            found.append(figures)
    return found


def _line(figures: StepFigures) -> str:
    return json.dumps(asdict(figures)) + "\n"
