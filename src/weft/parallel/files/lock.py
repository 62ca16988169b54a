"""Who is at work on a file or a directory: a lock that the kernel takes back when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from weft.comm.hosts import host_id

# A lock of another host counts as left behind when nothing was written for so long: some file systems keep locks for
# each host alone.
_SILENT_SECONDS = 3600.0


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
