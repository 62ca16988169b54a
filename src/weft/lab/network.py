"""The wires between a lab's hosts: what to tell `ip` and `tc`, which is pure; the function that tells them; and whether
this machine can.

    host 0                 switch                 host 1
    eth0 10.77.0.1 ─────── port0 ── bridge ── port1 ─────── eth0 10.77.0.2

Each host and the switch is a network namespace. None has a name: only open file descriptors keep them, so
the kernel removes every namespace, link and queue when the lab's processes are gone, however they ended.

The fabric loses nothing, like one with credits: what may be under way on a connection is bounded by its
receive window, and the queues hold that. (Rejected: short queues that drop. An incast then waits 200 ms for
TCP's shortest retransmission timer, and no two runs are alike.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LabUnavailable
from weft.lab.linux import CLONE_NEWNET, MS_BIND, inside, isolate, mount, open_network, python, setns, unshare

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
    probe = python("from weft.lab.network import probe; sys.exit(probe())", "weft-lab-probe")
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
