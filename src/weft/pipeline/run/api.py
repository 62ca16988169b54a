"""`weft.Pipeline`: stages on meshes, trained by a schedule."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft.comm.deadline import PIPELINE
from weft.comm.tags import refuse_fork
from weft.errors import WeftError
from weft.layout import check_hosts
from weft.layout.mesh import DeclaredCluster
from weft.pipeline.run.clip import clip_gradients
from weft.pipeline.run.microbatch import check_seed, stage_inputs
from weft.pipeline.run.stage import LossFn, make_stages
from weft.pipeline.run.step import Runner, RunningStep
from weft.pipeline.schedules.costs import Costs, Transfers
from weft.pipeline.schedules.graph import Edge, StageGraph, chain
from weft.pipeline.schedules.lower import lower
from weft.pipeline.schedules.schedule import Schedule
from weft.pipeline.transport.channels import ChannelOptions, Channels, Payload
from weft.pipeline.transport.connections import Connections, StageFailed
from weft.pipeline.transport.routes import Placing, Routes, StageLayouts, as_mesh, join
from weft.reshard.executor.staging import Stopped
from weft.timeline import record

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True)
class Evaluation:
    """What `eval_step` returns on the ranks of the last stage; empty on others.

    losses:  [micro-batches], if targets were given
    outputs: of the last stage, one for each micro-batch
    """

    losses: Tensor
    outputs: list[Any]


class Pipeline:
    """Stages on meshes, run by a schedule. Making one is collective over `group`, by default the default group.

        schedule = weft.schedule("eager-1f1b", stages=2, microbatches=8)
        pipe = weft.Pipeline({rank: stage}, meshes=[0, 1], schedule=schedule, loss_fn=F.cross_entropy)
        losses = pipe.step(ids, targets)          # on all ranks; gradients are in stage.parameters()
        optimizer.step()

    stages:     this rank's modules by stage, or a list of all with None (or anything) for those of other ranks
    meshes:     for each stage a Mesh, a DeviceMesh, a rank, or a (nested) list of ranks. Stages that the schedule has
                on one rank have the same mesh, others have ranks of their own
    edges:      a StageGraph or a list of edges; a chain by default. A stage with one incoming tensor is called with
                it, one with several gets them as keywords; it returns a tensor, or a dict where several leave it
    input_layouts, output_layouts: stage -> placements, or stage -> {tensor: placements}: how tensors lie on the
                stage's mesh where they enter and leave it. Replicated by default
    loss_fn:    (output of the last stage, targets) -> a tensor of one element
    timeout:    seconds that a stage waits for a tensor which it needs, before all ranks give up
    seed:       random numbers of every forward pass come from (seed, step, stage, micro-batch), so that they do not
                depend on the schedule; None leaves the generators alone
    checkpoint: stages that keep only their inputs, and run forward again before the backward pass
    transfers:  "overlapped", or "synchronous" to wait for each transfer as send and recv do
    strategy, cluster, chunk_bytes: how edges are resharded; see `weft.plan_reshard`
    payload:    "tensors"; or "signals": a few bytes in place of each tensor, to measure what a network that costs
                nothing would give. The results are then unusable

    A step returns when all ranks are through with it; where one failed, all raise. One step at a time.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module] | Sequence[nn.Module | None],
        meshes: Sequence[Any],
        schedule: Schedule,
        *,
        edges: StageGraph | Sequence[Edge] | None = None,
        input_layouts: StageLayouts | None = None,
        output_layouts: StageLayouts | None = None,
        loss_fn: LossFn | None = None,
        group: ProcessGroup | None = None,
        timeout: float = PIPELINE.seconds,
        seed: int | None = None,
        checkpoint: bool | Sequence[int] = False,
        transfers: Transfers | str = Transfers.OVERLAPPED,
        strategy: str = "optimal",
        cluster: DeclaredCluster | None = None,
        chunk_bytes: int | None = None,
        payload: Payload | str = Payload.TENSORS,
        costs: Costs | None = None,
    ) -> None:
        """`costs` decide who sends a skip tensor, where several could; equal stages by default."""
        self.schedule, self.timeout, self.seed = schedule, timeout, seed
        self.steps = 0
        self._broken: str | None = None
        self._busy = threading.Lock()
        with torch.device("cpu"):  # whatever the caller's default is: messages are short, and go by way of the CPU
            connections = Connections(dist.group.WORLD if group is None else group, timeout=timeout)  # type: ignore[arg-type]
        rank, hosts = connections.world[connections.rank], dict(zip(connections.world, connections.hosts, strict=True))
        problem: Exception | None = None
        text = ""
        try:
            check_seed(seed)
            self.transfers = _member(Transfers, transfers, "transfers")
            options = ChannelOptions(strategy, cluster, chunk_bytes, _member(Payload, payload, "payload"))
            self.graph = _graph(edges, schedule.stages)
            values = [as_mesh(mesh, hosts) for mesh in meshes]
            self.placing = Placing.of(schedule, self.graph, values, input_layouts, output_layouts)
            check_hosts(values, hosts)
            self.lowered = lower(schedule, self.graph, costs=costs, transfers=self.transfers)
            forward = lower(schedule.forward_only(), self.graph, costs=costs, transfers=self.transfers)
            self.stages = make_stages(self.placing, rank, stages, loss_fn, checkpoint)
            text = f"{self.placing}\n{self.lowered}\n{self.transfers}, {options}, seed {seed}"
        except Exception as error:
            problem = error
        try:
            # A problem of one rank is told to all, so that nobody waits for a pipeline that will not be.
            with torch.device("cpu"):
                connections.short.agree("pipeline", text if problem is None else f"refused: {problem}")
            if problem is not None:
                raise problem
            self._routes, self._forward_routes = join(self.lowered, forward)
            devices = {index: stage.device for index, stage in self.stages.items()}
            self._channels = Channels(connections, self.placing, self._routes, options, devices)
        except BaseException as error:
            connections.close(together=False)
            raise (problem or error) from None
        # Threads that wait in gloo at the end of the interpreter would abort the process.
        self._at_end = weakref.finalize(self, self._channels.abandon)

    def step(self, batch: Any = None, targets: Any = None, *, loss_scale: float = 1.0, **keywords: Any) -> Tensor:
        """One training step without the optimiser's: gradients are added to the `grad` of this rank's parameters.

        batch:      for stages without incoming edges, on their ranks: a tensor, or a tuple of them, cut along dim 0
                    into the schedule's micro-batches; or a list with one (tuple) for each, of any shapes
        targets:    for the loss, on the ranks of the last stage: likewise
        loss_scale: gradients are those of loss_scale times the mean of the micro-batches' losses; 1/n for
                    gradients that are accumulated over n steps
        keywords:   for all stages of this rank: likewise

        Returns the losses [micro-batches] on the ranks of the last stage, an empty tensor elsewhere.
        """
        if not self.schedule.has_backward:
            raise ValueError(f"schedule {self.schedule.name} has no backward; expected one with, or use eval_step")
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "step is called in torch.inference_mode, where nothing has a gradient; expected a call outside of it, "
                "or eval_step"
            )
        with self._turn():
            step = self._run(self._routes, batch, targets, keywords, float(loss_scale), training=True)
        return step.stacked_losses

    def eval_step(self, batch: Any = None, targets: Any = None, **keywords: Any) -> Evaluation:
        """Forward passes only, in the same order and without gradients; modules are in `eval` mode meanwhile."""
        with self._turn(), _evaluating([stage.module for stage in self.stages.values()]):
            step = self._run(self._forward_routes, batch, targets, keywords, 1.0, training=False)
        return Evaluation(step.stacked_losses, [step.results[i] for i in sorted(step.results)])

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of all stages such that their common norm is at most `max_norm`. Collective.

            losses = pipe.step(ids, targets)
            norm = pipe.clip_grad_norm_(1.0)      # of all stages, on every rank, as before clipping
            optimizer.step()

        The norm is that of `torch.nn.utils.clip_grad_norm_` on the parameters of all stages in one process: bit by
        bit, unless a stage's gradients are spread over ranks, which sum in another order. A parameter that stages of
        one rank share counts once. With a `loss_scale` above 1, divide the gradients by it before.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}, expected a number above 0")
        with self._turn(), torch.device("cpu"):
            self._check_usable()
            short = self._channels.connections.short
            try:
                return clip_gradients(self.stages, short, float(max_norm), float(norm_type))
            except WeftError as error:
                self._broken = f"{type(error).__name__}: {error}"
                raise

    @property
    def peak_activations(self) -> dict[int, int]:
        """For each stage of this rank, of how many micro-batches it kept activations at once in the last step."""
        return {index: stage.peak for index, stage in self.stages.items()}

    @property
    def buffer_bytes(self) -> int:
        """Memory for received tensors, used or free."""
        return self._channels.buffers.nbytes

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, so that `step` returns losses."""
        return self.schedule.stages - 1 in self.stages

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once, also where stages share it."""
        yield from dict.fromkeys(p for stage in self.stages.values() for p in stage.module.parameters())

    def state_dict(self) -> dict[str, Any]:
        """How many steps have been made, from which random numbers follow; modules have state dicts of their own."""
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after so many steps."""
        self.steps = int(state["steps"])

    def close(self) -> None:
        """Ends the threads and connections, when all ranks have come here. The pipeline is unusable then."""
        with self._turn():
            self._broken = self._broken or "it was closed"
            self._channels.close()
            self._at_end.detach()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and self._broken is None:
            # The others may be in a step that waits for this rank.
            self._broken = f"{type(error).__name__}: {error}"
            self._channels.fail(error, f"rank {self._channels.rank} left the pipeline with {self._broken}")
        self.close()

    # -----------------------------------------------------------------------------------------------------------

    def _run(
        self,
        routes: Routes,
        batch: Any,
        targets: Any,
        keywords: Mapping[str, Any],
        loss_scale: float,
        *,
        training: bool,
    ) -> RunningStep:
        self._check_usable()
        if not self.stages:
            self._look_for_failure()
            self.steps += training
            return RunningStep({})
        torch.clear_autocast_cache()  # weights may have changed since autocast kept a copy of them
        step = RunningStep(
            stage_inputs(
                self.placing,
                list(self.stages),
                batch,
                targets,
                keywords,
                scale=loss_scale,
                seed=self.seed,
                step=self.steps,
                training=training,
            )
        )
        for stage in self.stages.values():
            stage.reset()
        runner = Runner(
            self._channels,
            self.placing,
            routes,
            self.stages,
            number=self.steps,
            training=training,
            transfers=self.transfers,
            timeout=self.timeout,
            recorder=record.current(),
        )
        try:
            runner.run(step)
        except BaseException as error:
            raise self._end(error, step) from (None if isinstance(error, Stopped) else error.__cause__)
        self.steps += training
        return step

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time: two would mix their tensors, in an order that differs from rank to rank."""
        refuse_fork(self._channels.connections.short.pg)
        if not self._busy.acquire(blocking=False):
            raise WeftError(
                "the pipeline is in a step already, on another thread or further up; expected one call at a time; make "
                "a pipeline for each thread"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise WeftError(f"the pipeline cannot be used any more: {self._broken}; make a new one")

    def _look_for_failure(self) -> None:
        """For a rank without a stage, which waits for nobody: what others have failed at."""
        failed = self._channels.failures.read()
        if failed is not None:
            self._broken = f"StageFailed: {failed}"
            raise self._channels.fail(StageFailed(failed), failed)

    def _end(self, error: BaseException, step: RunningStep) -> BaseException:
        """Ends the step on all ranks, and returns what to raise here."""
        channels = self._channels
        where = "the end of the step" if step.at is None else step.at.in_words()
        if isinstance(error, Stopped):
            shown = channels.fail(error, f"rank {channels.rank} gave up at {where}")
        else:
            text = f"rank {channels.rank} failed at {where}: {type(error).__name__}: {error}"
            shown = channels.fail(error, text)
            if shown is error and hasattr(error, "add_note"):
                error.add_note(f"weft: at {where} on rank {channels.rank}")
        self._broken = f"{type(shown).__name__}: {shown}"
        for stage in self.stages.values():
            stage.reset()
        return shown


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in `eval` mode; each of their parts is as before after it."""
    modes = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _graph(edges: StageGraph | Sequence[Edge] | None, stages: int) -> StageGraph:
    """The stage graph; a chain where nothing is said."""
    if edges is None:
        return chain(stages)
    return edges if isinstance(edges, StageGraph) else StageGraph(stages, tuple(edges))


def _member(kind: type[E], given: E | str, what: str) -> E:
    """A member of an enum, from itself or its value."""
    values = {member.value: member for member in kind}
    if isinstance(given, kind):
        return given
    if given not in values:
        raise ValueError(f"{what} is {given!r}, expected one of {', '.join(values)}")
    return values[given]
