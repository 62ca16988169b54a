"""What engines are asked, and what their answers are compared with. Needs no vLLM."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

NEW_TOKENS, VOCABULARY = 8, 512


def prompts() -> list[list[int]]:
    """Of different lengths; in one step more rows than a block of the fused matmul."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, VOCABULARY, (n,), generator=generator).tolist() for n in [1, 3, 16, 40, 520, 7]]


def scale_table(table: torch.Tensor) -> None:
    """Changes every row, past torch's version counter."""
    table.data.mul_(torch.linspace(0.5, 1.5, VOCABULARY)[: len(table), None])


@cache
def greedy_of(folder: Path, *, scaled: bool = False) -> list[list[int]]:
    """The greedy tokens of Hugging Face; `scaled`: after `scale_table` of the embedding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    if scaled:
        scale_table(model.model.embed_tokens.weight)
    return [_greedy(model, torch.tensor([prompt])) for prompt in prompts()]


def _greedy(model: Any, ids: torch.Tensor) -> list[int]:
    with torch.no_grad():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return list(whole[0, ids.shape[1] :].tolist())


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether tokens are equal, and their log probabilities but for the rounding of another order of sums."""
    if ours["tokens"] != theirs["tokens"]:
        return False
    return torch.allclose(torch.tensor(ours["logprobs"]), torch.tensor(theirs["logprobs"]), rtol=0, atol=1e-4)
