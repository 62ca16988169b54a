"""Plans that were measured: a tuner tries the best predicted ones on a group, and a file keeps the fastest.

`tune` measures plans against each other, the same on all ranks; `save` adds the best to a file, by machine and shape:

    {"format": "weft overlap plans", "version": 1,
     "plans": {"<machine>": {"<op, shape, type, hosts>": {"plan": "matmul_all_reduce m=...", "seconds": 0.01}}}}

`use_tuned` makes calls follow it. Reading never fails: what is missing, damaged, of another version or of another
machine is left out, and said so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import stat
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from weft.comm import Group
from weft.kernels.cpu import isa
from weft.overlap.api import Planning
from weft.overlap.blocks import chunk_bounds
from weft.overlap.executor.call import executor_for
from weft.overlap.executor.context import Context, context_of
from weft.overlap.executor.resources import pack
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.search import ranked_plans

FORMAT, VERSION = "weft overlap plans", 1


@dataclass(frozen=True)
class Shape:
    """What to tune: an op, and the matmul [m, k] x [n, k]^T of one rank, as `plan_overlap` takes them."""

    op: Op
    m: int
    n: int
    k: int
    dtype: str = "float32"


@dataclass(frozen=True)
class TunedPlan:
    """A plan that was measured: its seconds, and those of the sequential plan beside it."""

    plan: OverlapPlan
    seconds: float
    sequential_seconds: float

    def to_json(self) -> dict[str, object]:
        return {"plan": str(self.plan), "seconds": self.seconds, "sequential_seconds": self.sequential_seconds}


def tune(shape: Shape, *, group: ProcessGroup, candidates: int = 4, rounds: int = 7) -> TunedPlan:
    """The fastest of the best predicted plans and the sequential one. Collective; later calls on the group use it."""
    base = OverlapPlan(shape.op, shape.m, shape.n, shape.k, shape.dtype, context_of(group).hosts)
    with Planning.on(group, f"tune {base}") as planning:
        # From curves that all ranks share, so that all have the same candidates.
        ranked = ranked_plans(base, planning.planner.curves(planning.wire))
        plans = [p for p in ranked if not p.sequential][:candidates] + [p for p in ranked if p.sequential]
        slowest = _measure(_call(shape, planning.context), plans, planning.wire, rounds)
        best = min(range(len(plans)), key=slowest.__getitem__)
        sequential = slowest[-1]
        why = f"measured {slowest[best] * 1e3:.3g} ms, {sequential * 1e3:.3g} ms sequentially, of {len(plans)} plans"
        found = TunedPlan(replace(plans[best], reason=why), slowest[best], sequential)
        planning.planner.use(found.plan)
        return found


def _measure(call: Callable[[OverlapPlan], object], plans: list[OverlapPlan], wire: Group, rounds: int) -> list[float]:
    """The median seconds of each plan on the slowest rank; plans take turns."""
    times: dict[int, list[float]] = {i: [] for i in range(len(plans))}
    for round_number in range(rounds + 1):
        for i, plan in enumerate(plans):
            wire.barrier("tune")
            start = time.perf_counter()
            call(plan)
            if round_number:  # the first one makes buffers and tables
                times[i].append(time.perf_counter() - start)
    mine = json.dumps([statistics.median(times[i]) for i in range(len(plans))])
    told = wire.tell("times of plans", mine)
    return [max(of_ranks) for of_ranks in zip(*map(json.loads, told), strict=True)]


def _call(shape: Shape, context: Context) -> Callable[[OverlapPlan], object]:
    """A call of this shape by a plan, in a context of the tuner's: the calls of other threads do not meet it."""
    if shape.op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL):
        raise ValueError(f"op is {shape.op.value}, expected one of the four ops; its backward is tuned with it")
    dtype = getattr(torch, shape.dtype)
    rows = shape.m
    if shape.op is Op.ALL_GATHER:
        bounds = chunk_bounds(shape.m, context.size)
        rows = bounds[context.rank + 1] - bounds[context.rank]
    own = torch.Generator()  # the caller's random numbers stay as they are
    x = torch.randn(rows, shape.k, generator=own).to(dtype)
    w = pack(torch.randn(shape.n, shape.k, generator=own).to(dtype))
    run = executor_for(context, x)
    if shape.op is Op.ALL_GATHER:
        return lambda plan: run.gather_matmul(context, x, w, m=shape.m, bias=None, plan=str(plan), keep=False)
    if shape.op is Op.ALL_TO_ALL:
        to = torch.arange(shape.m) * context.size // max(1, shape.m)
        return lambda plan: run.matmul_scatter_rows(context, x, w, to, bias=None, plan=str(plan))
    return lambda plan: run.matmul_scatter(context, shape.op, x, w, bias=None, plan=str(plan))


def use_tuned(path: str | Path, *, group: ProcessGroup) -> list[str]:
    """Makes later calls on the group follow the plans in a file, where it has some for it. Collective.

    Rank 0 reads the file and tells the others. Returns what there is to say: which plans are used, what is wrong.
    The curves are measured too, for plans of other shapes, and for traces to judge calls by.
    """
    with Planning.on(group, "tuned plans") as planning:
        context, wire = planning.context, planning.wire
        planning.planner.curves(wire)
        found, notes = load(path) if context.rank == 0 else ([], [])
        mine = json.dumps([[str(t.plan) for t in found], notes])
        texts, notes = json.loads(wire.tell("tuned plans", mine)[0])
        plans = [OverlapPlan.parse(text) for text in texts]
        fitting = [plan for plan in plans if plan.hosts == context.hosts]
        for plan in fitting:
            planning.planner.use(plan)
        return [*notes, f"{len(fitting)} of {len(plans)} plans are for hosts {context.hosts}"]


# The file ---------------------------------------------------------------------------------------------------


def machine_name() -> str:
    """What measured times depend on, and a file can be carried away from: processor, instructions, cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {isa().name}, {os.cpu_count()} cores"


def key_of(plan: OverlapPlan) -> str:
    """What a plan is looked up by.

    >>> key_of(OverlapPlan.parse("matmul_all_reduce m=8 n=4 k=2 dtype=float32 hosts=0,1 transport=windows "
    ...                          "axis=rows tile=8x32 groups=1,2"))
    'matmul_all_reduce m=8 n=4 k=2 dtype=float32 hosts=0,1'
    """
    return str(plan).split(" transport=", 1)[0]


def load(path: str | Path) -> tuple[list[TunedPlan], list[str]]:
    """The plans of this machine in the file, and what there is to say about the rest."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [f"{path} does not exist; `weft tune` writes it"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{path} cannot be read ({error}); it is ignored"]
    try:
        machines = _checked(json.loads(text))
    except ValueError as error:
        return [], [f"{path} is ignored: {error}"]
    own = machines.get(machine_name(), {})
    notes = []
    if machines and not own:
        notes.append(f"{path} has plans for {', '.join(map(repr, machines))}, none for {machine_name()!r}")
    found = []
    for key, entry in own.items():
        try:
            found.append(_entry(key, entry))
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{path}: the plan of {key!r} is ignored: {error}")
    return found, notes


def _checked(document: object) -> dict[str, dict[str, object]]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"it is not a file of {FORMAT}; choose another name")
    if document.get("version") != VERSION:
        raise ValueError(f"it has version {document.get('version')!r}, this weft reads {VERSION}; tune again")
    plans = document.get("plans")
    if not isinstance(plans, dict) or not all(isinstance(entries, dict) for entries in plans.values()):
        raise ValueError("its plans are damaged; tune again")
    return plans


def _entry(key: str, entry: object) -> TunedPlan:
    if not isinstance(entry, dict):
        raise ValueError(f"it is {entry!r}")
    tuned = TunedPlan(OverlapPlan.parse(entry["plan"]), float(entry["seconds"]), float(entry["sequential_seconds"]))
    if key_of(tuned.plan) != key:
        raise ValueError(f"its plan is {tuned.plan}")
    return tuned


def save(path: str | Path, tuned: Iterator[TunedPlan] | list[TunedPlan]) -> None:
    """Adds plans to the file, which others may do at the same time: nothing is lost, and no reader sees half of it.

    A file that cannot be used is replaced.
    """
    path = Path(path)
    with _locked(path):
        try:
            machines = _checked(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            machines = {}
        own = dict(machines.get(machine_name(), {}))
        own |= {key_of(t.plan): t.to_json() for t in tuned}
        document = {"format": FORMAT, "version": VERSION, "plans": {**machines, machine_name(): own}}
        _replace(path, json.dumps(document, indent=1) + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file beside it, for the file itself is replaced; it stays, for removing it would race.
    with open(path.with_name(path.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """The file has the mode that it had, or what the umask leaves, as any new file."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
