"""What a rank of a pipeline has to do with other ranks: connections, channels, and what is known of failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from weft.cluster import Cluster
from weft.comm.rendezvous import store_of
from weft.comm.tags import channel_tags
from weft.errors import PeerLost
from weft.pipeline.buffers import Buffers
from weft.pipeline.channel import Channel, Planner, Way
from weft.pipeline.context import Context, Payload
from weft.pipeline.crew import Crew
from weft.pipeline.failure import Board, StageFailed
from weft.pipeline.lowered import Transfer
from weft.pipeline.placing import Placing
from weft.pipeline.rings import ChannelRings, NoRings, SharedMemory
from weft.pipeline.routes import Route, Routes
from weft.pipeline.runtime import describe
from weft.pipeline.wires import Wires
from weft.reshard.planner import STRATEGIES


@dataclass(frozen=True)
class Options:
    """How tensors are moved; what reshard's planner takes, and what is moved."""

    strategy: str = "optimal"
    cluster: Cluster | None = None
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
        wires: Wires,
        placing: Placing,
        routes: Routes,
        options: Options,
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
        self.context = Context(
            self.rank,
            wires,
            Planner(self.rank, strategy=options.strategy, cluster=options.cluster, chunk_bytes=options.chunk_bytes),
            Buffers(),
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

    def _transfer_failed(self, error: BaseException, transfer: Transfer) -> None:
        maker = describe(self._routes.maker(transfer)) if transfer in self._routes.legs else str(transfer)
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
