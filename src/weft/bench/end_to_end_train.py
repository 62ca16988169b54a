"""One training row of `weft bench end_to_end` on the ranks of its lab: the same steps by torch and by weft, in turns.

A step is zero_grad, forward, backward and AdamW: weft packs weights anew whenever the optimiser has changed them, and
that belongs to its time. Before anything is timed every trainer makes the same two steps, and their losses must agree;
the second loss also checks gradients and optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from weft.bench import end_to_end_torch
from weft.bench.end_to_end_inputs import IGNORED, TrainBatch
from weft.bench.end_to_end_models import hf_model
from weft.bench.end_to_end_sizes import ModelSize

LEARNING_RATE = 1e-4
TOLERANCE = 5e-5  # of a loss, relative; a gradient that is missing somewhere shows as 2e-4 and more


class Form(Enum):
    """How the batch is given."""

    PACKED = "packed"
    PADDED = "padded"


class Trainer(Protocol):
    """A model with its optimiser on one rank."""

    def step(self, form: Form) -> float:
        """One whole step on all ranks; returns the loss before it."""


class TorchTrainer:
    """torch's `parallelize_module` on a plain model, with `loss_parallel`."""

    def __init__(self, size: ModelSize, batch: TrainBatch, mesh: DeviceMesh) -> None:
        model = end_to_end_torch.from_hf(hf_model(size), size)
        self._model = end_to_end_torch.parallelize(model, mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._batch = batch

    def step(self, form: Form) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = self._loss(form)
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return _number(loss)

    def _loss(self, form: Form) -> Tensor:
        batch = self._batch
        if form is Form.PACKED:
            packed = batch.packed
            logits = self._model(packed.values[None], packed.positions[None], lengths=batch.lengths)
            labels = batch.packed_labels
        else:
            logits = self._model(batch.ids, torch.arange(batch.ids.shape[1])[None].expand_as(batch.ids))
            labels = batch.labels.flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)


class WeftTrainer:
    """`weft.parallelize` on the Hugging Face model; padded means that padding is computed like any other token."""

    def __init__(self, size: ModelSize, batch: TrainBatch, mesh: DeviceMesh, *, overlap: str) -> None:
        import weft

        self._model: Any = weft.parallelize(hf_model(size), mesh, overlap=overlap).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._packed = {"input_ids": batch.packed, "labels": batch.packed.values}
        # Hugging Face shifts labels itself; without a mask nothing says what is padding.
        real = torch.arange(batch.ids.shape[1])[None] < torch.tensor(batch.lengths)[:, None]
        self._padded = {"input_ids": batch.ids, "labels": batch.ids.masked_fill(~real, IGNORED)}

    def step(self, form: Form) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(**(self._packed if form is Form.PACKED else self._padded)).loss
        loss.backward()
        self._optimizer.step()
        return _number(loss)


@dataclass(frozen=True)
class System:
    """A trainer and the form of its batch; systems with one trainer share its weights."""

    trainer: str
    form: Form


SYSTEMS = {
    "torch_padded": System("torch", Form.PADDED),
    "torch_packed": System("torch", Form.PACKED),
    "weft": System("weft", Form.PACKED),
    "weft_no_overlap": System("weft_no_overlap", Form.PACKED),
    "weft_no_packing": System("weft", Form.PADDED),
}
CORE = ("torch_padded", "torch_packed", "weft")


def make_trainers(size: ModelSize, batch: TrainBatch, mesh: DeviceMesh, names: set[str]) -> dict[str, Trainer]:
    """The trainers of these names, each from the same weights."""
    makers: Mapping[str, Callable[[], Trainer]] = {
        "torch": lambda: TorchTrainer(size, batch, mesh),
        "weft": lambda: WeftTrainer(size, batch, mesh, overlap="on"),
        "weft_no_overlap": lambda: WeftTrainer(size, batch, mesh, overlap="off"),
    }
    return {name: make() for name, make in makers.items() if name in names}


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raises unless all trainers had the same losses.

    >>> check_losses({"torch": [10.0, 9.0], "weft": [10.0, 9.2]})
    Traceback (most recent call last):
    ...
    AssertionError: losses differ by more than 5e-05: torch 10.000000 9.000000, weft 10.000000 9.200000
    """
    columns = list(zip(*losses.values(), strict=True))
    if all(max(step) - min(step) <= TOLERANCE * abs(max(step)) for step in columns):
        return
    shown = ", ".join(f"{name} {' '.join(f'{x:.6f}' for x in found)}" for name, found in losses.items())
    raise AssertionError(f"losses differ by more than {TOLERANCE:g}: {shown}")


def first_losses(trainers: Mapping[str, Trainer]) -> dict[str, list[float]]:
    """Of a packed and then a padded step of each trainer: the same step twice for whoever computes rightly."""
    return {name: [trainer.step(form) for form in Form] for name, trainer in trainers.items()}


def _number(loss: Tensor) -> float:
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return float(whole.detach())
