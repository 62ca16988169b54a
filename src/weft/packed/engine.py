"""Runs a described module: inference by a `Program`, training by differentiable ops."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from weft.packed import spec, training
from weft.packed.forward import Inputs, Program

Describe = Callable[[nn.Module], spec.Transformer]


class AttentionDropout(Enum):
    """What to do in training with a model that drops attention weights, which packed attention cannot."""

    ERROR = "error"
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

    def __call__(self, inputs: Inputs) -> Tensor:
        """Hidden states [T, width]."""
        model = self.model
        is_training = self._module.training
        if is_training:
            self._check_dropout(model)
        if is_training or self._needs_grad(inputs):
            return training.forward(model, inputs, training=is_training)
        if self._program is None:
            self._program = Program(model)
        return self._program.run(inputs)

    def _needs_grad(self, inputs: Inputs) -> bool:
        if not torch.is_grad_enabled():
            return False
        vectors = inputs.vectors is not None and inputs.vectors.requires_grad
        return vectors or any(t.requires_grad for t in self._leaves)

    def _check_dropout(self, model: spec.Transformer) -> None:
        p = max(layer.attention.dropout for layer in model.layers)
        if p > 0 and self._dropout is AttentionDropout.ERROR:
            raise ValueError(
                f"the model drops attention weights with probability {p:g} in training, which packed attention does "
                f'not do; set it to 0 in its config, or pack(model, attention_dropout="off") to train without it'
            )
