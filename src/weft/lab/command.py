"""Commands on the hosts of a lab: any program, torchrun too, in a host's namespaces, next to what `Cluster.run` runs.

    zygote ── commander ─┬─ supervisor ── command ── whatever it starts
                         └─ supervisor ── command ...

The commander forks a supervisor for each command, which adopts what the command leaves behind, so that a command ends
with all that it started. Nobody of these outlives the lab: the guard adopts and ends them as it does with ranks.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from weft.comm.deadline import COMMAND, LAB_ANSWER
from weft.errors import LONGEST_SECONDS, PeerTimeout, RankFailed
from weft.lab import linux
from weft.lab.rank import Refusal

WIRE_VARIABLE = "WEFT_LAB_WIRE"
"""In the environment of a command on DMA cards: a path that opens the wire, for `weft.lab.backend.register`."""

HOST_VARIABLE = "WEFT_LAB_HOST"
"""In the environment of every command: the number of its host."""


def fill(words: Sequence[str], *, host: int, hosts: int, rank0_address: str) -> list[str]:
    """The words of a command with `{host}`, `{hosts}` and `{rank0_address}` filled in; other braces stay.

    >>> fill(["--rdzv-endpoint", "{rank0_address}:29500", "{}"], host=1, hosts=2, rank0_address="10.77.0.1")
    ['--rdzv-endpoint', '10.77.0.1:29500', '{}']
    """
    values = {"{host}": str(host), "{hosts}": str(hosts), "{rank0_address}": rank0_address}
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(name, value)
        filled.append(word)
    return filled


# The caller's side ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandSpec:
    """A command for a host: its words, its directory, and what its environment has on top of the caller's."""

    host: int
    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]


class Command:
    """A command that runs on a host of a lab; `Cluster.command` starts it.

    host:  its host
    words: the program and its arguments
    pid:   of its process, on this machine
    """

    def __init__(self, commander: socket.socket, spec: CommandSpec, stdout: int, stderr: int) -> None:
        self.host, self.words = spec.host, spec.words
        self._code: int | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(commander, [b"c"], [theirs.fileno(), stdout, stderr])
        self._channel = Connection(ours.detach())
        self._channel.send(spec)
        answer = self._hear(LAB_ANSWER.seconds, "to start")
        if isinstance(answer, Refusal):
            raise ValueError(answer.text)
        assert isinstance(answer, int)
        self.pid: int = answer

    def __str__(self) -> str:
        return f"`{' '.join(self.words)}` on host {self.host}"

    def wait(self, timeout: float = COMMAND.seconds) -> int:
        """The exit code, as `subprocess` has it: negative for a signal. Raises PeerTimeout; the command then goes on.

        It comes when all that the command had started is gone, too.
        """
        if not 0 <= timeout <= LONGEST_SECONDS:
            raise ValueError(f"timeout is {timeout!r}; expected seconds, from 0 to {LONGEST_SECONDS:g}")
        if self._code is None:
            answer = self._hear(timeout, "to end")
            assert isinstance(answer, int)
            self._code = answer
            self._channel.close()
        return self._code

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.wait(0.0) if self._code is not None or self._channel.poll() else None

    def send_signal(self, number: int) -> None:
        """Sends a signal to the command's own process; nothing happens when it has ended."""
        self._tell((int(number), False))

    def kill(self) -> None:
        """SIGKILL to the command and all that it started, at once, as when its host fails. `wait` then returns -9."""
        self._tell((int(signal.SIGKILL), True))

    def _tell(self, what: tuple[int, bool]) -> None:
        if self._code is None:
            with suppress(OSError):  # it has just ended
                self._channel.send(what)

    def _hear(self, seconds: float, what: str) -> int | Refusal:
        try:
            if self._channel.poll(seconds):
                answer: int | Refusal = self._channel.recv()
                return answer
        except (EOFError, OSError) as error:
            raise RankFailed(f"{self} ended with its lab, while the caller waited for it {what}") from error
        raise PeerTimeout(f"{self} {what}", seconds=seconds)

    def close(self) -> None:
        """Ends the command if it runs. Harmless when it has ended."""
        self._channel.close()


# The lab's side -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """What commands find on the hosts: network namespaces, directories that become /dev/shm, and a wire of DMA cards.

    All are kept for as long as the lab is there: a host does not forget between two commands. On plain loopback there
    are none. `threads` is how many a process uses unless it is told: the hosts share the cores of one machine.
    """

    networks: tuple[int, ...]
    memories: tuple[str, ...]
    wire: int | None
    threads: int

    @classmethod
    def make(cls, networks: tuple[int, ...], wire: int | None, threads: int) -> Hosts:
        memories = tuple(f"/dev/shm/commands{host}" for host in range(len(networks)))
        for memory in memories:
            os.mkdir(memory)
            os.chmod(memory, 0o1777)  # what /dev/shm has
        return cls(networks, memories, wire, threads)

    def variables(self, host: int) -> dict[str, str]:
        """What the environment of a command says about its host."""
        found = {HOST_VARIABLE: str(host), "GLOO_SOCKET_IFNAME": "eth0" if self.networks else "lo"}
        found["OMP_NUM_THREADS"] = str(self.threads)
        if self.wire is not None:  # a path, as launchers close the descriptors that their children would inherit
            found[WIRE_VARIABLE] = f"/proc/{os.getppid()}/fd/{self.wire}"
        return found

    def enter(self, host: int) -> None:
        """Moves this process to a host: its card, its name, its memory."""
        if not self.networks:
            return
        linux.setns(self.networks[host], linux.CLONE_NEWNET)
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
        socket.sethostname(f"host{host}")  # which /etc/hosts has: programs tell each other this name
        linux.mount(self.memories[host], "/dev/shm", "", linux.MS_BIND)


def fork_commander(hosts: Hosts, requests: socket.socket, not_theirs: Connection) -> int:
    """Starts the process that starts commands, and gives its pid. It ends with this one, or when `requests` closes."""
    parent = os.getpid()
    sys.stdout.flush()  # or it would be printed once more
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with_parent(parent)
            linux.adopt_orphans()
            not_theirs.close()
            _serve(hosts, requests)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    requests.close()
    return pid


def _serve(hosts: Hosts, requests: socket.socket) -> None:
    while True:
        said, descriptors, _, _ = socket.recv_fds(requests, 1, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # of commands that have ended
        if not said:
            return  # the caller closed the lab
        commander = os.getpid()
        if os.fork() == 0:
            try:
                linux.die_with_parent(commander)
                linux.adopt_orphans()
                requests.close()
                channel, stdout, stderr = descriptors
                _supervise(hosts, Connection(channel), stdout, stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _supervise(hosts: Hosts, channel: Connection, stdout: int, stderr: int) -> None:
    spec: CommandSpec = channel.recv()
    try:
        process = _start(hosts, spec, stdout, stderr)
    except OSError as error:
        channel.send(Refusal(_refused(spec, error)))
        return
    os.close(stdout)
    os.close(stderr)
    channel.send(process.pid)
    code = _until_ended(process, channel)
    linux.kill_children()  # what it left behind, or all of it
    with suppress(OSError):  # nobody may listen any more
        channel.send(code)


def _start(hosts: Hosts, spec: CommandSpec, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    variables = {**hosts.variables(spec.host), **spec.variables}
    hosts.enter(spec.host)
    for name, value in variables.items():
        os.environ[name] = value
    supervisor = os.getpid()
    return subprocess.Popen(
        [_find(spec.words[0]), *spec.words[1:]],
        cwd=spec.folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=lambda: linux.die_with_parent(supervisor),
    )


def _find(program: str) -> str:
    """A program of this interpreter's environment (torchrun, python, weft) before one that PATH has."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or program


def _refused(spec: CommandSpec, error: OSError) -> str:
    return (
        f"host {spec.host} could not start {spec.words[0]!r} in {spec.folder}: {error}; expected a program on PATH or "
        "beside this Python, and a directory that is there"
    )


def _until_ended(process: subprocess.Popen[bytes], channel: Connection) -> int:
    """The exit code; -9 when it is to be killed with all that it started, which the caller of this does."""
    end = os.pidfd_open(process.pid)
    while True:
        ready, _, _ = select.select([end, channel.fileno()], [], [])
        if end in ready:
            return process.wait()
        try:
            number, is_whole = channel.recv()
        except (EOFError, OSError):
            return -signal.SIGKILL  # its handle was closed
        if is_whole:
            return -signal.SIGKILL
        process.send_signal(number)
