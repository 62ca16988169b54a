"""Tiny models, batches and comparisons for the tests of `weft.parallelize`."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import weft

WORDS, PAD = 97, 0
SIZES = {"vocab_size": WORDS, "max_position_embeddings": 64, "num_hidden_layers": 2}


def config(family: str, heads: int = 6, kv_heads: int = 3, **options: Any) -> Any:
    """Nothing divides by 2 or 3 that need not; no dropout."""
    if family == "Llama":
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 12 * heads}
        return transformers.LlamaConfig(**{**SIZES, **shape, "intermediate_size": 90, "pad_token_id": None, **options})
    if family == "GPT2":
        shape = {"n_embd": 12 * heads, "n_head": heads, "n_layer": 2, "n_positions": 64, "n_inner": 90}
        none = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        ends = {"bos_token_id": 2, "eos_token_id": 2}
        return transformers.GPT2Config(**{"vocab_size": WORDS, **shape, **none, **ends, **options})
    if family == "DistilBert":
        shape = {"dim": 12 * heads, "n_heads": heads, "n_layers": 2, "hidden_dim": 90, "max_position_embeddings": 64}
        none = dict.fromkeys(("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), 0.0)
        return transformers.DistilBertConfig(**{"vocab_size": WORDS, **shape, **none, "pad_token_id": PAD, **options})
    shape = {"hidden_size": 12 * heads, "num_attention_heads": heads, "intermediate_size": 90, "pad_token_id": PAD}
    if family == "ModernBert":  # a layer that sees everything, and one with a window
        windows = {"global_attn_every_n_layers": 2, "local_attention": 8}
        return transformers.ModernBertConfig(**{**SIZES, **shape, **windows, **options})
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return getattr(transformers, f"{family}Config")(**{**SIZES, **shape, **none, **options})


HEADS = {
    "Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "Roberta": "ForMaskedLM",
    "DistilBert": "ForMaskedLM", "ModernBert": "ForMaskedLM",
}  # fmt: skip


def build(family: str, head: str | None = None, *, seed: int = 0, **options: Any) -> Any:
    """A model whose every weight matters, in training mode."""
    torch.manual_seed(seed)
    made = getattr(transformers, family + (HEADS[family] if head is None else head))(config(family, **options))
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.15 if p.dim() > 1 else 0.2)
    return made.train()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def both(family: str, head: str | None = None, *, overlap: str = "on", **options: Any) -> tuple[Any, Any]:
    """The unsharded model, and its twin on all ranks."""
    alone, shared = build(family, head, **options), build(family, head, **options)
    return alone, weft.parallelize(shared, mesh(), overlap=overlap)


def batch(lengths: list[int], *, side: str = "right", seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and labels [B, S]; a few labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(3, WORDS, mask.shape, generator=generator).masked_fill(~mask, PAD)
    labels = torch.randint(0, WORDS, mask.shape, generator=generator)
    odd = torch.rand(mask.shape, generator=generator) < 0.2
    first = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1] if side == "left" else torch.zeros_like(mask)
    return ids, mask.long(), labels.masked_fill(~mask | odd | first, -100)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(alone: Any, shared: Any) -> None:
    """Every gradient lies like its parameter and has the values of the unsharded one."""
    wanted = dict(alone.named_parameters())
    got = dict(shared.named_parameters())
    assert list(wanted) == list(got)
    for name, parameter in got.items():
        assert isinstance(parameter, DTensor), name
        if wanted[name].grad is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad.placements == parameter.placements, name
        message = f"the gradient of {name}: {{}}".format
        torch.testing.assert_close(whole(parameter.grad), wanted[name].grad, rtol=2e-4, atol=2e-5, msg=message)


def checks(cases: list[Any], ranks: int, *, timeout: float = 240.0) -> dict[str, str | None]:
    """Runs cases, functions of the number of ranks, one after the other in the same processes: None or what failed.

    Starting processes takes longer than most cases. After a failure the others are not run: ranks may be out of step.
    """
    return run_ranks(_run_cases, ranks, cases, timeout=timeout)[0]


def _run_cases(cases: list[Any]) -> dict[str, str | None]:
    outcome: dict[str, str | None] = {case.__name__: "was not run, as an earlier case failed" for case in cases}
    for case in cases:
        try:
            case(dist.get_world_size())
            outcome[case.__name__] = None
        except Exception:
            outcome[case.__name__] = traceback.format_exc()
            break
    return outcome
