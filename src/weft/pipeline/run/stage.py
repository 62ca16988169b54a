"""One stage on this rank: its forward and backward passes, micro-batch by micro-batch.

F   module(inputs) -> outputs         keeps the graph of the micro-batch (with `checkpoint`: only its inputs)
B   gradients of outputs -> gradients of inputs and weights
I   gradients of outputs -> gradients of inputs
W   gradients of weights, from what I kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft._torch import version_of
from weft.kernels.dispatch import without_autocast
from weft.pipeline.run.microbatch import RandomState, StageInput, replayed, seeded
from weft.pipeline.run.split import SplitBackward
from weft.pipeline.schedules.graph import Edge, StageGraph
from weft.pipeline.schedules.schedule import Schedule
from weft.pipeline.transport.routes import Placing

LossFn = Callable[[Any, Any], Tensor]


@dataclass
class _Micro:
    """What is kept of a micro-batch between its passes."""

    inputs: dict[Edge, Tensor]
    given: StageInput
    roots: dict[str, GradientEdge]
    split: SplitBackward | None = None
    loss_seed: Tensor | None = None  # the gradient of the loss, on the last stage
    random: RandomState | None = None  # from which a checkpointed forward pass drew


@dataclass(frozen=True)
class ForwardResult:
    """What a forward pass makes: tensors for other stages by name, and on the last stage the result and the loss."""

    tensors: dict[str, Tensor]
    result: Any = None
    loss: Tensor | None = None


class Stage:
    """Runs the actions of one stage. Not for several threads.

    A stage with one incoming tensor is called with that, one with several gets them as keywords by name. It returns a
    tensor, or a dict by name where several tensors leave it. `loss_fn(result, target)` belongs to the last stage.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        graph: StageGraph,
        *,
        loss_fn: LossFn | None = None,
        checkpoint: bool = False,
    ) -> None:
        self.index, self.module = index, module
        self.incoming, self.names = graph.into(index), output_names(graph, index)
        self._users = {name: [e for e in graph.out_of(index) if e.tensor == name] for name in self.names}
        self._loss_fn, self._checkpoint = loss_fn, checkpoint
        self._micros: dict[int, _Micro] = {}
        self.live = 0
        self.peak = 0

    @property
    def device(self) -> torch.device:
        """Where the stage computes: where its first parameter is, or its first buffer; the CPU without any."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def reset(self) -> None:
        """Forgets all micro-batches, and counts the peak of activations anew."""
        self._micros.clear()
        self.live = self.peak = 0

    def forward(
        self, microbatch: int, inputs: Mapping[Edge, Tensor], given: StageInput, *, training: bool
    ) -> ForwardResult:
        """F: the tensors that other stages need, detached."""
        self.live += 1
        self.peak = max(self.peak, self.live)
        if not training:
            outcome = self._run_plain(dict(inputs), given)
            self.live -= 1
            return outcome
        leaves = {edge: self._leaf(edge, x) for edge, x in inputs.items()}
        micro = _Micro(leaves, given, {})
        if self._checkpoint:
            micro.random = RandomState.now(self.device) if given.seed is None else None
            outcome = self._run_once_of_two(leaves, given)
        else:
            outcome = self._record(micro)
        self._micros[microbatch] = micro
        return ForwardResult(
            {name: x.detach() for name, x in outcome.tensors.items()},
            _detached(outcome.result),
            None if outcome.loss is None else outcome.loss.detach(),
        )

    def backward(self, microbatch: int, grads: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
        """B: the gradient of each incoming tensor that has one, by the edge that it goes back over."""
        micro = self._take(microbatch)
        roots, seeds = self._seeds(micro, grads)
        if roots:
            with without_autocast(self.device):
                torch.autograd.backward(roots, seeds)
        self.live -= 1
        return {edge: _or_zeros(x.grad, x) for edge, x in micro.inputs.items() if x.requires_grad}

    def input_gradient(self, microbatch: int, grads: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
        """I: as `backward`, without the gradients of the weights."""
        micro = self._take(microbatch)
        self._micros[microbatch] = micro
        leaves = {edge: x for edge, x in micro.inputs.items() if x.requires_grad}
        micro.split = SplitBackward(*self._seeds(micro, grads), list(leaves.values()))
        with without_autocast(self.device):
            found = micro.split.input_gradients()
        return {edge: _or_zeros(grad, x) for (edge, x), grad in zip(leaves.items(), found, strict=True)}

    def weight_gradient(self, microbatch: int) -> None:
        """W: the gradients that I left out."""
        micro = self._take(microbatch)
        assert micro.split is not None, "the schedule has I before W"
        with without_autocast(self.device):
            micro.split.weight_gradients()
        self.live -= 1

    def _take(self, microbatch: int) -> _Micro:
        micro = self._micros.pop(microbatch)
        if self._checkpoint and micro.split is None:
            with replayed(micro.random):
                self._record(micro)
        return micro

    def _record(self, micro: _Micro) -> ForwardResult:
        """The forward pass with its graph, of which the roots are kept: not the outputs, whose memory may go."""
        with torch.enable_grad():
            outcome = self._run(micro.inputs, micro.given)
        ends = dict(outcome.tensors)
        if outcome.loss is not None:
            _check_loss(outcome.loss)
            ends, micro.loss_seed = {"": outcome.loss}, torch.full_like(outcome.loss.detach(), micro.given.scale)
        micro.roots = {name: get_gradient_edge(y) for name, y in ends.items() if y.requires_grad}
        return outcome

    def _run_plain(self, inputs: Mapping[Edge, Tensor], given: StageInput) -> ForwardResult:
        """Without a graph. What autocast keeps of the weights then has none either, and must not be found later."""
        with torch.no_grad():
            outcome = self._run(inputs, given)
        torch.clear_autocast_cache()
        return outcome

    def _run_once_of_two(self, inputs: Mapping[Edge, Tensor], given: StageInput) -> ForwardResult:
        """The first forward pass of a checkpointed stage; the second one must find the module as this one did."""
        before = {name: version_of(buffer) for name, buffer in self.module.named_buffers()}
        outcome = self._run_plain(inputs, given)
        for name, buffer in self.module.named_buffers():
            if before.get(name) != version_of(buffer):
                raise ValueError(
                    f"stage {self.index} writes to its buffer {name!r} in its forward pass, which checkpoint= runs "
                    f"twice; expected a pass that leaves buffers alone; leave stage {self.index} out of checkpoint="
                )
        return outcome

    def _run(self, inputs: Mapping[Edge, Tensor], given: StageInput) -> ForwardResult:
        values = list(inputs.values())
        with seeded(given.seed):
            if len(values) <= 1:
                result = self.module(*(values or given.args), **given.kwargs)
            else:
                result = self.module(**{edge.tensor: x for edge, x in inputs.items()}, **given.kwargs)
            if self.names:
                return ForwardResult(self._named(result))
            loss = None
            if self._loss_fn is not None and given.target is not None:
                loss = self._loss_fn(result, given.target)
                if not isinstance(loss, Tensor) or isinstance(loss, DTensor) or loss.numel() != 1:
                    raise ValueError(f"loss_fn returned {_shape(loss)}, expected a plain tensor of one element")
        return ForwardResult({}, result, loss)

    def _named(self, result: Any) -> dict[str, Tensor]:
        if isinstance(result, Tensor) and len(self.names) == 1:
            result = {self.names[0]: result}
        if not isinstance(result, Mapping) or not set(self.names) <= result.keys():
            got = sorted(result) if isinstance(result, Mapping) else _shape(result)
            raise ValueError(
                f"stage {self.index} returned {got}, expected "
                + (
                    f"a tensor or a dict with {self.names[0]!r}"
                    if len(self.names) == 1
                    else f"a dict with {self.names}"
                )
                + ", which its edges name"
            )
        return {name: self._plain(name, result[name]) for name in self.names}

    def _plain(self, name: str, x: Any) -> Tensor:
        """What can be sent as bytes, or handed on: a dense tensor with its values in memory."""
        if isinstance(x, DTensor) or not isinstance(x, Tensor):
            remedy = "; give x.to_local(), and its placements in output_layouts=" if isinstance(x, DTensor) else ""
            raise ValueError(f"stage {self.index} returned {_shape(x)} as {name!r}, expected a plain tensor{remedy}")
        if x.layout is not torch.strided or x.is_meta or x.is_nested or x.is_quantized:
            raise ValueError(
                f"stage {self.index} returned {_shape(x)}, {x.layout} on {x.device}, as {name!r}, expected a dense "
                "tensor that is neither nested, quantized nor on the meta device"
            )
        return x.resolve_conj().resolve_neg()

    def _leaf(self, edge: Edge, x: Tensor) -> Tensor:
        if edge.gradient and not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"edge {edge} carries {x.dtype}, expected a floating type for a tensor with a gradient; give the edge "
                f"gradient=False"
            )
        return x.detach().requires_grad_(edge.gradient)

    def _seeds(self, micro: _Micro, grads: Mapping[Edge, Tensor]) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Where the backward pass starts, and with which gradients: the sum over all users of an output."""
        if not self.names:
            return list(micro.roots.values()), [micro.loss_seed]
        found: list[tuple[GradientEdge, Tensor | None]] = []
        for name, root in micro.roots.items():
            # Later users first, as one backward pass through the whole model would meet them.
            terms = [grads[edge] for edge in reversed(self._users[name]) if edge in grads]
            if terms:
                found.append((root, _sum(terms)))
        return [root for root, _ in found], [grad for _, grad in found]


def make_stages(
    placing: Placing,
    rank: int,
    given: Mapping[int, nn.Module] | Sequence[nn.Module | None],
    loss_fn: LossFn | None,
    checkpoint: bool | Sequence[int],
) -> dict[int, Stage]:
    """The stages of a rank, by their numbers."""
    schedule, place = placing.schedule, placing.schedule_rank(rank)
    modules = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
    kept = range(schedule.stages) if checkpoint is True else (checkpoint or ())
    found = {}
    for index in () if place is None else schedule.stages_of(place):
        module = modules.get(index)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"stage {index} is {module!r} on rank {rank}, expected an nn.Module, since the rank is in the mesh "
                f"of that stage; give {{{index}: module}}"
            )
        _check_copies(index, module, schedule)
        is_last = index == schedule.stages - 1
        if is_last and loss_fn is None and schedule.has_backward:
            raise ValueError(
                f"rank {rank} has the last stage and no loss_fn; expected loss_fn=(output, targets) -> loss"
            )
        found[index] = Stage(
            index, module, placing.graph, loss_fn=loss_fn if is_last else None, checkpoint=index in kept
        )
    return found


def _check_copies(index: int, module: nn.Module, schedule: Schedule) -> None:
    """FSDP frees and exchanges weights, and DDP averages gradients, by the one backward pass that they know of."""
    from torch.distributed.fsdp import FSDPModule  # here, as it is slow to import

    if schedule.has_backward and any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            f"stage {index} has modules of DistributedDataParallel, which takes a step for one backward pass, so that "
            "replicas would get different gradients; expected modules without it: give the one inside, and average "
            "the gradients over the replicas after each step, or use FSDP2 (fully_shard) with a schedule that does not "
            "split the backward pass"
        )
    split = any(schedule.splits_backward(index, i) for i in range(schedule.microbatches))
    if split and any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError(
            f"stage {index} has modules of FSDP, and schedule {schedule.name} runs its backward pass in two parts, "
            "which FSDP cannot follow; expected another schedule, such as eager-1f1b"
        )


def output_names(graph: StageGraph, stage: int) -> tuple[str, ...]:
    """The tensors that leave a stage, in the order of the alphabet."""
    return tuple(sorted({edge.tensor for edge in graph.out_of(stage)}))


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _or_zeros(grad: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if grad is None else grad


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return {name: _detached(x) for name, x in result.items()}
    return tuple(_detached(x) for x in result) if isinstance(result, tuple | list) else result


def _check_loss(loss: Tensor) -> None:
    if not loss.is_floating_point():
        raise ValueError(f"loss_fn returned {loss.dtype}, expected a floating type, which has a gradient")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter and on no tensor that came from another stage, expected one that does: "
            "nothing would be trained; look for detach(), item() or no_grad() in the last stage and in loss_fn"
        )


def _shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = "DTensor" if isinstance(value, DTensor) else "tensor"
    return f"a {kind} of shape {tuple(value.shape)}"
