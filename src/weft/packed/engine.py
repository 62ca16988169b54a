"""Runs a described module: inference by a `Program`, training by differentiable ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch
from torch import Tensor, nn

from weft.kernels.dispatch import kernels_for
from weft.packed import spec, training
from weft.packed.call import Inputs, Kept
from weft.packed.forward import Program

Describe = Callable[[nn.Module], spec.Transformer]


class AttentionDropout(Enum):
    """Whether training drops attention weights."""

    MODEL = "model"  # with the probability that the model says
    OFF = "off"


class _Stamps:
    """Remembers the parameters of a module, and notices when one is changed or replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._taken = [
            (owner._parameters, name, p, p._version, p.data_ptr())
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]

    def hold(self) -> bool:
        return all(
            owner.get(name) is p and p._version == version and p.data_ptr() == at
            for owner, name, p, version, at in self._taken
        )


class Engine:
    """The description and the program of a module, made when first needed and again when its weights change."""

    def __init__(self, module: nn.Module, describe: Describe, dropout: AttentionDropout) -> None:
        self._module, self._describe, self._dropout = module, describe, dropout
        self._stamps: _Stamps | None = None
        self._model: spec.Transformer | None = None
        self._program: Program | None = None
        self._leaves: list[Tensor] = []

    @property
    def model(self) -> spec.Transformer:
        """The description, fresh."""
        if self._stamps is None or self._model is None or not self._stamps.hold():
            self._model = self._describe(self._module)
            self._stamps = _Stamps(self._module)
            self._leaves = list(spec.tensors(self._model))
            self._program = None
        return self._model

    def __call__(self, inputs: Inputs, kept: Kept | None = None) -> Tensor:
        """Hidden states [T, width]; `kept` gets what it asks for."""
        model = self.model
        if self.is_differentiable(inputs) or not self._has_program():
            drops = self._dropout is AttentionDropout.MODEL
            return training.forward(model, inputs, training=self._module.training, drops_attention=drops, kept=kept)
        if self._program is None:
            self._program = Program(model)
        return self._program.run(inputs, kept)

    def _has_program(self) -> bool:
        """Whether the native core computes where the weights are; else inference takes the differentiable ops too."""
        return all(kernels_for(t).takes_addresses for t in self._leaves[:1])

    def is_differentiable(self, inputs: Inputs) -> bool:
        """Whether a call runs as in training."""
        return runs_as_training(self._module, inputs, self._leaves)


def runs_as_training(module: nn.Module, inputs: Inputs, weights: Iterable[Tensor]) -> bool:
    """Whether a call has dropout, or gradients."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    vectors = inputs.vectors is not None and inputs.vectors.requires_grad
    return vectors or any(t.requires_grad for t in weights)
