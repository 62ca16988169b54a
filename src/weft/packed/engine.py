"""Runs a described module in one process: inference by a `RankProgram` of one rank, training by differentiable ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.kernels.dispatch import is_plain, kernels_for
from weft.kernels.freshness import Stamp
from weft.models.fit import check_model
from weft.models.modules import Watch, check_global_hooks, check_hooks
from weft.models.spec import Transformer, VocabularyHead, tensors
from weft.transformer.call import NO_EXTRAS, Extras, Inputs, check_vector_type
from weft.transformer.parts import RankModel
from weft.transformer.program import RankProgram
from weft.transformer.training import OneProcess, TrainingCall, forward

Describe = Callable[[nn.Module], Transformer]
DescribeHead = Callable[[nn.Module], VocabularyHead]


class Engine(Protocol):
    """What runs the layers of a model, whatever that is shared by."""

    @property
    def model(self) -> Transformer:
        """The description, fresh."""
        ...

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        ...

    def __call__(self, inputs: Inputs, extras: Extras = NO_EXTRAS) -> Tensor:
        """Hidden states [T, width]; `extras` get what they ask for."""
        ...


class AttentionDropout(Enum):
    """Whether training drops attention weights."""

    MODEL = "model"  # with the probability that the model says
    OFF = "off"


@dataclass(eq=False)
class _Reading:
    """What was read of a module: its description, and when that is stale.

    `in_training`: some module is in training mode. `program` is made when first needed, and again when `stamp` fails.
    """

    watch: Watch
    model: Transformer
    in_training: bool
    leaves: list[Tensor] = field(default_factory=list)
    stamp: Stamp | None = None
    program: RankProgram | None = None


class PackedEngine:
    """The description and the program of a module, made when first needed and again when it has changed."""

    def __init__(self, module: nn.Module, describe: Describe, dropout: AttentionDropout) -> None:
        self._module, self._describe, self._dropout = module, describe, dropout
        self._read: _Reading | None = None
        self._lock = threading.Lock()  # calls may come from several threads

    @property
    def model(self) -> Transformer:
        """The description, fresh."""
        return self._now().model

    def _now(self) -> _Reading:
        check_global_hooks()
        with self._lock:
            if self._read is None or not self._read.watch.holds():
                self._read = None  # what it holds need not outlive it
                self._read = self._new_reading()
            return self._read

    def _new_reading(self) -> _Reading:
        modules = list(self._module.modules())
        watch = Watch(modules)  # before reading: what changes meanwhile is noticed in the next call
        model = self._describe(self._module)
        check_model(model)
        return _Reading(watch, model, any(m.training for m in modules), list(tensors(model)))

    def __call__(self, inputs: Inputs, extras: Extras = NO_EXTRAS) -> Tensor:
        """Hidden states [T, width]; `extras` get what they ask for."""
        read = self._read
        if read is None or inputs.model is not read.model:  # else it was looked at a moment ago, by this call
            read = self._now()
        if inputs.vectors is not None:
            check_vector_type(inputs, read.leaves[0].dtype)  # of now: weights may have been converted in place
        if self._trains(read, inputs) or not self._has_program(read) or not is_plain(inputs.vectors):
            drops = self._dropout is AttentionDropout.MODEL
            call = TrainingCall(inputs, OneProcess(), read.in_training, drops, extras, recomputes=True)
            return forward(read.model, call)
        return self._program(read).run(inputs, extras=extras)

    def program(self) -> RankProgram:
        """What inference runs on, whatever mode the modules are in."""
        return self._program(self._now())

    def _program(self, read: _Reading) -> RankProgram:
        with self._lock:
            if read.program is None or read.stamp is None or not read.stamp.holds(read.leaves):
                read.program = None  # two copies of the weights need not be held at once
                read.stamp = Stamp.of(read.leaves)
                read.program = RankProgram(RankModel.alone(read.model))
            return read.program

    @staticmethod
    def _has_program(read: _Reading) -> bool:
        """Whether the native core computes where the weights are; else inference takes the differentiable ops too."""
        return kernels_for(read.leaves[0]).takes_addresses

    @staticmethod
    def _trains(read: _Reading, inputs: Inputs) -> bool:
        return read.in_training or _needs_gradients(inputs, read.leaves)

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        return self._trains(self._read or self._now(), inputs)


@dataclass(eq=False)
class _HeadReading:
    """What was read of a language head; `program` is that of the stack `below`, with this head."""

    watch: Watch
    head: VocabularyHead
    leaves: list[Tensor]
    stamp: Stamp | None = None
    below: RankProgram | None = None
    program: RankProgram | None = None


class DecoderEngine:
    """A decoder with a language head: the program of its stack with logits, made again when one of them has changed."""

    size = 1  # ranks

    def __init__(self, module: nn.Module, describe: DescribeHead, stack: Callable[[], tuple[nn.Module, PackedEngine]]):
        """`stack` gives the module that holds the layers, and its engine."""
        self._module, self._describe, self._stack = module, describe, stack
        self._read: _HeadReading | None = None
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> int:
        """How many words the head tells apart."""
        with self._lock:
            return self._now().head.projection.size[0]

    def program(self) -> RankProgram:
        """What `weft.generate` runs on."""
        with self._lock:
            read, below = self._now(), self._stack()[1].program()
            if read.below is not below or read.stamp is None or not read.stamp.holds(read.leaves):
                read.program = None  # two copies of the head need not be held at once
                read.stamp, read.below = Stamp.of(read.leaves), below
                read.program = below.with_head(read.head)
            assert read.program is not None
            return read.program

    def _now(self) -> _HeadReading:
        check_global_hooks()
        if self._read is None or not self._read.watch.holds():
            self._read = None
            base, engine = self._stack()
            inside = set(base.modules()) - {base}  # which the engine of the stack watches
            watch = Watch([m for m in self._module.modules() if m not in inside])
            check_hooks(self._module, called=[self._module])
            described = self._describe(self._module)
            words, embedding = described.projection.size[0], engine.model.embedding
            if described.transform is not None:
                raise Unsupported(f"{type(self._module).__name__} is no decoder; expected a causal language model")
            if embedding is not None and embedding.tables[0].shape[0] != words:
                raise Unsupported(
                    f"the embedding has {embedding.tables[0].shape[0]} words and the head {words}, expected as many of "
                    "each"
                )
            self._read = _HeadReading(watch, described, list(tensors(described)))
        return self._read


def runs_as_training(module: nn.Module, inputs: Inputs, weights: Iterable[Tensor]) -> bool:
    """Whether a call has dropout, or gradients."""
    return module.training or _needs_gradients(inputs, weights)


def _needs_gradients(inputs: Inputs, weights: Iterable[Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    vectors = inputs.vectors is not None and inputs.vectors.requires_grad
    return vectors or any(t.requires_grad for t in weights)
