"""Bad input and machines without what a lab needs: an error that says what to do, and nothing started."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.errors import RankFailed
from weft.lab import Cluster, Rank
from weft.lab.cluster import reserve
from weft.lab.linux import namespaces_available


def processes() -> set[str]:
    """The processes below this one."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, "hosts is 0; expected a whole number, at least 1"),
        ({"hosts": -3}, "hosts is -3"),
        ({"hosts": 2.0}, "hosts is 2.0"),
        ({"hosts": True}, "hosts is True"),
        ({"hosts": 255}, r"hosts is 255; the lab's switch has 254 addresses .* gbps=None"),
        ({"devices": 0}, "devices is 0; expected a whole number, at least 1"),
        ({"threads": 0}, "threads is 0"),
        ({"gbps": 0.0}, "gbps is 0.0; expected a rate in Gbit/s from 0.001 to 1000, or None"),
        ({"gbps": -1.0}, "gbps is -1.0"),
        ({"gbps": math.inf}, "gbps is inf"),
        ({"gbps": math.nan}, "gbps is nan"),
        ({"gbps": "1"}, "gbps is '1'"),
        ({"gbps": 2000.0}, "gbps is 2000.0"),
        ({"name": ""}, "name is ''; expected 1 to 64 letters"),
        ({"name": "a b"}, "name is 'a b'"),
        ({"name": "x" * 65}, "name is 'xxx"),
    ],
)
def test_a_lab_that_cannot_be(options: dict[str, object], message: str) -> None:
    before = processes()
    with pytest.raises(ValueError, match=message):
        Cluster(**options)  # type: ignore[arg-type]
    assert processes() == before


def nothing(rank: Rank) -> None:
    pass


@pytest.fixture(scope="module")
def loopback() -> Iterator[Cluster]:
    with Cluster(hosts=2, devices=1, gbps=None) as cluster:
        yield cluster


def test_a_name_in_use(loopback: Cluster) -> None:
    before = processes()
    second = Cluster(name=loopback.spec.name, gbps=None)
    with pytest.raises(ValueError, match=rf"a lab named '{loopback.spec.name}' is running.*another name"):
        second.__enter__()
    assert processes() == before
    assert loopback.run(nothing) == [None, None]


def test_a_name_is_free_again_afterwards() -> None:
    for _ in range(2):
        with reserve(f"twice-{os.getpid()}"), pytest.raises(ValueError, match="is running"):
            reserve(f"twice-{os.getpid()}")


def test_functions_and_arguments_that_cannot_be_sent(loopback: Cluster) -> None:
    def closure(rank: Rank) -> None:
        pass

    remedy = "Move the function there"
    with pytest.raises(ValueError, match=rf"`.*<lambda>`(?s:.*){remedy}"):
        loopback.run(lambda rank: None)
    with pytest.raises(ValueError, match=rf"closure`(?s:.*){remedy}"):
        loopback.run(closure)
    with pytest.raises(ValueError, match=r"cannot be sent to the ranks \(.*lock"):
        loopback.run(nothing, threading.Lock())
    with pytest.raises(ValueError, match="fn is 3; expected a function that takes a Rank"):
        loopback.run(3)  # type: ignore[arg-type]
    assert loopback.run(nothing) == [None, None]


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_a_timeout_that_is_none(loopback: Cluster, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*; expected seconds, above 0 and up to"):
        loopback.run(nothing, timeout=timeout)


def test_a_function_of_an_interactive_session() -> None:
    code = (
        "from weft.lab import Cluster\ndef nothing(rank): pass\nCluster(hosts=1, devices=1, gbps=None).run(nothing)\n"
    )
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=120)
    assert "`nothing` is defined in an interactive session" in done.stderr
    assert "put it in a file" in done.stderr


def test_a_cluster_that_is_not_open() -> None:
    with pytest.raises(RuntimeError, match=r"is not open; use it as `with Cluster"):
        Cluster(gbps=None).run(nothing)


def test_a_cluster_cannot_be_opened_twice(loopback: Cluster) -> None:
    with pytest.raises(RuntimeError, match="is open already"):
        loopback.__enter__()


def test_a_module_that_the_ranks_cannot_import(loopback: Cluster, tmp_path: Path) -> None:
    module = tmp_path / "only_here_once.py"
    module.write_text("def fn(rank):\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here_once  # type: ignore[import-not-found]

        module.write_text("raise OSError('no longer')")
        with pytest.raises(RankFailed, match=r"could not start `fn`(?s:.*)OSError: no longer"):
            loopback.run(only_here_once.fn)
    finally:
        sys.path.remove(str(tmp_path))
    assert loopback.run(nothing) == [None, None]


def host_and_network(rank: Rank) -> tuple[int, str]:
    return rank.host, os.readlink("/proc/self/ns/net")


def test_plain_loopback_runs_without_namespaces_and_says_so(loopback: Cluster) -> None:
    outside = os.readlink("/proc/self/ns/net")
    assert loopback.run(host_and_network) == [(0, outside), (1, outside)]
    assert "plain loopback: no namespaces, no rate limit" in str(loopback)


# What stands in the way is made real, in namespaces of the test's own.
WITHOUT_NETWORK_NAMESPACES = """
import os
from weft.lab import linux
user, group = os.geteuid(), os.getegid()
linux.unshare(linux.CLONE_NEWUSER)
linux._write("/proc/self/setgroups", "deny")
linux._write("/proc/self/uid_map", f"0 {user} 1")
linux._write("/proc/self/gid_map", f"0 {group} 1")
linux._write("/proc/sys/user/max_net_namespaces", "0")
"""
WITHOUT_TC = """
import os, shutil
from weft.lab import linux
linux.isolate()
for place in {os.path.dirname(shutil.which(tool) or "/usr/sbin/") for tool in ("ip", "tc")} | {"/usr/sbin", "/sbin"}:
    linux.mount("tmpfs", place, "tmpfs")
"""
ATTEMPT = """
from pathlib import Path
from weft.errors import LabUnavailable
from weft.lab import Cluster
from weft.lab.cluster import reserve
from weft.lab.linux import namespaces_available
print(namespaces_available())
try:
    with Cluster(): print("started")
except LabUnavailable as error:
    print(error)
print("left:", Path("/proc/thread-self/children").read_text())
"""


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (WITHOUT_NETWORK_NAMESPACES, "this machine does not let us make namespaces .*unshare: No space left"),
        (WITHOUT_TC, "the command `(ip|tc)` was not found.*Install iproute2"),
    ],
    ids=["no namespaces", "no tools"],
)
def test_a_machine_that_cannot(namespaces: None, obstacle: str, reason: str) -> None:
    done = subprocess.run([sys.executable, "-c", obstacle + ATTEMPT], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    doctor, cluster, left = done.stdout.splitlines()
    assert doctor.startswith("(False, ")
    for text in (doctor, cluster):
        assert re.search(reason + ".*gbps=None for plain loopback", text)
    assert left == "left: "


def test_the_doctor_agrees_with_itself() -> None:
    available, text = namespaces_available()
    assert available == text.startswith("namespaces, links and rate limits work")


def test_the_doctor_and_the_labs_own_start_need_no_torch() -> None:
    """A user namespace can only be made before torch's import has started threads."""
    code = "import sys, weft.lab.zygote, weft.lab.linux; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"
