"""Runs a described module: inference by a `Program`, training by differentiable ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from weft.kernels.dispatch import is_plain, kernels_for
from weft.kernels.freshness import Stamp
from weft.packed import spec, training
from weft.packed.call import Inputs, Kept
from weft.packed.fit import check_model
from weft.packed.forward import Program
from weft.packed.watch import Watch, check_global_hooks

Describe = Callable[[nn.Module], spec.Transformer]


class AttentionDropout(Enum):
    """Whether training drops attention weights."""

    MODEL = "model"  # with the probability that the model says
    OFF = "off"


@dataclass(eq=False)
class _Read:
    """What was read of a module: its description, and when that is stale.

    `acts`: some module is in training mode. `program` is made when first needed, and again when `stamp` fails.
    """

    watch: Watch
    model: spec.Transformer
    acts: bool
    leaves: list[Tensor] = field(default_factory=list)
    stamp: Stamp | None = None
    program: Program | None = None


class Engine:
    """The description and the program of a module, made when first needed and again when it has changed."""

    def __init__(self, module: nn.Module, describe: Describe, dropout: AttentionDropout) -> None:
        self._module, self._describe, self._dropout = module, describe, dropout
        self._read: _Read | None = None
        self._lock = threading.Lock()  # calls may come from several threads

    @property
    def model(self) -> spec.Transformer:
        """The description, fresh."""
        return self._now().model

    def _now(self) -> _Read:
        check_global_hooks()
        with self._lock:
            if self._read is None or not self._read.watch.holds():
                self._read = None  # what it holds need not outlive it
                self._read = self._reading()
            return self._read

    def _reading(self) -> _Read:
        modules = list(self._module.modules())
        watch = Watch(modules)  # before reading: what changes meanwhile is noticed in the next call
        model = self._describe(self._module)
        check_model(model)
        return _Read(watch, model, any(m.training for m in modules), list(spec.tensors(model)))

    def __call__(self, inputs: Inputs, kept: Kept | None = None) -> Tensor:
        """Hidden states [T, width]; `kept` gets what it asks for."""
        read = self._read
        if read is None or inputs.model is not read.model:  # else it was looked at a moment ago, by this call
            read = self._now()
        vectors = inputs.vectors
        dtype = next(spec.weights(read.model)).dtype  # now: weights may have been converted in place
        if vectors is not None and vectors.dtype != dtype:
            raise ValueError(f"the model computes in {dtype}, got vectors of {vectors.dtype}; convert them")
        if self._trains(read, inputs) or not self._has_program(read) or not is_plain(vectors):
            drops = self._dropout is AttentionDropout.MODEL
            return training.forward(read.model, inputs, training=read.acts, drops_attention=drops, kept=kept)
        return self._program(read).run(inputs, kept)

    def _program(self, read: _Read) -> Program:
        with self._lock:
            if read.program is None or read.stamp is None or not read.stamp.holds(read.leaves):
                read.program = None  # two copies of the weights need not be held at once
                read.stamp = Stamp.of(read.leaves)
                check_model(read.model)  # again: who writes to `.data` can change shapes and types
                read.program = Program(read.model)
            return read.program

    @staticmethod
    def _has_program(read: _Read) -> bool:
        """Whether the native core computes where the weights are; else inference takes the differentiable ops too."""
        return all(kernels_for(t).takes_addresses for t in read.leaves[:1])

    @staticmethod
    def _trains(read: _Read, inputs: Inputs) -> bool:
        return read.acts or _needs_gradients(inputs, read.leaves)

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        return self._trains(self._read or self._now(), inputs)


def runs_as_training(module: nn.Module, inputs: Inputs, weights: Iterable[Tensor]) -> bool:
    """Whether a call has dropout, or gradients."""
    return module.training or _needs_gradients(inputs, weights)


def _needs_gradients(inputs: Inputs, weights: Iterable[Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    vectors = inputs.vectors is not None and inputs.vectors.requires_grad
    return vectors or any(t.requires_grad for t in weights)
