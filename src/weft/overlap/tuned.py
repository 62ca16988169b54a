"""The file that a tuner writes: the best measured plans, by machine and shape.

    {"format": "weft overlap plans", "version": 1,
     "plans": {"<machine>": {"<op, shape, type, hosts>": {"plan": "matmul_all_reduce m=...", "seconds": 0.01}}}}

Reading never fails: what is missing, damaged, of another version or of another machine is left out, and said so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.kernels.cpu import isa
from weft.overlap.plan import OverlapPlan

FORMAT, VERSION = "weft overlap plans", 1


@dataclass(frozen=True)
class Tuned:
    """A plan that was measured: its seconds, and those of the sequential plan beside it."""

    plan: OverlapPlan
    seconds: float
    sequential_seconds: float

    def to_json(self) -> dict[str, object]:
        return {"plan": str(self.plan), "seconds": self.seconds, "sequential_seconds": self.sequential_seconds}


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


def load(path: str | Path) -> tuple[list[Tuned], list[str]]:
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


def _entry(key: str, entry: object) -> Tuned:
    if not isinstance(entry, dict):
        raise ValueError(f"it is {entry!r}")
    tuned = Tuned(OverlapPlan.parse(entry["plan"]), float(entry["seconds"]), float(entry["sequential_seconds"]))
    if key_of(tuned.plan) != key:
        raise ValueError(f"its plan is {tuned.plan}")
    return tuned


def save(path: str | Path, tuned: Iterator[Tuned] | list[Tuned]) -> None:
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
