"""One stage on this rank: its forward and backward passes, micro-batch by micro-batch.

F   module(inputs) -> outputs         keeps the graph of the micro-batch (with `checkpoint`: only its inputs)
B   gradients of outputs -> gradients of inputs and weights
I   gradients of outputs -> gradients of inputs
W   gradients of weights, from what I kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.pipeline.graph import Edge, StageGraph
from weft.pipeline.seeds import seeded
from weft.pipeline.split import SplitBackward

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Given:
    """What the user gives a stage for one micro-batch.

    args, kwargs: arguments of the module, apart from what comes over edges
    target:       for the loss, on the last stage
    scale:        what the loss is multiplied by before its gradient is taken
    seed:         of the random numbers of this stage and micro-batch; None leaves the generators alone
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None
    scale: float = 1.0
    seed: int | None = None


@dataclass
class _Micro:
    """What is kept of a micro-batch between its passes."""

    inputs: dict[Edge, Tensor]
    given: Given
    roots: dict[str, GradientEdge]
    split: SplitBackward | None = None


@dataclass(frozen=True)
class Outcome:
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

    def forward(self, microbatch: int, inputs: Mapping[Edge, Tensor], given: Given, *, training: bool) -> Outcome:
        """F: the tensors that other stages need, detached."""
        self.live += 1
        self.peak = max(self.peak, self.live)
        if not training:
            with torch.no_grad():
                outcome = self._run(dict(inputs), given)
            self.live -= 1
            return outcome
        leaves = {edge: self._leaf(edge, x) for edge, x in inputs.items()}
        micro = _Micro(leaves, given, {})
        if self._checkpoint:
            with torch.no_grad():
                outcome = self._run(leaves, given)
        else:
            outcome = self._record(micro)
        self._micros[microbatch] = micro
        return Outcome(
            {name: x.detach() for name, x in outcome.tensors.items()},
            _detached(outcome.result),
            None if outcome.loss is None else outcome.loss.detach(),
        )

    def backward(self, microbatch: int, grads: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
        """B: the gradient of each incoming tensor that has one, by the edge that it goes back over."""
        micro = self._take(microbatch)
        roots, seeds = self._seeds(micro, grads)
        if roots:
            torch.autograd.backward(roots, seeds)
        self.live -= 1
        return {edge: _or_zeros(x.grad, x) for edge, x in micro.inputs.items() if x.requires_grad}

    def input_gradient(self, microbatch: int, grads: Mapping[Edge, Tensor]) -> dict[Edge, Tensor]:
        """I: as `backward`, without the gradients of the weights."""
        micro = self._take(microbatch)
        self._micros[microbatch] = micro
        leaves = {edge: x for edge, x in micro.inputs.items() if x.requires_grad}
        micro.split = SplitBackward(*self._seeds(micro, grads), list(leaves.values()))
        found = micro.split.input_gradients()
        return {edge: _or_zeros(grad, x) for (edge, x), grad in zip(leaves.items(), found, strict=True)}

    def weight_gradient(self, microbatch: int) -> None:
        """W: the gradients that I left out."""
        micro = self._take(microbatch)
        assert micro.split is not None, "the schedule has I before W"
        micro.split.weight_gradients()
        self.live -= 1

    def _take(self, microbatch: int) -> _Micro:
        micro = self._micros.pop(microbatch)
        if self._checkpoint and micro.split is None:
            self._record(micro)
        return micro

    def _record(self, micro: _Micro) -> Outcome:
        """The forward pass with its graph, of which the roots are kept: not the outputs, whose memory may go."""
        with torch.enable_grad():
            outcome = self._run(micro.inputs, micro.given)
        ends = dict(outcome.tensors) if outcome.loss is None else {"": outcome.loss}
        micro.roots = {name: get_gradient_edge(y) for name, y in ends.items() if y.requires_grad}
        return outcome

    def _run(self, inputs: Mapping[Edge, Tensor], given: Given) -> Outcome:
        values = list(inputs.values())
        with seeded(given.seed):
            if len(values) <= 1:
                result = self.module(*(values or given.args), **given.kwargs)
            else:
                result = self.module(**{edge.tensor: x for edge, x in inputs.items()}, **given.kwargs)
            if self.names:
                return Outcome(self._named(result))
            loss = None
            if self._loss_fn is not None and given.target is not None:
                loss = self._loss_fn(result, given.target)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise ValueError(f"loss_fn returned {_shape(loss)}, expected a tensor of one element")
        return Outcome({}, result, loss)

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
        return {name: result[name] for name in self.names}

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
            roots = list(micro.roots.values())
            return roots, [_filled(root, micro.given.scale) for root in roots]
        found: list[tuple[GradientEdge, Tensor | None]] = []
        for name, root in micro.roots.items():
            # Later users first, as one backward pass through the whole model would meet them.
            terms = [grads[edge] for edge in reversed(self._users[name]) if edge in grads]
            if terms:
                found.append((root, _sum(terms)))
        return [root for root, _ in found], [grad for _, grad in found]


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


def _filled(root: GradientEdge, value: float) -> Tensor:
    """The gradient of `value` times the tensor that an edge stands for."""
    like = root.node._input_metadata[root.output_nr]
    return torch.full(tuple(like.shape), value, dtype=like.dtype, device=like.device)


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
