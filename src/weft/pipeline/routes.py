"""Which transfers follow each other on the same way, and how many of them may be under way at once. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.action import Action, Kind
from weft.pipeline.lowered import Direction, Lowered, Transfer


@dataclass(frozen=True, order=True)
class Route:
    """All transfers of one tensor, or of its gradient, from one stage to another.

    >>> print(Route(0, "skip", 1, 2))
    0.skip 1->2
    """

    producer: int
    tensor: str
    source: int
    target: int

    @classmethod
    def of(cls, transfer: Transfer) -> Route:
        """The route that a transfer takes."""
        return cls(transfer.producer, transfer.tensor, transfer.source, transfer.target)

    @property
    def direction(self) -> Direction:
        """Forwards to a later stage, gradients to an earlier one."""
        return Direction.FORWARD if self.source < self.target else Direction.GRADIENT

    @property
    def user(self) -> int:
        """The stage that uses the tensor: where the gradient comes from."""
        return self.target if self.direction is Direction.FORWARD else self.source

    def __str__(self) -> str:
        return f"{self.producer}.{self.tensor} {self.source}->{self.target}"


@dataclass(frozen=True)
class Leg:
    """One transfer's place: the n-th on its route, on which of the route's channels, and how urgent."""

    transfer: Transfer
    route: Route
    number: int
    channel: int
    urgency: int


class Routes:
    """The routes of a lowered schedule, and the place of every transfer.

    A route has as many *channels* as its producer keeps micro-batches at once: so many tensors can exist that were
    sent and are not used yet. Transfer n takes channel n modulo that, and a receiver opens the channel again once the
    tensor is used. So a sender never waits for room unless the schedule itself is ahead of what it keeps.

    >>> from weft.pipeline import schedule
    >>> from weft.pipeline.lower import lower
    >>> routes = Routes(lower(schedule("1f1b", stages=2, microbatches=4)))
    >>> {str(route): count for route, count in routes.channels.items()}
    {'0.x 0->1': 2, '0.x 1->0': 2}
    """

    def __init__(self, lowered: Lowered, channels: Mapping[Route, int] | None = None) -> None:
        """`channels` are those of several schedules that run in turn, as `join` makes them; else as many as needed."""
        self.lowered = lowered
        by_route: dict[Route, list[Transfer]] = {}
        for transfer in lowered.transfers:
            by_route.setdefault(Route.of(transfer), []).append(transfer)
        urgency = {transfer: i for i, transfer in enumerate(lowered.transfers)}
        place = {a: i for actions in lowered.schedule.ranks for i, a in enumerate(actions)}
        self.channels: dict[Route, int] = {}
        self.legs: dict[Transfer, Leg] = {}
        self.of: dict[Route, list[Leg]] = {}
        for route, transfers in sorted(by_route.items()):
            # In the order in which the sender makes them: it is the same on both sides, whatever is used first.
            transfers.sort(key=lambda t: place[self.maker(t)])
            used = [place[self.first_user(t)] for t in transfers]
            keeps = lowered.schedule.peak_activations[route.producer]
            wanted = max(2, keeps) if used == sorted(used) else len(transfers)
            self.channels[route] = count = min(len(transfers), wanted) if channels is None else channels[route]
            self.of[route] = [Leg(t, route, n, n % count, urgency[t]) for n, t in enumerate(transfers)]
            self.legs |= {leg.transfer: leg for leg in self.of[route]}
        if channels is not None:
            self.channels = dict(channels)

    @cached_property
    def first_channel(self) -> dict[Route, int]:
        """Channels of all routes in one row: where each route's begin."""
        first, total = {}, 0
        for route, count in self.channels.items():
            first[route], total = total, total + count
        return first

    @cached_property
    def passed_on(self) -> dict[Transfer, list[Leg]]:
        """For each transfer those that its receiver makes of it: it sends the tensor on as soon as it has it."""
        found: dict[Transfer, list[Leg]] = {}
        arriving = {(t.producer, t.tensor, t.microbatch, t.target): t for t in self.legs if t.source < t.target}
        for leg in self.legs.values():
            t = leg.transfer
            brought = arriving.get((t.producer, t.tensor, t.microbatch, t.source))
            if t.direction is Direction.FORWARD and brought is not None:
                found.setdefault(brought, []).append(leg)
        return found

    @property
    def total(self) -> int:
        """How many channels there are."""
        return sum(self.channels.values())

    def maker(self, transfer: Transfer) -> Action:
        """The action of the sending stage after which it has the tensor, or the gradient."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.source, Kind.FORWARD, transfer.microbatch)
        return self._gradient(transfer.source, transfer.microbatch)

    def first_user(self, transfer: Transfer) -> Action:
        """The action of the receiving stage that needs it."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.target, Kind.FORWARD, transfer.microbatch)
        return self._gradient(transfer.target, transfer.microbatch)

    def _gradient(self, stage: int, microbatch: int) -> Action:
        split = self.lowered.schedule.splits_backward(stage, microbatch)
        return Action(stage, Kind.INPUT_GRADIENT if split else Kind.BACKWARD, microbatch)


def join(*lowered: Lowered) -> list[Routes]:
    """The routes of several schedules that run in turn, such as training and evaluation: with channels in common."""
    channels: dict[Route, int] = {}
    for routes in map(Routes, lowered):
        for route, count in routes.channels.items():
            channels[route] = max(count, channels.get(route, 0))
    channels = dict(sorted(channels.items()))
    return [Routes(each, channels) for each in lowered]
