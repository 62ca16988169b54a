"""The lab's wires as text: no process, no namespace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import LabUnavailable
from weft.lab.linux import MAX_GBPS, MAX_HOSTS, MIN_GBPS, MTU, address, card, find_tool, plan_network

PLAN_2_HOSTS = """\
switch: sysctl ipv6/conf/all/disable_ipv6 1
switch: sysctl ipv6/conf/default/disable_ipv6 1
switch: ip link add name switch type bridge mcast_snooping 0
switch: ip link set switch up
switch: ip link add name port0 mtu 9000 gso_max_size 31250 type veth peer name eth0 mtu 9000 gso_max_size 31250 netns /ns/0
switch: ip link set port0 master switch up
switch: ip link add name port1 mtu 9000 gso_max_size 31250 type veth peer name eth0 mtu 9000 gso_max_size 31250 netns /ns/1
switch: ip link set port1 master switch up
switch: tc qdisc add dev port0 root tbf rate 1007375950bit burst 62500b limit 1073741824b
switch: tc qdisc add dev port1 root tbf rate 1007375950bit burst 62500b limit 1073741824b
host 0: sysctl ipv6/conf/all/disable_ipv6 1
host 0: sysctl ipv6/conf/default/disable_ipv6 1
host 0: sysctl ipv4/tcp_congestion_control reno
host 0: sysctl ipv4/tcp_slow_start_after_idle 0
host 0: sysctl ipv4/tcp_no_metrics_save 1
host 0: sysctl ipv4/tcp_orphan_retries 2
host 0: sysctl ipv4/tcp_limit_output_bytes 125000
host 0: sysctl ipv4/tcp_rmem 4096 500000 500000
host 0: ip link set lo up
host 0: ip address add 10.77.0.1/24 dev eth0
host 0: ip link set eth0 up
host 0: tc qdisc add dev eth0 root tbf rate 1007375950bit burst 62500b limit 1073741824b
"""  # noqa: E501


def test_the_plan_of_two_hosts() -> None:
    text = "\n".join(str(step) for step in plan_network(1.0, ["/ns/0", "/ns/1"]))
    host_1 = [line for line in text.splitlines() if line.startswith("host 1")]
    host_0 = [line for line in text.splitlines() if line.startswith("host 0")]
    assert text.startswith(PLAN_2_HOSTS)
    assert [line.replace("host 1", "host 0").replace("10.77.0.2", "10.77.0.1") for line in host_1] == host_0


def test_every_port_and_every_card_is_limited() -> None:
    steps = plan_network(2.0, [f"/ns/{host}" for host in range(5)])
    buckets = [line.split()[3] for step in steps if step.tool == "tc" for line in step.lines]
    assert buckets == [*(f"port{host}" for host in range(5)), *["eth0"] * 5]


def test_addresses_of_all_hosts_differ_and_fit_the_subnet() -> None:
    addresses = [address(host) for host in range(MAX_HOSTS)]
    assert len(set(addresses)) == MAX_HOSTS
    assert (addresses[0], addresses[-1]) == ("10.77.0.1", "10.77.0.254")


@given(gbps=st.floats(MIN_GBPS, MAX_GBPS))
def test_the_numbers_of_a_card_fit_each_other_and_the_kernel(gbps: float) -> None:
    wire = card(gbps)
    payload_share = (MTU - 52) / (MTU + 14)
    assert wire.rate * payload_share == pytest.approx(gbps * 1e9, rel=1e-6, abs=1.0)
    assert MTU < wire.gso <= 65536  # at least one full packet; 64 KiB is the largest that veth takes
    assert wire.burst >= 2 * wire.gso  # or a late timer loses tokens
    assert wire.burst <= max(20_000, gbps * 1e9 / 8 * 0.5e-3 + 1)  # at most 0.5 ms, or two packets
    assert wire.burst < wire.window < 2**31  # a C int in the kernel
    assert wire.queue < 2**31


def test_a_missing_tool_is_named_with_the_remedy() -> None:
    with pytest.raises(LabUnavailable, match=r"`no-such-tool`.*Install iproute2.*gbps=None"):
        find_tool("no-such-tool")
