"""Ranks that run a lowered schedule step by step, in any order that its rules allow; they hang if it can hang."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from pipeline_values import needs

from weft.pipeline import Action, Direction, Edge, Kind, Lowered, Receive, Send, TensorTransfer


class Hung(Exception):
    pass


def transfers_of(low: Lowered, rank: int) -> list[TensorTransfer]:
    """Those that the rank sends or receives, in order."""
    stages = set(low.schedule.stages_of(rank))
    return [t for t in low.transfers if t.source in stages or t.target in stages]


class World:
    """Ranks that run a lowered schedule one operation at a time, in any order that its rules allow."""

    def __init__(self, low: Lowered, seed: int) -> None:
        self.low, self.random = low, random.Random(seed)
        self.done: set[Action] = set()
        self.moved: set[TensorTransfer] = set()
        self.held: set[tuple[int, str, int, int]] = set()
        self.every = set(low.transfers)

    def has(self, stage: int, producer: int, tensor: str, microbatch: int) -> bool:
        if stage == producer:
            return Action(stage, Kind.FORWARD, microbatch) in self.done
        return (producer, tensor, microbatch, stage) in self.held

    def move(self, t: TensorTransfer) -> None:
        self.moved.add(t)
        if t.direction is Direction.FORWARD:
            self.held.add((t.producer, t.tensor, t.microbatch, t.target))

    def can_move(self, t: TensorTransfer) -> bool:
        if t.direction is Direction.FORWARD:
            return self.has(t.source, t.producer, t.tensor, t.microbatch)
        kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        return any(Action(t.source, kind, t.microbatch) in self.done for kind in kinds)

    def can_run(self, action: Action) -> bool:
        made, graph = self.low.schedule, self.low.graph
        if not self.done.issuperset(needs(made, graph, action)):
            return False
        if action.kind is Kind.FORWARD:
            return all(
                self.has(self._near(e, action), e.source, e.tensor, action.microbatch) for e in graph.into(action.stage)
            )
        if action.kind is Kind.WEIGHT_GRADIENT:
            return True
        back = (
            TensorTransfer(e.source, e.tensor, action.microbatch, e.target, e.source)
            for e in graph.out_of(action.stage)
        )
        return all(t in self.moved for t in back if t in self.every)

    def _near(self, edge: Edge, action: Action) -> int:
        """The stage on the action's rank that holds the tensor."""
        supplier = self.low.supplier(edge, action.microbatch)
        rank_of = self.low.schedule.rank_of
        return supplier if rank_of(supplier) == rank_of(edge.target) else edge.target

    def run_lists_in_order(self) -> None:
        """A rank posts the transfers between two actions at once, and waits for them before the second one."""
        next_of = [0] * len(self.low.ranks)
        posted: list[list[Send | Receive]] = [[] for _ in self.low.ranks]
        while any(next_of[r] < len(ops) for r, ops in enumerate(self.low.ranks)) or any(posted):
            ends = Counter(o.transfer for own in posted for o in own)
            moves: list[tuple[str, Any]] = [("move", t) for t, count in ends.items() if count == 2 and self.can_move(t)]
            for rank, operations in enumerate(self.low.ranks):
                if next_of[rank] == len(operations):
                    continue
                operation = operations[next_of[rank]]
                if isinstance(operation, Action):
                    if not posted[rank] and self.can_run(operation):
                        moves.append(("run", rank))
                else:
                    moves.append(("post", rank))
            if not moves:
                raise Hung(f"{posted} {next_of}\n{self.low}")
            what, which = self.random.choice(moves)
            if what == "move":
                self.move(which)
                posted = [[o for o in own if o.transfer != which] for own in posted]
            else:
                operation = self.low.ranks[which][next_of[which]]
                next_of[which] += 1
                if what == "run":
                    self.done.add(operation)
                else:
                    posted[which].append(operation)

    def run_transfers_beside(self) -> None:
        """Actions in order; each rank's transfers strictly one after the other, in the order of all transfers."""
        actions = [list(own) for own in self.low.schedule.ranks]
        transfers = [transfers_of(self.low, r) for r in range(len(actions))]
        while any(actions) or any(transfers):
            heads = Counter(own[0] for own in transfers if own)
            ready = [t for t, count in heads.items() if count == 2 and self.can_move(t)]
            runs = [r for r, own in enumerate(actions) if own and self.can_run(own[0])]
            if not ready and not runs:
                raise Hung(f"{actions} {transfers}\n{self.low}")
            pick = self.random.randrange(len(ready) + len(runs))
            if pick < len(ready):
                self.move(ready[pick])
                for own in transfers:
                    if own and own[0] == ready[pick]:
                        own.pop(0)
            else:
                self.done.add(actions[runs[pick - len(ready)]].pop(0))
