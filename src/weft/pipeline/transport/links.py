"""What a rank keeps from step to step for its transfers.

What a rank of a pipeline has to do with other ranks: connections, channels, and what is known of failures.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from weft.comm.tags import channel_tags
from weft.comm.tell import store_of
from weft.errors import PeerLost
from weft.layout.mesh import DeclaredCluster
from weft.pipeline.predict.lowered import TensorTransfer
from weft.pipeline.transport.channel import Channel, ChannelPlanner, ChannelRings, NoRings, SharedMemory, Way
from weft.pipeline.transport.connections import Connections
from weft.pipeline.transport.failure import Board, StageFailed
from weft.pipeline.transport.placing import Placing
from weft.pipeline.transport.routes import Route, Routes
from weft.pipeline.transport.threads import ArrivalBuffers, Crew
from weft.reshard.spec import STRATEGIES


class Payload(Enum):
    """What transfers carry."""

    TENSORS = "tensors"
    SIGNALS = "signals"  # a few bytes in place of each tensor, whose values are then 0: the speed without a network


@dataclass
class TransferContext:
    """What a rank keeps from step to step for its transfers.

    ways:     how each route's tensors lie on both sides
    channels: those that this rank takes part in, by their number
    stop:     set when anything has failed
    fail:     told of errors of the transfer threads
    devices:  of each stage of this rank: where what arrives for it is put
    """

    rank: int
    wires: Connections
    planner: ChannelPlanner
    buffers: ArrivalBuffers
    ways: dict[Route, Way]
    channels: dict[int, Channel]
    stop: threading.Event
    payload: Payload
    start: Callable[[Callable[[], None]], None]
    fail: Callable[[BaseException, TensorTransfer], None]
    first_shape_note: int
    devices: dict[int, torch.device]
    zeros: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkOptions:
    """How tensors are moved; what reshard's planner takes, and what is moved."""

    strategy: str = "optimal"
    cluster: DeclaredCluster | None = None
    chunk_bytes: int | None = None
    payload: Payload = Payload.TENSORS

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}, expected one of {', '.join(STRATEGIES)}")
        if self.chunk_bytes is not None and self.chunk_bytes < 1024:
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}, expected 1024 or more, or None to have it chosen")


class Links:
    """Made once for a pipeline, by all ranks together; used by one step after the other."""

    def __init__(
        self,
        wires: Connections,
        placing: Placing,
        routes: Routes,
        options: LinkOptions,
        devices: Mapping[int, torch.device],
    ) -> None:
        """`routes` has all channels that any step will use, `devices` where each stage of this rank computes."""
        channel_tags(max(0, routes.total - 1))  # on all ranks alike, before any waits for another
        self.wires, self._routes = wires, routes
        self.rank = wires.world[wires.rank]
        self.board = Board(store_of(wires.notes.pg), self.rank)
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self.lost: set[int] = set()
        self._closed, self._process = False, os.getpid()
        self._lock = threading.Lock()
        self._crew = Crew("weft-pipeline")
        ways = {route: placing.way(route) for route in routes.channels}
        shares = any(_shares_memory(way) for way in ways.values())
        self._shared = SharedMemory.create(wires, routes.total) if shares else None
        self.context = TransferContext(
            self.rank,
            wires,
            ChannelPlanner(
                self.rank, strategy=options.strategy, cluster=options.cluster, chunk_bytes=options.chunk_bytes
            ),
            ArrivalBuffers(),
            ways,
            self._channels(ways),
            self.stop,
            options.payload,
            self._crew.start,
            self._transfer_failed,
            routes.total,
            dict(devices),
        )

        for peer in self._peers(ways):
            self._crew.start(partial(self._watch, peer))

    def _peers(self, ways: dict[Route, Way]) -> set[int]:
        """The ranks that this one sends to or receives from."""
        pairs = [(way.src.mesh.ranks, way.dst.mesh.ranks) for way in ways.values()]
        here = [(*a, *b) for a, b in pairs if self.rank in (*a, *b)]
        return {rank for ranks in here for rank in ranks} - {self.rank}

    def _watch(self, peer: int) -> None:
        """Notes that a rank is gone, also one of the same host, whose memory tells nothing."""
        self.wires.wait_for_loss(peer)
        self.lost.add(peer)

    def _channels(self, ways: dict[Route, Way]) -> dict[int, Channel]:
        found = {}
        for route, first in self._routes.first_channel.items():
            if self.rank in (*ways[route].src.mesh.ranks, *ways[route].dst.mesh.ranks):
                for number in range(first, first + self._routes.channels[route]):
                    found[number] = Channel(number, self.wires, self._rings(ways[route], number), self._crew, self.stop)
        return found

    def _rings(self, way: Way, number: int) -> ChannelRings:
        if self._shared is None or not _shares_memory(way):
            return NoRings()
        return ChannelRings(self._shared, number, self.rank)

    def _transfer_failed(self, error: BaseException, transfer: TensorTransfer) -> None:
        maker = self._routes.maker(transfer).in_words() if transfer in self._routes.legs else str(transfer)
        self.fail(error, f"{transfer}, which {maker} makes, failed on rank {self.rank}: {_text(error)}")

    def fail(self, error: BaseException, text: str) -> BaseException:
        """Tells all ranks of the first thing that went wrong, and ends all waits; returns what to raise."""
        with self._lock:
            if self.failure is None:
                first = self.board.post(text)
                if first == text:
                    # A lost connection says nothing of what was lost with it.
                    self.failure = PeerLost(text) if isinstance(error, PeerLost) else error
                else:
                    self.failure = StageFailed(first)
                self.stop.set()
                self.wires.break_off()
            return self.failure

    def close(self) -> None:
        """Ends threads and groups; not while a step runs. Waits for the other ranks, unless something had failed."""
        self._close(together=self.failure is None)

    def abandon(self) -> None:
        """`close` without the others, for a pipeline that nobody closed. They lose this rank in their next step."""
        if os.getpid() == self._process:  # a fork has the connections, but not the threads that end them
            self._close(together=False)

    def _close(self, *, together: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self.stop.set()
        self.wires.close(together=together)
        self._crew.close()
        if self._shared is not None:
            self._shared.window.close()


def _shares_memory(way: Way) -> bool:
    """Whether a plan may let a rank take from the memory of another one on its host."""
    hosts = dict(zip(way.src.mesh.ranks, way.src.mesh.hosts, strict=True))
    hosts |= dict(zip(way.dst.mesh.ranks, way.dst.mesh.hosts, strict=True))
    places = list(hosts.values())
    return any(places.count(host) > 1 for host in way.dst.mesh.hosts)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
