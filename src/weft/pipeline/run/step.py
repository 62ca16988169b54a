"""One step of a schedule on one rank: one loop for all schedules, and an end that all ranks reach together.

Actions run in the order of the schedule on the caller's thread. A tensor that an action needs is waited for right
before it, and no longer than `timeout`; everything else that has to do with other ranks happens beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.comm import Transfer
from weft.errors import LONGEST_SECONDS, PeerLost, PeerMismatch, PeerTimeout, WeftError
from weft.pipeline.run.microbatch import StageInput
from weft.pipeline.run.stage import Stage
from weft.pipeline.schedules.costs import Transfers
from weft.pipeline.schedules.graph import Action, Edge, Kind
from weft.pipeline.schedules.lowered import Receive, TensorTransfer
from weft.pipeline.transport.channels import Channels
from weft.pipeline.transport.exchange import Exchange, KeptTensor, call_name
from weft.pipeline.transport.routes import Placing, Routes
from weft.pipeline.transport.threads import Future
from weft.reshard.executor.staging import Stopped
from weft.timeline import record

# How often a wait looks for failures of others, and after which part of its time it says that it waits.
_LOOK_SECONDS = 0.25
_SAY_PART = 0.5


@dataclass
class RunningStep:
    """What one step is given and makes on this rank.

    inputs:  what the user gave, by stage and micro-batch
    losses:  of the last stage, by micro-batch; results likewise
    at:      the action at hand, for errors
    """

    inputs: Mapping[tuple[int, int], StageInput]
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
        channels: Channels,
        placing: Placing,
        routes: Routes,
        stages: Mapping[int, Stage],
        *,
        number: int,
        training: bool,
        transfers: Transfers,
        timeout: float,
        recorder: record.Trace | None,
    ) -> None:
        """`stages` are this rank's; `number` counts the steps of the pipeline."""
        rank = placing.schedule_rank(channels.rank)
        assert rank is not None, "a rank without a stage has nothing to run"
        self._rank, self._placing, self._routes, self._stages = rank, placing, routes, stages
        self._lowered, self._graph, self._schedule = routes.lowered, routes.lowered.graph, routes.lowered.schedule
        self._training, self._transfers, self._timeout, self._recorder = training, transfers, timeout, recorder
        self._lost, self._failures = channels.lost, channels.failures
        in_turn = transfers is Transfers.OVERLAPPED
        self._exchange = Exchange(channels, routes, step=number, train=training, recorder=recorder, in_turn=in_turn)
        self._ending = StepEnding(channels, placing.ranks_by_end, step=number, train=training)
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
        if error is not None:
            raise error

    def _what_ends(self) -> str:
        ranks = ", ".join(f"{rank} (stage {self._stages_of(rank)})" for rank in self._ending.waiting_for)
        return f"rank {ranks} to be through with the step"

    def _stages_of(self, rank: int) -> str:
        return _list([stage for stage, mesh in enumerate(self._placing.meshes) if rank in mesh.ranks])

    def _run_in_line(self, step: RunningStep) -> None:
        """Every transfer is waited for before the next action, as with send and recv in a training loop."""
        pending: list[tuple[TensorTransfer, bool]] = []
        for operation in self._lowered.ranks[self._rank]:
            if isinstance(operation, Action):
                self._wait_all(pending)
                self._do(operation, step)
            elif isinstance(operation, Receive):
                self._exchange.open(self._routes.messages[operation.transfer])
                pending.append((operation.transfer, False))
            else:
                pending.append((operation.transfer, True))
        self._wait_all(pending)

    def _wait_all(self, pending: list[tuple[TensorTransfer, bool]]) -> None:
        start = record.now()
        for transfer, outgoing in pending:
            done = self._exchange.departure(transfer) if outgoing else self._exchange.arrival(transfer)
            self._wait(done, transfer, outgoing=outgoing)
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
        given = step.inputs[action.stage, action.microbatch]
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
            if transfer in self._routes.messages:
                self._exchange.send(self._routes.messages[transfer], tensor)

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
        self._exchange.send(self._routes.messages[transfer], grad)

    def _take(self, transfer: TensorTransfer) -> Tensor:
        arrival = self._exchange.arrival(transfer)
        if not arrival.is_set:
            start = record.now()
            self._wait(arrival, transfer, outgoing=False)
            if self._recorder is not None:
                self._recorder.add("wait", str(transfer), lane="compute", start=start, end=record.now())
        tensor = arrival.get()
        if self._transfers is Transfers.OVERLAPPED:
            self._exchange.release(self._routes.messages[transfer])
        return tensor

    def _wait(self, done: Future[Any], transfer: TensorTransfer, *, outgoing: bool) -> None:
        """Returns when a transfer is done."""
        ranks = self._placing.ranks_of(transfer.target if outgoing else transfer.source)

        def what() -> str:
            action = self._routes.first_user(transfer) if outgoing else self._routes.maker(transfer)
            return f"{transfer} {'to' if outgoing else 'from'} rank {_list(ranks)}: {action.in_words()}"

        self._until(done, what, lambda: ranks)

    def _until(self, done: Future[Any], what: Callable[[], str], whom: Callable[[], tuple[int, ...]]) -> None:
        """Returns when `done` is set; raises when the ranks `whom` take too long for that, or something has failed."""
        start, said = record.now(), False
        while not done.poll(min(_LOOK_SECONDS, self._timeout / 20)):
            waited = record.now() - start
            self._exchange.check()
            gone = sorted(self._lost & set(whom()))
            if waited < _LOOK_SECONDS and not gone:
                continue
            if self._failures.read() is not None:
                raise Stopped
            if gone:
                raise PeerLost(f"waited for {what()}; rank {_list(gone)} died")
            if waited > _SAY_PART * self._timeout and not said:
                said = True
                self._failures.say_waiting(whom(), what())
            if waited > self._timeout:
                blame = self._failures.blame(whom())
                raise PeerTimeout(f"{what()} ({blame})", seconds=self._timeout)
        if said:
            self._failures.say_going_on()

    def _computing(self, action: Action) -> Any:
        return record.span("compute", str(action), lane="compute")


class StepEnding:
    """The end of one step on one rank: ranks say that they are through, and return when all have said so.

    A stage that raises has said nothing before, so no rank returns what a broken step has made. Words go up a tree and
    down again. Its root is the rank that should be through last, so that the others' words are there by then, and the
    way down is all that is left to wait for: two short messages for each rank, and as many hops as the tree is deep.

    done:        set when all ranks are through, to None or to the error of two ranks that were in different calls
    waiting_for: whom this rank hears from next, or tells
    """

    def __init__(self, channels: Channels, ranks: Sequence[int], *, step: int, train: bool) -> None:
        """`ranks`: all of the step, the last to end first."""
        self._channels, self._connections = channels, channels.connections
        self._call = (step, train)
        here = ranks.index(channels.rank)
        self._parent = ranks[(here - 1) // 2] if here else None
        self._children = tuple(ranks[2 * here + 1 : 2 * here + 3])
        self.done: Future[PeerMismatch | None] = Future()
        self.waiting_for: tuple[int, ...] = ()
        above = () if self._parent is None else (self._parent,)
        # Posted now, so that the sender does not wait for the receiver.
        self._inbox = {peer: self._listen(peer) for peer in (*self._children, *above)}

    def say(self) -> None:
        """This rank is through; returns at once."""
        self._channels.threads.start(self._meet)

    def _listen(self, peer: int) -> tuple[Tensor, Transfer | None]:
        call = torch.empty(2, dtype=torch.int64, device="cpu")
        try:
            return call, self._connections.receive_end(call, peer)
        except WeftError:
            return call, None

    def _meet(self) -> None:
        try:
            for child in self._children:
                self._hear(child)
            if self._parent is not None:
                self._tell((self._parent,))
                self._hear(self._parent)
            self._tell(self._children)
        except WeftError as error:
            if isinstance(error, PeerMismatch):
                self.done.set(error)
            self._channels.lost.update(self.waiting_for)  # whoever waits for this end finds them there
        else:
            self.done.set(None)

    def _hear(self, peer: int) -> None:
        self.waiting_for = (peer,)
        call, transfer = self._inbox[peer]
        if transfer is None:
            raise WeftError(f"rank {peer} is gone")
        transfer.wait(what="the end of the step", timeout=LONGEST_SECONDS)
        step, train = call.tolist()
        if (step, bool(train)) != self._call:
            here, there = call_name(*self._call), call_name(step, bool(train))
            raise PeerMismatch(
                f"this rank is at the end of {here} and rank {peer} at that of {there}; call step and eval_step in the "
                "same order on all ranks"
            )

    def _tell(self, peers: Sequence[int]) -> None:
        self.waiting_for = tuple(peers)
        call = torch.tensor(self._call, dtype=torch.int64, device="cpu")
        for transfer in [self._connections.send_end(call, peer) for peer in peers]:
            transfer.wait(what="the end of the step", timeout=LONGEST_SECONDS)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
