"""What a lab asks of Linux that Python has no name for before 3.12: namespaces, mounts, children that die with their
parent.

The calls act on the calling process only. Errors are `OSError`s that name the call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int | bytes) -> None:
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OSError(error.errno, f"writing {text!r} to {path}: {error.strerror}") from error


def unshare(flags: int) -> None:
    """Moves this process into new namespaces, one for each `CLONE_NEW*` flag."""
    _call("unshare", flags)


def setns(fd: int, kind: int) -> None:
    """Moves this process into the namespace that `fd` keeps open; `kind` is its `CLONE_NEW*` flag."""
    _call("setns", fd, kind)


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """`mount(2)`: `mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")`."""
    _call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def die_with_parent(parent: int) -> None:
    """Has the kernel SIGKILL this process when the thread that forked it ends.

    `parent` is the pid that forked it: when that is gone already, no signal would ever come.
    """
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_exiting(pid: int) -> bool:
    """Whether the child `pid` has begun to exit, or has. The kernel notes it before it closes any file."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return bool(int(fields[6]) & PF_EXITING)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant that loses its own, so that none outlives the lab."""
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def isolate() -> None:
    """Enters new network, mount and IPC namespaces; without the privilege, those of a new user namespace.

    Must come before anything starts a thread (numpy's import does): the kernel lets only a
    single-threaded process make a user namespace.
    """
    flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC
    try:
        unshare(flags)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        unshare(flags | CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")  # the kernel asks for this before a gid_map
        _write("/proc/self/uid_map", f"0 {user} 1")
        _write("/proc/self/gid_map", f"0 {group} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE)  # no mount made from here on shows outside


def open_network() -> int:
    """A file descriptor that keeps the current network namespace alive; close it to let go."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(network: int) -> Iterator[None]:
    """Runs the block in the network namespace `network`, then comes back."""
    home = open_network()
    try:
        setns(network, CLONE_NEWNET)
        yield
    finally:
        setns(home, CLONE_NEWNET)
        os.close(home)


def kill_children() -> None:
    """SIGKILLs and reaps every descendant of this process. Needs `adopt_orphans` to miss none."""
    while True:
        for pid in Path("/proc/thread-self/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def python(statements: str, *labels: str) -> list[str]:
    """The command that runs `statements` in a new interpreter, which finds modules where this one does.

    `labels` show in the process list and mean nothing else.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {statements}", *labels]
