"""`Cluster`: the caller's side of a lab."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, process, spawn
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, TypeVar

from weft.comm.deadline import LAB_ANSWER, LAB_END, LAB_RUN, LAB_START
from weft.errors import LONGEST_SECONDS, LabUnavailable, PeerTimeout, RankFailed
from weft.lab import linux
from weft.lab.command import Command, CommandSpec
from weft.lab.rank import LabJob, LabRun, Refusal, Spec, failure

T = TypeVar("T")


class Cluster:
    """A cluster of network namespaces on this machine, with real, rate-limited links.

    Each of the `hosts` hosts has one full-duplex network card of `gbps` Gbit/s, which its `devices` ranks
    share; all cards meet in one switch. `gbps` is what TCP delivers as payload, in each direction and in
    both at once; a card that was idle lets the first 0.5 ms (at least 20 kB) through at once. Inside a host
    traffic goes over loopback and is not limited, and its ranks share a /dev/shm that no other host sees.

    With `cards="tcp"` a message is a TCP message over gloo, which takes about 2 ms of a core for each MB. With
    `cards="dma"` it costs one copy, as on machines whose cards read memory themselves: bytes move at the pace of the
    cards, straight from the sender's memory into the receiver's, and arrive `latency_us` microseconds after they left.
    The process group is then one of the backend "dma", which has all that gloo has.

    It needs root or unprivileged user namespaces, and `ip` and `tc`; without them it raises LabUnavailable.
    `gbps=None` runs on plain loopback instead, without namespaces or limits, and `describe()` says so.

        def total(rank, x):
            t = torch.tensor([x * rank.rank])
            dist.all_reduce(t, group=rank.group)
            return t.item()

        with Cluster(hosts=2, devices=2, gbps=1.0) as cluster:
            cluster.run(total, 10)                              # [60, 60, 60, 60]
            cluster.command(1, ["hostname"]).wait()             # prints host1, and is 0

    Whatever happens, also SIGKILL to this process or to a rank, nothing is left behind. (On plain loopback a
    rank that is killed can leave a named shared memory in /dev/shm, as it can without a lab.)
    """

    def __init__(
        self,
        hosts: int = 2,
        devices: int = 2,
        gbps: float | None = 1.0,
        *,
        cards: str = "tcp",
        latency_us: float = 0.0,
        name: str | None = None,
        threads: int = 1,
    ) -> None:
        unique = f"{os.getpid()}-{secrets.token_hex(3)}"
        self.spec = Spec(unique if name is None else name, hosts, devices, gbps, threads, cards, latency_us)
        self._reservation: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._commander: socket.socket | None = None
        self._commands: list[Command] = []  # that may be running: a handle that nobody keeps does not end its command

    def describe(self) -> str:
        """One line: the name, the hosts and devices, and what the links are."""
        return self.spec.describe()

    def __str__(self) -> str:
        return self.describe()

    def __enter__(self) -> Cluster:
        if getattr(process.current_process(), "_inheriting", False):
            raise RuntimeError(
                "a lab was started while the main script was being imported for another one's ranks. "
                'Put the code that starts it under `if __name__ == "__main__":`'
            )
        if self._control is not None:
            raise RuntimeError(f"{self} is open already; use a second Cluster for a second lab")
        if self.spec.gbps is not None:
            for tool in ("ip", "tc"):
                linux.find_tool(tool)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = LAB_RUN.seconds) -> list[T]:
        """Runs `fn(rank, *args)` on every rank at once, `rank` being its `Rank`; returns the results by rank.

        fn and args are pickled: fn must be defined at the top level of a module or of the main script.
        Raises RankFailed with the traceback of the rank that failed first, or PeerTimeout with the stacks of
        the ranks that were still running after `timeout` seconds. No rank is left in either case, and the
        cluster can run something else.
        """
        if not 0 < timeout <= LONGEST_SECONDS:
            raise ValueError(f"timeout is {timeout!r}; expected seconds, above 0 and up to {LONGEST_SECONDS:g}")
        job = _job(fn, args, LabRun(_name(fn), self.spec.devices, timeout))
        if self._control is None:
            raise RuntimeError(f"{self} is not open; use it as `with Cluster(...) as cluster: cluster.run(...)`")
        try:
            answer = self._ask(job, timeout + LAB_ANSWER.seconds, f"the lab to finish `{job.run.function}`")
        except BaseException:
            self.close()  # nobody would read the answer to come, so this lab cannot go on
            raise
        if isinstance(answer, Refusal):
            raise RankFailed(f"the lab could not start `{job.run.function}` on its ranks:\n{answer.text}")
        error = failure(answer, job.run)
        if error is not None:
            raise error
        return [pickle.loads(ending.data) for ending in answer]

    def command(
        self,
        host: int,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = ".",
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> Command:
        """Starts a program on a host, next to whatever runs; returns its `Command`, to wait for or to kill.

        words is the program and its arguments; those of this Python's environment (torchrun, python) are found first.
        `env` comes on top of the environment that the lab was started in; `WEFT_LAB_HOST` is the host's number, and
        `OMP_NUM_THREADS` the lab's `threads`, as its hosts share the cores of one machine. Output goes to the caller's
        own, or to the file or descriptor given. The program has the card, the name (`host0`, which the other hosts
        resolve) and the /dev/shm of its host, which all its commands share; files are this machine's. It ends with all
        that it started, at the latest with the lab. Raises ValueError when it cannot be started.

            agents = [cluster.command(host, ["torchrun", *options, "script.py"]) for host in range(2)]
            codes = [agent.wait(timeout=600.0) for agent in agents]
        """
        if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
            raise ValueError(f"words are {words!r}; expected the program and its arguments, a list of texts")
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host < self.spec.hosts:
            raise ValueError(f"host is {host!r}; expected one of 0 to {self.spec.hosts - 1}")
        if self._commander is None:
            raise RuntimeError(f"{self} is not open; use it as `with Cluster(...) as cluster: cluster.command(...)`")
        sys.stdout.flush()
        spec = CommandSpec(host, tuple(words), os.path.abspath(cwd), dict(env or {}))
        self._commands = [command for command in self._commands if command.poll() is None]
        try:
            self._commands.append(Command(self._commander, spec, _descriptor(stdout, 1), _descriptor(stderr, 2)))
        except ConnectionError as error:
            raise RankFailed(f"{self}: its own process died before it could start {words[0]!r}") from error
        return self._commands[-1]

    def address(self, host: int) -> str:
        """The IPv4 address of a host's card: `cluster.address(0)` is where a rendezvous may be."""
        return "127.0.0.1" if self.spec.gbps is None else linux.address(host)

    def close(self) -> None:
        """Ends the lab's processes, and with them everything that it is made of. Harmless when closed."""
        for command in self._commands:
            command.close()
        self._commands = []
        if self._commander is not None:
            self._commander.close()
            self._commander = None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._guard is not None:
            try:
                self._guard.wait(timeout=LAB_END.seconds)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
            self._guard = None
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    def _start(self) -> None:
        self._reservation = reserve(self.spec.name)
        self._control, theirs = Pipe()
        self._commander, requests = socket.socketpair()
        ends = [theirs.fileno(), requests.fileno()]
        main = f"from weft.lab.zygote import main; main({ends[0]}, {ends[1]}, {os.getpid()})"
        with theirs, requests:
            self._guard = subprocess.Popen(
                linux.python(main, f"weft-lab-{self.spec.name}"),
                stdin=subprocess.DEVNULL,
                pass_fds=ends,
                start_new_session=True,  # Ctrl-C is for the caller, which then closes the lab
            )
        answer = self._ask(self.spec, LAB_START.seconds, "the lab to start")
        if isinstance(answer, Refusal):
            raise LabUnavailable(answer.text) if answer.unavailable else RankFailed(f"{self}: {answer.text}")

    def _ask(self, question: Spec | LabJob, seconds: float, what: str) -> Any:
        assert self._control is not None
        try:
            self._control.send(question)
            if self._control.poll(seconds):
                return self._control.recv()
        except (EOFError, ConnectionError) as error:
            raise RankFailed(f"{self}: its own process died while the caller waited for {what}") from error
        raise PeerTimeout(what, seconds=seconds)


def reserve(name: str) -> socket.socket:
    """Takes the name for as long as the socket is open; the kernel frees it with this process."""
    reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        reservation.bind(f"\0weft-lab-{name}")
    except OSError as error:
        reservation.close()
        raise ValueError(
            f"a lab named {name!r} is running on this machine; choose another name, or leave it out for a unique one"
        ) from error
    return reservation


def _descriptor(given: int | IO[Any] | None, standard: int) -> int:
    if given is None:
        return standard
    return given if isinstance(given, int) else given.fileno()


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", repr(fn)))


def _job(fn: Callable[..., object], args: tuple[object, ...], run: LabRun) -> LabJob:
    if not callable(fn):
        raise ValueError(f"fn is {fn!r}; expected a function that takes a Rank")
    preparation = spawn.get_preparation_data("weft-lab")
    del preparation["authkey"]  # not for pickling, and ranks do not use multiprocessing's listeners
    if not os.path.isfile(preparation.get("init_main_from_path", "")):
        preparation.pop("init_main_from_path", None)  # it is "<stdin>" when the script was piped in
    module = getattr(fn, "__module__", None) or "builtins"
    if module == "__main__" and not {"init_main_from_name", "init_main_from_path"} & preparation.keys():
        raise ValueError(
            f"`{_name(fn)}` is defined in an interactive session, where the ranks cannot import it from; "
            "put it in a file"
        )
    try:
        payload = pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`{_name(fn)}` and its arguments cannot be sent to the ranks ({error}); expected a function at "
            "the top level of a module, and arguments that pickle. Move the function there, and pass as "
            "arguments what it takes from around it"
        ) from error
    return LabJob(payload, module, preparation, run)
