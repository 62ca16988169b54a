"""A directory of checkpoints: which are whole, which is the newest, and how one becomes part of it at once.

    step-00000020                  a whole one; `step-00000020.1` where that step was saved again
    latest                         the name of the newest
    .step-00000020.1f00c0de.part   one that is being written, under a name that no other writer has
    .step-00000020.1f00c0de.lock   held by its writer; what nobody holds was left behind, and the next writer removes it
    .run.lock                      held by a run that wants the directory for itself

A lock is one of the kernel's, which takes it back when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.window import host_id

ABOUT = "weft.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PART = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.part")
_LATEST = "latest"
# A lock of another host counts as left behind when nothing was written for so long: some file systems keep locks for
# each host alone.
_SILENT_SECONDS = 3600.0


@dataclass(frozen=True)
class CheckpointFolder:
    """The directory `root`, which need not be there yet."""

    root: Path

    def whole(self) -> list[Path]:
        """The checkpoints, oldest first. Each is whole: it got its name after it was written."""
        found = {path: key for path in self.root.glob("step-*") if (key := _key(path))}
        return sorted(found, key=found.__getitem__)

    def begin(self, step: int) -> Draft:
        """An empty place to write to; what writers left that died is removed, what others write now is not."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._clean()
        while True:
            part = self.root / f".step-{step:08d}.{secrets.token_hex(4)}.part"
            lock = Lock.take(part.with_suffix(".lock"))
            if lock is not None:
                break
        try:
            part.mkdir()
        except BaseException:
            lock.release(remove=False)
            raise
        return Draft(part, lock)

    def part(self, name: str) -> Path:
        """The place of that name, which another rank has begun."""
        if not _PART.fullmatch(name):
            raise ValueError(f"got {name!r} for a checkpoint under way, expected a name such as .step-00000020.*.part")
        return self.root / name

    def _clean(self) -> None:
        for part in self.root.glob(".step-*.part"):
            if is_left_behind(part.with_suffix(".lock"), part):
                shutil.rmtree(part, ignore_errors=True)  # others may be at it, too
        for lock in self.root.glob(".step-*.lock"):
            if not lock.with_suffix(".part").exists() and is_left_behind(lock, lock):
                lock.unlink(missing_ok=True)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The directory for this process alone, of all that claim it. Raises where another one has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / ".run.lock"
        lock = Lock.take(path)
        if lock is None:
            raise ValueError(
                f"{self.root} is in use by another run, {holder_of(path)}; expected a directory for each run; wait for "
                "it to end, or give another directory"
            )
        try:
            yield
        finally:
            lock.release()

    def publish(self, part: Path, step: int, about: str, *, keep: int) -> Path:
        """Gives what was written its name, points to it, and removes older ones until `keep` are left."""
        write_through(part / ABOUT, about)
        force(part)
        final = self._rename(part, step)
        force(self.root)
        pointer = final / f".{_LATEST}"
        write_through(pointer, final.name)
        pointer.replace(self.root / _LATEST)
        force(self.root)
        whole = self.whole()
        for old in whole[: max(0, whole.index(final) - keep + 1)] if final in whole else ():
            shutil.rmtree(old)
        return final

    def _rename(self, part: Path, step: int) -> Path:
        """To the first name of its step that is free: that of a run that was resumed before this step stays."""
        again = 0
        while True:
            final = self.root / (f"step-{step:08d}" + (f".{again}" if again else ""))
            try:
                if not final.exists():  # an empty directory would be replaced
                    part.rename(final)
                    return final
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another run was faster
                    raise
            again += 1

    def find(self, step: int | None) -> Path:
        """The checkpoint of a step; the newest by default. Raises OSError where there is none."""
        whole = self.whole()
        if step is not None:
            found = [path for path in whole if (_key(path) or (-1,))[0] == step]
            if not found:
                names = ", ".join(path.name for path in whole) or "none"
                raise FileNotFoundError(f"there is no checkpoint of step {step}; there are: {names}")
            return found[-1]
        if not whole:
            raise FileNotFoundError("there is no checkpoint; expected directories named step-*")
        # A kill between the two renames leaves the pointer one behind, or none: what it names, and the newest
        # without it, are whole all the same.
        pointer = self.root / _LATEST
        named = self.root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        return named if named in whole else whole[-1]


@dataclass(frozen=True)
class Draft:
    """A checkpoint under way: the directory that this process writes to, empty at first, and the lock that says so."""

    path: Path
    lock: Lock

    def end(self, *, published: bool) -> None:
        """What was not published stays for the next writer to remove, as after a kill."""
        self.lock.release(remove=published)


def _key(path: Path) -> tuple[int, int] | None:
    """(step, how often it was saved again), by which checkpoints are ordered.

    >>> _key(Path("runs/step-00000020.1")), _key(Path("runs/step-x"))
    ((20, 1), None)
    """
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def about_text(step: int, extra: Mapping[str, Any] | None, kinds: list[str]) -> str:
    """A checkpoint's own file: its step, what the caller gave, and the kinds of its optimisers. Raises for what JSON
    would not give back as it is."""
    given = dict(extra or {})
    try:
        text = json.dumps({"step": step, "extra": given, "optimizers": kinds})
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra holds what JSON cannot say: {error}") from error
    if changed := _change("extra", given, json.loads(text)["extra"]):
        raise ValueError(
            f"{changed} from the file; expected dicts with text as keys, lists, text, numbers, True, False and None; "
            "convert it before, for instance a tuple to a list"
        )
    return text


def _change(name: str, given: Any, back: Any) -> str:
    """Where a value is not what JSON gives back, in value and type; empty where all is.

    >>> _change("extra", {"shape": (1, 2)}, {"shape": [1, 2]})
    "extra['shape'] is (1, 2), which would come back as [1, 2]"
    """
    parts: list[str] | None = None
    if type(given) is type(back) is list:
        parts = [_change(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(given, back, strict=True))]
    elif type(given) is type(back) is dict and [(type(k), k) for k in given] == [(type(k), k) for k in back]:
        parts = [_change(f"{name}[{key!r}]", given[key], back[key]) for key in given]
    elif type(given) is type(back) is not dict and (given == back or given != given):  # nan is not itself
        parts = []
    if parts is None:
        return f"{name} is {given!r:.60}, which would come back as {back!r:.60}"
    return next(filter(None, parts), "")


def write_through(file: Path, text: str) -> None:
    """Writes a file and forces it to the disk."""
    with file.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def force(directory: Path) -> None:
    """Forces a directory's names to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """A lock that this process holds, in a file that is there for as long. `release` it, or die."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """The lock of that name; None if somebody else holds it."""
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if _try(handle) is False:
                    os.close(handle)
                    return None
                if _is_at(handle, path):  # else its last holder removed the file meanwhile
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{_here()} {os.getpid()}\n".encode())
                    return cls(path, handle)
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def release(self, *, remove: bool = True) -> None:
        """Lets go of it; without `remove` the file stays, as it does when the holder dies."""
        if self._handle < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._handle)
        self._handle = -1


def is_left_behind(lock: Path, work: Path) -> bool:
    """Whether nobody holds a lock any more, of which `work` was the holder's file or directory."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it is made before the work begins, and goes when that is over
    try:
        got = _try(handle)
        if got is False:
            return False
        holder = os.read(handle, 4096).decode(errors="replace").split(" ")[0]
        is_known = got and holder in ("", _here())
        return is_known or time.time() - _last_written(work) > _SILENT_SECONDS
    finally:
        os.close(handle)


def holder_of(lock: Path) -> str:
    """Who holds a lock, for errors."""
    with suppress(OSError):
        words = lock.read_text(encoding="utf-8", errors="replace").split()
        if len(words) == 2:
            return f"process {words[1]} of {'this host' if words[0] == _here() else 'another host'}"
    return "another process"


def _here() -> str:
    """This host in one word."""
    return host_id().replace(" ", "_")


def _try(handle: int) -> bool | None:
    """Whether it could be locked; None on a file system that has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(handle)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _last_written(work: Path) -> float:
    found = 0.0
    for path in (work, *work.rglob("*")) if work.is_dir() else (work,):
        with suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found
