"""Runs one step of a schedule on one rank: one loop for all schedules.

Actions run in the order of the schedule on the caller's thread. A tensor that an action needs is waited for right
before it, and no longer than `timeout`; everything else that has to do with other ranks happens beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.errors import PeerLost, PeerMismatch, PeerTimeout
from weft.pipeline.predict.costs import Transfers
from weft.pipeline.predict.lowered import Lowered, Receive, TensorTransfer
from weft.pipeline.run.stage import Given, Stage
from weft.pipeline.schedules.graph import Edge
from weft.pipeline.schedules.schedule import Action, Kind
from weft.pipeline.transport.exchange import Exchange, KeptTensor
from weft.pipeline.transport.failure import Board, StepEnding
from weft.pipeline.transport.routes import Routes
from weft.pipeline.transport.threads import Cell
from weft.timeline import record

# How often a wait looks at the board, and after which part of its time it says that it waits.
_LOOK_SECONDS = 0.25
_SAY_PART = 0.5


class Gone(Exception):
    """Something failed, here or elsewhere; what, is known to whoever set the stop."""


@dataclass
class RunningStep:
    """What one step is given and makes on this rank.

    given:   what the user gave, by stage and micro-batch
    losses:  of the last stage, by micro-batch; results likewise
    at:      the action at hand, for errors
    """

    given: Mapping[tuple[int, int], Given]
    losses: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    at: Action | None = None

    @cached_property
    def stacked_losses(self) -> Tensor:
        """[micro-batches], or empty where there are none."""
        losses = [self.losses[i].reshape(()) for i in sorted(self.losses)]
        return torch.stack(losses) if losses else torch.empty(0)


class Runner:
    """Executes this rank's list of a lowered schedule. One for each step."""

    def __init__(
        self,
        lowered: Lowered,
        routes: Routes,
        rank: int,
        stages: Mapping[int, Stage],
        exchange: Exchange,
        ending: StepEnding,
        board: Board,
        *,
        lost: Set[int],
        ranks_of: Mapping[int, tuple[int, ...]],
        timeout: float,
        transfers: Transfers,
        training: bool,
        recorder: record.Trace | None,
    ) -> None:
        """`rank` is the schedule's, `ranks_of` the ranks of each stage's mesh, `lost` those that are gone."""
        self._lowered, self._routes, self._rank = lowered, routes, rank
        self._stages, self._exchange, self._ending, self._board = stages, exchange, ending, board
        self._lost, self._ranks_of, self._timeout = lost, ranks_of, timeout
        self._transfers, self._training, self._recorder = transfers, training, recorder
        self._graph, self._schedule = lowered.graph, lowered.schedule
        self._tensors: dict[tuple[int, str, int], KeptTensor] = {}  # made or received here, until the last use here
        self._grads: dict[tuple[Edge, int], KeptTensor] = {}
        self._keys = {key: i for i, key in enumerate(sorted({(e.source, e.tensor) for e in self._graph.edges}))}

    def run(self, step: RunningStep) -> None:
        """The whole list; returns when all has been computed, received and sent, on all ranks."""
        if self._transfers is Transfers.OVERLAPPED:
            self._exchange.open_first()
            for action in self._schedule.ranks[self._rank]:
                self._do(action, step)
        else:
            self._run_in_line(step)
        step.at = None
        for transfer in self._exchange.under_way():
            self._wait(self._exchange.departure(transfer), transfer, outgoing=True)
        _ = step.stacked_losses  # whatever can fail on this rank fails before it says that it is through
        self._end_together()

    def _end_together(self) -> None:
        """Returns when all ranks are through: one that fails before would leave the others with half a step."""
        self._ending.say()
        self._until(self._ending.done, self._what_ends, lambda: self._ending.waiting_for)
        error = self._ending.done.get()
        if isinstance(error, PeerMismatch):
            raise error

    def _what_ends(self) -> str:
        ranks = ", ".join(f"{rank} (stage {self._stages_of(rank)})" for rank in self._ending.waiting_for)
        return f"rank {ranks} to be through with the step"

    def _stages_of(self, rank: int) -> str:
        return _list([stage for stage, ranks in self._ranks_of.items() if rank in ranks])

    def _run_in_line(self, step: RunningStep) -> None:
        """Every transfer is waited for before the next action, as with send and recv in a training loop."""
        pending: list[tuple[TensorTransfer, bool]] = []
        for operation in self._lowered.ranks[self._rank]:
            if isinstance(operation, Action):
                self._wait_all(pending)
                self._do(operation, step)
            elif isinstance(operation, Receive):
                self._exchange.open(self._routes.legs[operation.transfer])
                pending.append((operation.transfer, False))
            else:
                pending.append((operation.transfer, True))
        self._wait_all(pending)

    def _wait_all(self, pending: list[tuple[TensorTransfer, bool]]) -> None:
        start = record.now()
        for transfer, outgoing in pending:
            cell = self._exchange.departure(transfer) if outgoing else self._exchange.arrival(transfer)
            self._wait(cell, transfer, outgoing=outgoing)
        if pending and self._recorder is not None:
            name = " ".join(str(transfer) for transfer, _ in pending)
            self._recorder.add("wait", name, lane="compute", start=start, end=record.now())
        pending.clear()

    def _do(self, action: Action, step: RunningStep) -> None:
        step.at = action
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
            inputs = {edge: self._input(edge, action) for edge in stage.incoming}
            self._forward(action, stage, inputs, step)
            return
        if action.kind is Kind.WEIGHT_GRADIENT:
            with self._computing(action):
                stage.weight_gradient(action.microbatch)
            return
        grads = {edge: self._gradient(edge, action) for edge in self._graph.out_of(action.stage) if edge.gradient}
        with self._computing(action):
            run = stage.backward if action.kind is Kind.BACKWARD else stage.input_gradient
            found = run(action.microbatch, grads)
        for edge, grad in found.items():
            self._send_back(edge, action, grad)

    def _forward(self, action: Action, stage: Stage, inputs: dict[Edge, Tensor], step: RunningStep) -> None:
        given = step.given[action.stage, action.microbatch]
        with self._computing(action):
            outcome = stage.forward(action.microbatch, inputs, given, training=self._training)
        if outcome.loss is not None:
            step.losses[action.microbatch] = outcome.loss
        if not stage.names:
            step.results[action.microbatch] = outcome.result
        for name, tensor in outcome.tensors.items():
            self._hand_out(action, name, tensor)

    def _hand_out(self, action: Action, name: str, tensor: Tensor) -> None:
        """Gives a tensor that was made to the stages of this rank, and sends it to others."""
        key = (action.stage, name, action.microbatch)
        users = [edge.target for edge in self._graph.out_of(action.stage) if edge.tensor == name]
        if any(self._schedule.rank_of(user) == self._rank for user in users):
            self._tensors[key] = KeptTensor.of(tensor, f"{name!r} of stage {action.stage}")
        if all(self._schedule.rank_of(user) == self._rank for user in users):
            return
        index = self._keys[action.stage, name] * self._schedule.microbatches + action.microbatch
        self._exchange.announce(action.stage, name, action.microbatch, tensor, index)
        for user in users:
            transfer = TensorTransfer(action.stage, name, action.microbatch, action.stage, user)
            if transfer in self._routes.legs:
                self._exchange.send(self._routes.legs[transfer], tensor)

    def _input(self, edge: Edge, action: Action) -> Tensor:
        key = (edge.source, edge.tensor, action.microbatch)
        if key not in self._tensors:
            source = self._lowered.supplier(edge, action.microbatch)
            transfer = TensorTransfer(edge.source, edge.tensor, action.microbatch, source, edge.target)
            self._tensors[key] = KeptTensor.of(self._take(transfer), f"{edge.tensor!r} of stage {edge.source}")
        kept = self._tensors[key]
        if self._last_use[key] == action:
            del self._tensors[key]
        return kept.unchanged()

    @cached_property
    def _last_use(self) -> dict[tuple[int, str, int], Action]:
        """The last forward here that uses each tensor."""
        found: dict[tuple[int, str, int], Action] = {}
        for action in self._schedule.ranks[self._rank]:
            if action.kind is Kind.FORWARD:
                keys = ((e.source, e.tensor, action.microbatch) for e in self._graph.into(action.stage))
                found |= dict.fromkeys(keys, action)
        return found

    def _gradient(self, edge: Edge, action: Action) -> Tensor:
        if self._schedule.rank_of(edge.target) == self._rank:
            return self._grads.pop((edge, action.microbatch)).unchanged()
        return self._take(TensorTransfer(edge.source, edge.tensor, action.microbatch, edge.target, edge.source))

    def _send_back(self, edge: Edge, action: Action, grad: Tensor) -> None:
        if self._schedule.rank_of(edge.source) == self._rank:
            self._grads[edge, action.microbatch] = KeptTensor.of(grad, f"the gradient of {edge}")
            return
        transfer = TensorTransfer(edge.source, edge.tensor, action.microbatch, edge.target, edge.source)
        self._exchange.send(self._routes.legs[transfer], grad)

    def _take(self, transfer: TensorTransfer) -> Tensor:
        cell = self._exchange.arrival(transfer)
        if not cell.is_set:
            start = record.now()
            self._wait(cell, transfer, outgoing=False)
            if self._recorder is not None:
                self._recorder.add("wait", str(transfer), lane="compute", start=start, end=record.now())
        tensor = cell.get()
        assert isinstance(tensor, Tensor)
        if self._transfers is Transfers.OVERLAPPED:
            self._exchange.release(self._routes.legs[transfer])
        return tensor

    def _wait(self, cell: Cell, transfer: TensorTransfer, *, outgoing: bool) -> None:
        """Returns when a transfer is done."""
        ranks = self._ranks_of[transfer.target if outgoing else transfer.source]

        def what() -> str:
            action = self._routes.first_user(transfer) if outgoing else self._routes.maker(transfer)
            return f"{transfer} {'to' if outgoing else 'from'} rank {_list(ranks)}: {action.in_words()}"

        self._until(cell, what, lambda: ranks)

    def _until(self, cell: Cell, what: Callable[[], str], whom: Callable[[], tuple[int, ...]]) -> None:
        """Returns when a cell is set; raises when the ranks `whom` take too long for that, or something has failed."""
        start, said = record.now(), False
        while not cell.poll(min(_LOOK_SECONDS, self._timeout / 20)):
            waited = record.now() - start
            self._exchange.check()
            gone = sorted(self._lost & set(whom()))
            if waited < _LOOK_SECONDS and not gone:
                continue
            if self._board.read() is not None:
                raise Gone
            if gone:
                raise PeerLost(f"waited for {what()}; rank {_list(gone)} died")
            if waited > _SAY_PART * self._timeout and not said:
                said = True
                self._board.say_waiting(whom(), what())
            if waited > self._timeout:
                blame = self._board.blame(whom())
                raise PeerTimeout(f"{what()} ({blame})", seconds=self._timeout)
        if said:
            self._board.say_going_on()

    def _computing(self, action: Action) -> Any:
        return record.span("compute", str(action), lane="compute")


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
