"""Runs the programs of all ranks in one process, on curves instead of on tensors, and draws what happens when.

Each rank has lanes whose actions come one after the other: `compute`, `send` and `comm` (receiving and adding up). An
action starts when its lane is free and what it needs is there. A message takes the card of the sending host, outwards,
and that of the receiving host, inwards, for as long as the wire's curve says, and meanwhile its share of CPU from the
matmuls of both ranks, as far as these last. Programs that wait for each other would show here as an error, before any
rank does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.overlap import incoming, outgoing
from weft.overlap.blocks import Counts, chunk_bounds
from weft.overlap.incoming import Incoming, RowArrival
from weft.overlap.outgoing import Outgoing, SendBlock, Space, View
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.speeds import Curves, item_bytes, row_seconds
from weft.timeline import Event, Kind, Timeline

Key = tuple[object, ...]
_SETTLES = 4  # times that the end of a stretch is found again, with what is taken until then


@dataclass(frozen=True)
class SimulatedAction:
    """One thing that a lane does: when all `needs` are known, for `seconds`, after which `gives` are.

    `message` is (sending rank, receiving rank, bytes) for what takes the cards instead of the lane.
    """

    name: str
    kind: Kind
    needs: tuple[Key, ...]
    gives: tuple[Key, ...]
    seconds: float = 0.0
    message: tuple[int, int, float] | None = None
    flops: float | None = None


@dataclass(frozen=True)
class _Load:
    """CPU seconds that something takes of a rank's core between two moments, evenly."""

    start: float
    end: float
    cpu: float

    def until(self, time: float) -> float:
        """The CPU seconds that are taken by then."""
        if time >= self.end:
            return self.cpu
        return self.cpu * max(0.0, time - self.start) / (self.end - self.start)

    def after(self, time: float) -> _Load:
        """What is left of it then."""
        return _Load(max(time, self.start), self.end, self.cpu - self.until(time))


@dataclass
class _World:
    """What is known so far, and until when each lane and card is taken."""

    plan: OverlapPlan
    curves: Curves
    known: dict[Key, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    loads: dict[int, list[_Load]] = field(default_factory=dict)  # what is still to be taken from each rank's matmul
    events: list[Event] = field(default_factory=list)

    def start_of(self, lane: str, action: SimulatedAction) -> float | None:
        """When the action can start; None when something that it needs is not known yet."""
        times = [self.known.get(need) for need in action.needs]
        if any(time is None for time in times):
            return None
        start = max([self.busy.get(lane, 0.0), *(time for time in times if time is not None)])
        if action.message is None:
            return start
        # Whose card is free first goes first, or one rank would hand over all its messages before the next.
        return max(start, self.busy.get(f"card {self.plan.hosts[action.message[0]]} out", 0.0))

    def do(self, rank: int, lane: str, action: SimulatedAction, start: float) -> None:
        """The action happens."""
        end = start + action.seconds
        if action.message is not None:
            start, end = self._transmit(start, *action.message)
        else:
            if lane.endswith("compute"):
                end = self._computed(rank, self.busy.get(lane, 0.0), start, end)
            else:  # sums and copies take their time from the matmul, too
                self._take(rank, start, end, action.seconds)
            self.busy[lane] = end
        self.known |= dict.fromkeys(action.gives, end)
        nbytes = None if action.message is None else int(action.message[2])
        self.events.append(Event(lane, action.kind, action.name, start, end, bytes=nbytes, flops=action.flops))

    def _take(self, rank: int, start: float, end: float, cpu: float) -> None:
        if cpu:
            self.loads.setdefault(rank, []).append(_Load(start, max(end, start + cpu), cpu))

    def _computed(self, rank: int, before: float, start: float, alone: float) -> float:
        """When a stretch of the matmul from `start` on ends that would end at `alone` if nothing took any of the core.

        What messages take after the matmul's end delays nothing, nor what they take between `before`, the end of the
        last stretch, and `start`: the core is free then.
        """
        loads, end = self.loads.get(rank, []), alone
        idle = sum(load.until(start) - load.until(before) for load in loads)
        for _ in range(_SETTLES):
            end = alone - idle + sum(load.until(end) for load in loads)
        self.loads[rank] = [load.after(end) for load in loads if load.end > end]
        return end

    def _transmit(self, start: float, source: int, target: int, nbytes: float) -> tuple[float, float]:
        here, there = self.plan.hosts[source], self.plan.hosts[target]
        if here == there:
            return start, start + nbytes / self.curves.add_bytes
        # One card does not wait for the other: while the receiver's is taken, the sender's serves somebody else.
        out, into, seconds = f"card {here} out", f"card {there} in", self.curves.wire(nbytes)
        start = max(start, self.busy.get(out, 0.0))
        end = max(start, self.busy.get(into, 0.0)) + seconds
        self.busy |= {out: start + seconds, into: end}
        for rank in (source, target):
            cpu = (self.curves.cpu_per_message + self.curves.cpu_per_byte * nbytes) / 2
            self._take(rank, end - seconds if rank == target else start, end, cpu)
        return start, end


def simulate(plan: OverlapPlan, curves: Curves) -> Timeline:
    """The timeline of a plan. All-to-all is taken to spread the rows of each rank evenly."""
    counts: Counts | None = None
    if plan.op in (Op.ALL_TO_ALL, Op.GATHER_BACK):
        bounds = chunk_bounds(plan.m, plan.size)
        counts = (tuple(bounds[r + 1] - bounds[r] for r in range(plan.size)),) * plan.size
    lanes: dict[tuple[int, str], list[SimulatedAction]] = {}
    for rank in range(plan.size):
        if plan.op.gathers:
            made = _incoming(plan, incoming.lower(plan, rank, counts), curves)
        else:
            made = _outgoing(plan, outgoing.lower(plan, rank, counts), curves)
        lanes |= {(rank, f"rank {rank}/{name}"): actions for name, actions in made.items()}
    world = _World(plan, curves)
    while any(lanes.values()):
        waiting = [
            (start, key)
            for key, actions in lanes.items()
            if actions and (start := world.start_of(key[1], actions[0])) is not None
        ]
        if not waiting:
            stuck = "; ".join(f"{lane}: {actions[0].name}" for (_, lane), actions in lanes.items() if actions)
            raise AssertionError(f"the ranks wait for each other: {stuck}")
        start, (rank, lane) = min(waiting)
        world.do(rank, lane, lanes[rank, lane].pop(0), start)
    return Timeline(world.events, name=f"predicted: {plan.op.value} {plan.m} x {plan.n} x {plan.k}")


def _outgoing(plan: OverlapPlan, program: Outgoing, curves: Curves) -> dict[str, list[SimulatedAction]]:
    rank, item = program.rank, item_bytes(plan.dtype)
    per_element = row_seconds(plan, curves) / max(1, plan.n)
    compute = [
        SimulatedAction(f"block {i}", "compute", (), ((Space.PART, rank, i),), per_element * b.rows * b.cols)
        for i, b in ((i, program.cut.blocks[i]) for i in program.order)
    ]
    compute.append(SimulatedAction("end of the matmul", "other", (), (("computed", rank),)))
    after = (("computed", rank),) if plan.sequential else ()
    late = () if program.early and not plan.sequential else (("computed", rank),)
    send: list[SimulatedAction] = []
    for s in program.sends:
        needs = (*after, *(_key(v, rank) for v in s.parts))
        if len(s.parts) > 1:
            seconds = len(s.parts) * s.elements * item / curves.add_bytes
            send.append(
                SimulatedAction(f"sum of block {s.block}", "other", needs, ((Space.SUM, rank, s.block),), seconds)
            )
        send.append(_message(s, rank, needs, item))
    comm: list[SimulatedAction] = []
    for f in program.finishes:
        needs = (*late, *(_key(v, rank) for term in f.terms for v in term))
        elements = f.box.rows * f.box.cols
        seconds = sum(len(term) for term in f.terms) * elements * item / curves.add_bytes
        done = ("finished", rank, f.box)
        gives = (done,) if f.result is None else (done, (Space.RESULT, rank, f.result.need))
        comm.append(SimulatedAction(f"sum of rows {f.box.m0} to {f.box.m1}", "other", needs, gives, seconds))
        for peer, tag in f.forward:
            arrival = (("message", rank, peer, tag),)
            nbytes = float(elements * item)
            comm.append(
                SimulatedAction(f"result to rank {peer}", "send", (done,), arrival, message=(rank, peer, nbytes))
            )
    rename: dict[Key, Key] = {
        (Space.INBOX, rank, i): ("message", e.peer, rank, e.tag) for i, e in enumerate(program.expects)
    }
    return {"compute": compute, "send": send, "comm": [_renamed(a, rename) for a in comm]}


def _renamed(action: SimulatedAction, rename: dict[Key, Key]) -> SimulatedAction:
    needs = tuple(rename.get(need, need) for need in action.needs)
    return SimulatedAction(action.name, action.kind, needs, action.gives, action.seconds, action.message)


def _key(view: View, rank: int) -> Key:
    """What a view waits for; a message is the receiver's own."""
    return (view.space, rank if view.space is Space.INBOX else view.rank, view.need)


def _message(send: SendBlock, rank: int, needs: tuple[Key, ...], item: int) -> SimulatedAction:
    gives = (("message", rank, send.peer, send.tag),)
    return SimulatedAction(
        f"block {send.block} to rank {send.peer}",
        "send",
        needs,
        gives,
        message=(rank, send.peer, float(send.elements * item)),
    )


def _incoming(plan: OverlapPlan, program: Incoming, curves: Curves) -> dict[str, list[SimulatedAction]]:
    rank, row_bytes = program.rank, plan.k * item_bytes(plan.dtype)
    send = [
        SimulatedAction(
            f"rows {s.start} to {s.end} to rank {s.peer}",
            "send",
            (),
            (("message", rank, s.peer, s.tag),),
            message=(rank, s.peer, float((s.end - s.start) * row_bytes)),
        )
        for s in program.sends
    ]
    comm = []
    for o in program.offers:
        seconds = (o.end - o.start) * row_bytes / curves.add_bytes
        comm.append(
            SimulatedAction(f"rows {o.start} to {o.end} to the window", "other", (), tuple(_told(o.tell)), seconds)
        )
    for e in program.expects:
        needs = (("message", e.peer, rank, e.tag),)
        comm.append(SimulatedAction(f"rows {e.m0} to {e.m1} from rank {e.peer}", "recv", needs, tuple(_told(e.tell))))
    return {"compute": _tile_rows(plan, program, curves), "send": send, "comm": comm}


def _told(arrivals: Iterable[RowArrival]) -> Iterable[Key]:
    return (("rows", a.rank, a.m0, a.m1) for a in arrivals)


def _tile_rows(plan: OverlapPlan, program: Incoming, curves: Curves) -> list[SimulatedAction]:
    """One action for each run of tile rows that wait for the same chunks."""
    tiling, rank = program.tiling, program.rank
    arrivals = [a for a in program.arrivals if a.rank == rank]
    everything = tuple(_told(arrivals))
    actions: list[SimulatedAction] = []
    for row in program.tile_rows:
        m0, m1 = row * tiling.tile_m, min((row + 1) * tiling.tile_m, tiling.m)
        needs = everything if plan.sequential else tuple(_told(a for a in arrivals if a.m0 < m1 and m0 < a.m1))
        seconds = row_seconds(plan, curves) * (m1 - m0)
        if actions and actions[-1].needs == needs:
            before = actions.pop()
            actions.append(SimulatedAction(before.name, "compute", needs, (), before.seconds + seconds))
        else:
            actions.append(SimulatedAction(f"rows from {m0} on", "compute", needs, (), seconds))
    return actions
