"""Prefill and decoding on the ranks of a lab: the systems of `weft bench end_to_end`, each a function to greedy tokens.

hf_tp       Hugging Face's `from_pretrained(..., tp_plan="auto")` and `generate` on the batch, padded on the left
hf_tp_loop  the same, one prompt at a time: no padding, and no batch
vllm_...    vLLM's own engine, a process of the first rank that is idle while others have their turn
weft        `weft.generate` on the list of prompts
weft_no_overlap    the same with every op's sequential plan

A prefill is the first token of every prompt. Decoding is what more tokens take beyond the first of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.bench.end_to_end_cases import Kind
from weft.bench.end_to_end_inputs import PAD, left_padded
from weft.bench.end_to_end_models import hf_model
from weft.bench.end_to_end_sizes import ModelSize
from weft.bench.end_to_end_vllm import SETUPS, Engine, Setup

Prompts = Sequence[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
"""Prompts and how many new tokens -> the new tokens of each prompt."""

PLAIN = {Kind.PREFILL: ("hf_tp", "hf_tp_loop", "weft"), Kind.DECODE: ("hf_tp", "weft")}
NO_OVERLAP = "weft_no_overlap"  # in prefill only: decoding has hardly anything to overlap with


@dataclass(frozen=True)
class Engines:
    """vLLM: the interpreter of the environment that has it, and how its engines are started."""

    python: Path
    setups: tuple[Setup, ...]

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
    from weft.parallel import parallelize
    from weft.parallel.inference.generate import generate as weft_generate

    model = parallelize(hf_model(size), mesh, overlap=overlap).eval()
    return lambda prompts, tokens: weft_generate(model, prompts, max_new_tokens=tokens)


def make_systems(
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
        stack.enter_context(Engine(setup, Path(folder), python=engines.python)).wait_until_ready()
        for setup in engines.setups
    ]
    return {engine.setup.name: _asking(engine) for engine in started}


def _asking(engine: Engine) -> Generate:
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
