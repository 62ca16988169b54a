"""A tensor-parallel transformer trained and generating on the ranks of a lab, by torch, Hugging Face, vLLM and weft.

Training: a step is zero_grad, forward, backward and AdamW; weft packs weights anew whenever the optimiser has changed
them, and that belongs to its time. Before anything is timed every trainer makes the same two steps, and their losses
must agree; the second loss also checks gradients and optimiser.

Generation: each system is a function from prompts to greedy tokens. A prefill is the first token of every prompt;
decoding is what more tokens take beyond the first of them.

hf_tp            Hugging Face's `from_pretrained(..., tp_plan="auto")` and `generate` on the batch, padded on the left
hf_tp_loop       the same, one prompt at a time: no padding, and no batch
vllm_...         vLLM's own engine, a process of the first rank that is idle while others have their turn
weft             `weft.generate` on the list of prompts
weft_no_overlap  the same with every op's sequential plan

All start from the same random weights, as Hugging Face has the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import weft
from weft.bench.systems import torch_models
from weft.bench.systems.end_to_end import PAD, ModelSize, TrainBatch, WorkKind, left_padded
from weft.bench.systems.vllm import SETUPS, EngineSetup, VllmEngine
from weft.packed.inputs import IGNORED_LABEL

# ---- the model -------------------------------------------------------------------------------------------------------

SEED = 0


def hf_config(size: ModelSize) -> Any:
    """Without dropout, which no two systems draw alike, and without a token that ends a text."""
    transformers: Any = import_module("transformers")
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if size.family == "llama":
        return transformers.LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=size.mlp,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.positions, tie_word_embeddings=False, **ends,
        )  # fmt: skip
    return transformers.GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_inner=size.mlp, n_layer=size.layers, n_head=size.heads,
        n_positions=size.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
    )  # fmt: skip


def hf_model(size: ModelSize) -> Any:
    """The whole model, the same weights on every rank."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(SEED)
    kind = transformers.LlamaForCausalLM if size.family == "llama" else transformers.GPT2LMHeadModel
    return kind(hf_config(size))


def save_model(size: ModelSize, folder: Path) -> Path:
    """A folder with the model's safetensors, which Hugging Face and vLLM load."""
    transformers: Any = import_module("transformers")
    transformers.logging.disable_progress_bar()
    hf_model(size).save_pretrained(folder)
    return folder


# ---- training --------------------------------------------------------------------------------------------------------

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
        model = torch_models.from_hf(hf_model(size), size)
        self._model = torch_models.parallelize(model, mesh)
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
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED_LABEL)


class WeftTrainer:
    """`weft.parallelize` on the Hugging Face model; padded means that padding is computed like any other token."""

    def __init__(self, size: ModelSize, batch: TrainBatch, mesh: DeviceMesh, *, overlap: str) -> None:
        self._model: Any = weft.parallelize(hf_model(size), mesh, overlap=overlap).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._packed = {"input_ids": batch.packed, "labels": batch.packed.values}
        # Hugging Face shifts labels itself; without a mask nothing says what is padding.
        real = torch.arange(batch.ids.shape[1])[None] < torch.tensor(batch.lengths)[:, None]
        self._padded = {"input_ids": batch.ids, "labels": batch.ids.masked_fill(~real, IGNORED_LABEL)}

    def step(self, form: Form) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(**(self._packed if form is Form.PACKED else self._padded)).loss
        loss.backward()
        self._optimizer.step()
        return _number(loss)


@dataclass(frozen=True)
class TrainSystem:
    """A trainer and the form of its batch; systems with one trainer share its weights."""

    trainer: str
    form: Form


TRAIN_SYSTEMS = {
    "torch_padded": TrainSystem("torch", Form.PADDED),
    "torch_packed": TrainSystem("torch", Form.PACKED),
    "weft": TrainSystem("weft", Form.PACKED),
    "weft_no_overlap": TrainSystem("weft_no_overlap", Form.PACKED),
    "weft_no_packing": TrainSystem("weft", Form.PADDED),
}
CORE_TRAIN_SYSTEMS = ("torch_padded", "torch_packed", "weft")


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


# ---- generation ------------------------------------------------------------------------------------------------------

Prompts = Sequence[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Prompts and how many new tokens -> the new tokens of each prompt."""

GENERATE_SYSTEMS = {WorkKind.PREFILL: ("hf_tp", "hf_tp_loop", "weft"), WorkKind.DECODE: ("hf_tp", "weft")}
NO_OVERLAP = "weft_no_overlap"  # in prefill only: decoding has hardly anything to overlap with


@dataclass(frozen=True)
class Engines:
    """vLLM: the interpreter of the environment that has it, and how its engines are started."""

    python: Path
    setups: tuple[EngineSetup, ...]

    @classmethod
    def known(cls, python: Path, *, compiled: bool) -> Engines:
        """Every set-up, and if `compiled` those without the plugin once more with torch.compile, vLLM's default."""
        plain = [setup for setup in SETUPS if not setup.plugin]
        more = [replace(setup, name=f"{setup.name}_compiled", eager=False) for setup in plain] if compiled else []
        return cls(python, (*SETUPS, *more))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(setup.name for setup in self.setups)


def hf_tp(folder: str, ranks: int) -> Generate:
    """The model cut by Hugging Face over all ranks of the default group."""
    transformers: Any = import_module("transformers")
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases spell `tp_plan` otherwise, too
        # Under torchrun it would find the number of ranks in the environment; without, it would leave the model whole.
        kind = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(folder, tp_plan="auto", tp_size=ranks, dtype=torch.float32).eval()
    query = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(query, DTensor), "Hugging Face has not cut the model"
    assert query.to_local().numel() * ranks == query.numel()

    def generate(prompts: Prompts, tokens: int) -> list[list[int]]:
        ids, mask = left_padded(prompts)
        found = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=PAD
        )
        return found[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    return generate


def looped(generate: Generate) -> Generate:
    """One prompt at a time."""
    return lambda prompts, tokens: [generate([prompt], tokens)[0] for prompt in prompts]


def weft_tp(size: ModelSize, mesh: DeviceMesh, *, overlap: str) -> Generate:
    """`weft.parallelize` and `weft.generate`."""
    model = weft.parallelize(hf_model(size), mesh, overlap=overlap).eval()
    return lambda prompts, tokens: weft.generate(model, prompts, max_new_tokens=tokens)


def make_generators(
    size: ModelSize, mesh: DeviceMesh, folder: str, engines: Engines | None, stack: ExitStack, *, promises: bool
) -> dict[str, Generate]:
    """All systems; `stack` ends the engines. On all ranks but the first an engine is a function that does nothing."""
    found: dict[str, Generate] = {}
    if engines is not None:
        found |= _engines(engines, folder, stack) if mesh.get_rank() == 0 else dict.fromkeys(engines.names, _elsewhere)
    whole = hf_tp(folder, mesh.size())
    found |= {"hf_tp": whole, "hf_tp_loop": looped(whole)}
    found["weft"] = weft_tp(size, mesh, overlap="on")
    if promises:
        found[NO_OVERLAP] = weft_tp(size, mesh, overlap="off")
    return found


def _engines(engines: Engines, folder: str, stack: ExitStack) -> dict[str, Generate]:
    started = [
        stack.enter_context(VllmEngine(setup, Path(folder), python=engines.python)).wait_until_ready()
        for setup in engines.setups
    ]
    return {engine.setup.name: _answers_of(engine) for engine in started}


def _answers_of(engine: VllmEngine) -> Generate:
    return lambda prompts, tokens: engine.generate(prompts, tokens).tokens


def _elsewhere(prompts: Prompts, tokens: int) -> list[list[int]]:
    return []


def check_tokens(tokens: Mapping[str, list[list[int]]]) -> None:
    """Raises unless all systems found the same tokens, and says where the first difference is.

    >>> check_tokens({"hf_tp": [[1, 2], [3, 4]], "weft": [[1, 2], [3, 5]]})
    Traceback (most recent call last):
    ...
    AssertionError: weft and hf_tp differ for prompt 1, from token 1 on: 5 and 4
    """
    first, *rest = tokens
    for name in rest:
        for prompt, (ours, theirs) in enumerate(zip(tokens[name], tokens[first], strict=True)):
            for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if a != b:
                    raise AssertionError(
                        f"{name} and {first} differ for prompt {prompt}, from token {place} on: {a} and {b}"
                    )
