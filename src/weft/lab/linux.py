"""What a lab asks of Linux: the few calls that Python has no name for before 3.12, and the wires between its hosts
(what to tell `ip` and `tc`, which is pure; the function that tells them; and whether this machine can).

    host 0                 switch                 host 1
    eth0 10.77.0.1 ─────── port0 ── bridge ── port1 ─────── eth0 10.77.0.2

Each host and the switch is a network namespace. None has a name: only open file descriptors keep them, so
the kernel removes every namespace, link and queue when the lab's processes are gone, however they ended.

The fabric loses nothing, like one with credits: what may be under way on a connection is bounded by its
receive window, and the queues hold that. (Rejected: short queues that drop. An incast then waits 200 ms for
TCP's shortest retransmission timer, and no two runs are alike.)

The calls act on the calling process only. Errors are `OSError`s that name the call.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LabUnavailable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
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


def kill_children(*, spare: int | None = None) -> None:
    """SIGKILLs and reaps every descendant of this process, but for the child `spare` and what is below it.

    Needs `adopt_orphans` to miss none.
    """
    while True:
        children = {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()} - {spare}
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        if not children and spare is not None:
            return
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


# The wires between hosts ------------------------------------------------------------------------------------

MAX_HOSTS = 254
"""The host addresses of 10.77.0.0/24; a Linux bridge would take 1023 ports."""

MIN_GBPS, MAX_GBPS = 0.001, 1000.0

MTU = 9000
_ETHERNET = 14  # bytes that the token bucket counts for each packet on top of the MTU
_HEADERS = 52  # IPv4 20, TCP 20, TCP timestamps 12: what of the MTU is not payload
_SWITCH = -1


@dataclass(frozen=True)
class Card:
    """The numbers of one network card, the same in both directions. Sizes are in bytes.

    rate:    bits/s that the token bucket lets through, headers included
    burst:   bytes that a card which was idle lets through at once
    gso:     the largest packet that TCP hands down; `burst` is at least two of them, because a timer that
             fires late while the bucket is full would lose its tokens for good
    queue:   what one connection may keep in the sending card's queue
    window:  what one connection may have under way in all

    >>> card(1.0)
    Card(rate=1007375950, burst=62500, gso=31250, queue=125000, window=500000)
    """

    rate: int
    burst: int
    gso: int
    queue: int
    window: int


def card(gbps: float) -> Card:
    """The card whose TCP payload rate is `gbps` Gbit/s: headers are added on top of what was asked for.

    The times below are measured choices, on a virtual machine with busy cores: a burst of two packets keeps
    the rate within 2 %, one of a single packet loses 7 %, and a longer one lets short messages through too fast.
    """
    payload = gbps * 1e9 / 8  # bytes/s
    gso = min(65536, max(MTU + 1000, round(payload * 0.25e-3)))
    burst = max(2 * gso, round(payload * 0.5e-3))
    return Card(
        rate=round(gbps * 1e9 * (MTU + _ETHERNET) / (MTU - _HEADERS)),
        burst=burst,
        gso=gso,
        queue=2 * burst,
        window=max(65536, round(payload * 4e-3)),
    )


def address(host: int) -> str:
    """The IPv4 address of a host's card: `address(0) == "10.77.0.1"`."""
    return f"10.77.0.{host + 1}"


@dataclass(frozen=True)
class NetworkStep:
    """Lines for one `ip -batch` or `tc -batch`, or settings for /proc/sys/net, in one namespace."""

    host: int  # -1 is the switch
    tool: str  # "ip", "tc" or "sysctl"
    lines: tuple[str, ...]

    def __str__(self) -> str:
        where = "switch" if self.host == _SWITCH else f"host {self.host}"
        return "\n".join(f"{where}: {self.tool} {line}" for line in self.lines)


def plan_network(gbps: float, namespaces: Sequence[str]) -> tuple[NetworkStep, ...]:
    """The steps that wire hosts to one switch; `namespaces` has the path of each host's network namespace.

    >>> print(plan_network(1.0, ["/proc/self/fd/5"])[1])
    switch: ip link add name switch type bridge mcast_snooping 0
    switch: ip link set switch up
    switch: ip link add name port0 mtu 9000 gso_max_size 31250 type veth peer name eth0 mtu 9000 gso_max_size 31250 netns /proc/self/fd/5
    switch: ip link set port0 master switch up
    """  # noqa: E501
    wire = card(gbps)
    size = f"mtu {MTU} gso_max_size {wire.gso}"
    links = ["link add name switch type bridge mcast_snooping 0", "link set switch up"]
    hosts = range(len(namespaces))
    for host, namespace in enumerate(namespaces):
        links.append(f"link add name port{host} {size} type veth peer name eth0 {size} netns {namespace}")
        links.append(f"link set port{host} master switch up")
    steps = [
        NetworkStep(_SWITCH, "sysctl", _QUIET),
        NetworkStep(_SWITCH, "ip", tuple(links)),
        NetworkStep(_SWITCH, "tc", tuple(_bucket(f"port{host}", wire) for host in hosts)),
    ]
    for host in hosts:
        up = ("link set lo up", f"address add {address(host)}/24 dev eth0", "link set eth0 up")
        steps.append(NetworkStep(host, "sysctl", _QUIET + _tcp(wire)))
        steps.append(NetworkStep(host, "ip", up))
        steps.append(NetworkStep(host, "tc", (_bucket("eth0", wire),)))
    return tuple(steps)


# No router solicitations on the wires, and gloo finds no second address on a card.
_QUIET = ("ipv6/conf/all/disable_ipv6 1", "ipv6/conf/default/disable_ipv6 1")


def _tcp(wire: Card) -> tuple[str, ...]:
    return (
        "ipv4/tcp_congestion_control reno",  # the one that every kernel has and every namespace may choose
        "ipv4/tcp_slow_start_after_idle 0",  # or each message after a pause would ramp up anew
        "ipv4/tcp_no_metrics_save 1",
        "ipv4/tcp_orphan_retries 2",  # or what killed ranks had under way keeps their namespace for minutes
        f"ipv4/tcp_limit_output_bytes {wire.queue}",
        f"ipv4/tcp_rmem 4096 {wire.window} {wire.window}",
    )


def _bucket(device: str, wire: Card) -> str:
    # The limit is not there to be reached: it holds the windows of 200 connections at 10 Gbit/s.
    return f"qdisc add dev {device} root tbf rate {wire.rate}bit burst {wire.burst}b limit {1 << 30}b"


def find_tool(name: str) -> str:
    """The path of `ip` or `tc`, also where an ordinary user's PATH does not look."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise LabUnavailable(
            f"the command `{name}` was not found on PATH, in /usr/sbin or in /sbin; a lab with rate-limited "
            f"links needs it. Install iproute2, or pass gbps=None for plain loopback."
        )
    return path


def enter(hosts: int, gbps: float) -> tuple[int, ...]:
    """Takes this process out of the machine's network, /dev/shm and /etc/hosts, into those of a new lab.

    Returns an open file descriptor for each host's network namespace; the process itself is in the switch's.
    There is no way back: the lab is there until this process and its children are gone.
    """
    try:
        isolate()
        mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
        _name_hosts(hosts)
        return _build(hosts, gbps)
    except OSError as error:
        raise LabUnavailable(
            f"this machine does not let us make namespaces ({error}). A lab with rate-limited links needs "
            "root (in a container: CAP_SYS_ADMIN and CAP_NET_ADMIN), or unprivileged user namespaces "
            "(sysctl user.max_user_namespaces above 0; on Ubuntu also "
            "kernel.apparmor_restrict_unprivileged_userns=0). "
            "Allow one of them, or pass gbps=None for plain loopback."
        ) from error


def _name_hosts(hosts: int) -> None:
    """Names the hosts host0, host1, ...: torch looks up its peers' names, and there is no DNS in here.

    It does so by IPv4 addresses that are written as IPv6 ones, hence the second line for each host.
    """
    lines = Path("/etc/hosts").read_text().splitlines()
    for host in range(hosts):
        lines += [f"{prefix}{address(host)} host{host}" for prefix in ("", "::ffff:")]
    file = Path("/dev/shm/hosts")
    file.write_text("\n".join([*lines, ""]))
    mount(str(file), "/etc/hosts", "", MS_BIND)


def _build(hosts: int, gbps: float) -> tuple[int, ...]:
    switch = open_network()
    namespaces = []
    for _ in range(hosts):
        unshare(CLONE_NEWNET)
        namespaces.append(open_network())
    setns(switch, CLONE_NEWNET)
    for step in plan_network(gbps, [f"/proc/self/fd/{fd}" for fd in namespaces]):
        with inside(switch if step.host == _SWITCH else namespaces[step.host]):
            _apply(step, pass_fds=namespaces)
    os.close(switch)
    return tuple(namespaces)


def _apply(step: NetworkStep, *, pass_fds: Sequence[int]) -> None:
    if step.tool == "sysctl":
        _write_settings(step)
        return
    command = [find_tool(step.tool), "-batch", "-"]
    text = "\n".join(step.lines) + "\n"
    done = subprocess.run(command, input=text, text=True, capture_output=True, pass_fds=pass_fds)
    if done.returncode != 0:
        raise LabUnavailable(
            f"`{step.tool} -batch` refused one of these lines: {done.stderr.strip()}\n{step}\n"
            "A lab needs a kernel with veth, bridge and the tbf queue (modules veth, bridge, sch_tbf). "
            "Load them, or pass gbps=None for plain loopback."
        )


def _write_settings(step: NetworkStep) -> None:
    for line in step.lines:
        name, value = line.split(" ", 1)
        setting = Path("/proc/sys/net", name)
        if name.startswith("ipv6/") and not setting.exists():
            continue  # a kernel without IPv6 has nothing to switch off
        try:
            setting.write_text(value)
        except OSError as error:
            raise LabUnavailable(
                f"could not set net/{name} to {value!r} ({error}); a lab needs Linux 4.15 or newer, and "
                "/proc/sys writable. Use such a machine, or pass gbps=None for plain loopback."
            ) from error


def namespaces_available() -> tuple[bool, str]:
    """Whether this machine can make a lab: (True, what works) or (False, what is missing and the remedy).

    It makes a real lab's namespaces and links for one host in a process of its own (without torch, in a
    fraction of a second); the kernel takes them away with that process.
    """
    try:
        tools = [find_tool(name) for name in ("ip", "tc")]
    except LabUnavailable as error:
        return False, str(error)
    probe = python("from weft.lab.linux import probe; sys.exit(probe())", "weft-lab-probe")
    done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        return False, (done.stdout or done.stderr).strip()
    return True, f"namespaces, links and rate limits work, with {' and '.join(tools)}"


def probe() -> int:
    """Tries it in this process, which must end afterwards: 0, or prints the reason and is 1."""
    try:
        enter(hosts=1, gbps=1.0)
    except LabUnavailable as error:
        print(error)
        return 1
    return 0
