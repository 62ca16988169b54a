"""Tiny decoders whose tokens differ from place to place, prompts, and what a request gets alone."""

from __future__ import annotations

from typing import Any

import torch
from packed_models import LANGUAGE_HEADS, VOCABULARY, build

import weft

WORDS = VOCABULARY


def lively(family: str, *, seed: int = 0) -> Any:
    """With matrices so large, and biases so small, that what comes next depends on what came before."""
    model = build(family, LANGUAGE_HEADS[family], seed=seed)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0.0, 0.35)
        else:
            torch.nn.init.normal_(p, 0.0 if name.endswith("bias") else 1.0, 0.1)
    return model


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, WORDS, (n,), generator=generator).tolist() for n in lengths]


PHRASES = dict(enumerate(prompts_of([3, 20, 1, 7, 33, 12, 2, 9, 5, 16, 4, 25], 11)))


def spell(tokens: list[int]) -> str:
    """A letter for each token, of eight."""
    return "".join("abcdefgh"[token % 8] for token in tokens)


def alone(model: Any, prompt: Any, *, tokenizer: Any = None, **options: Any) -> Any:
    """The whole prompt at once, nobody else there."""
    generator = weft.Generator(model, tokenizer=tokenizer, slots=1, prefill_tokens=1000)
    return generator.submit(prompt, **options).result()
