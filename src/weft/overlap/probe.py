"""Measures the curves of a group: all ranks at once, a fraction of a second, once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.comm import Group
from weft.kernels import linear
from weft.overlap.curves import Curve, Curves, slowest, subadditive
from weft.overlap.topology import Topology
from weft.overlap.weights import pack
from weft.overlap.worker import Worker

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_MATMUL = (96, 512, 1024)  # m, k, n: small enough to be quick, large enough to run at full speed
_ADD_BYTES = 1 << 22
_REPEATS = 5
# A block is also waited for, viewed, recorded and added up: as much work again as its message.
_MESSAGE_WORK = 2.0
_TAG = 1


def measure_curves(group: Group) -> Curves:
    """The curves of a group, the same on all ranks. Collective."""
    topology = Topology(group.hosts)
    x, w = torch.randn(_MATMUL[0], _MATMUL[1]), pack(torch.randn(_MATMUL[2], _MATMUL[1]))
    group.barrier("probe of the matmul")
    seconds = _fastest(lambda: linear(x, w))
    a, b = torch.ones(_ADD_BYTES // 4), torch.ones(_ADD_BYTES // 4)
    added = _fastest(lambda: torch.add(a, b, out=a))
    points, per_byte, per_message = _wire(group, topology)
    mine = Curves(
        wire=Curve(points),
        flops=2.0 * _MATMUL[0] * _MATMUL[1] * _MATMUL[2] / seconds,
        add_bytes=2 * _ADD_BYTES / added,
        cpu_per_byte=per_byte,
        call_overhead=points[0][1],
        cpu_per_message=_MESSAGE_WORK * per_message,
        handover=_handover(),
    )
    return slowest([Curves.from_json(text) for text in share_texts(group, mine.to_json())])


def _fastest(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _handover() -> float:
    worker = Worker("weft-probe")
    return _fastest(lambda: worker.start(lambda job: job.agreed()).join(seconds=60.0))


def _wire(group: Group, topology: Topology) -> tuple[tuple[tuple[float, float], ...], float, float]:
    """Bytes of a host's card against seconds: one rank of each host sends to the next host and receives.

    And the CPU seconds of a byte, and of the smallest message.
    """
    host = topology.hosts[group.rank]
    speaks = topology.count > 1 and group.rank == topology.ranks_of(host)[0]
    points: list[tuple[float, float]] = []
    per_byte = per_message = 0.0
    for size in SIZES:
        group.barrier(f"probe of {size} bytes")
        if speaks:
            right = topology.ranks_of((host + 1) % topology.count)[0]
            left = topology.ranks_of((host - 1) % topology.count)[0]
            seconds, cpu = _swap(group, right, left, size)
            per_byte, per_message = cpu / size, cpu if size == SIZES[0] else per_message
        else:
            seconds = 1e-6  # never the slowest
        points.append((float(size), seconds))
    return subadditive(points), per_byte, per_message


def _swap(group: Group, right: int, left: int, size: int) -> tuple[float, float]:
    out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    wall, cpu = [], []
    for _ in range(3 if size >= 1 << 20 else _REPEATS):
        start, used = time.perf_counter(), time.process_time()
        transfers = [group.recv(into, left, tag=_TAG), group.send(out, right, tag=_TAG)]
        for transfer in transfers:
            transfer.wait(what=f"probe of {size} bytes")
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu)


def share_texts(group: Group, mine: str) -> list[str]:
    """What each rank gave, in rank order."""
    data = torch.tensor(list(mine.encode()), dtype=torch.uint8)  # frombuffer takes no empty text
    peers = [rank for rank in range(group.size) if rank != group.rank]
    sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in peers}
    _swap_all(group, {r: torch.tensor([data.numel()]) for r in peers}, sizes, "the size of a text")
    texts = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
    _swap_all(group, dict.fromkeys(peers, data), texts, "a text")
    texts[group.rank] = data
    return [texts[rank].numpy().tobytes().decode() for rank in range(group.size)]


def _swap_all(group: Group, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor], what: str) -> None:
    transfers = [group.recv(data, rank, tag=_TAG) for rank, data in into.items()]
    transfers += [group.send(data, rank, tag=_TAG) for rank, data in out.items()]
    for transfer in transfers:
        transfer.wait(what=what)
