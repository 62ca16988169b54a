"""What other people's programs are run with: tiny models, texts and a tokenizer that are made here, and trainers that
keep the loss of every step."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything asks for it; tests need no network

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STEPS, ROWS = 20, 4
CLOSE = 1e-4
WORDS = [f"w{i}" for i in range(50)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[BOS]", "[EOS]"]
PAD = 0
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "pad_token_id": PAD,
    "initializer_range": 0.2,  # so large that losses tell whether texts saw each other
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="[BOS]", eos_token="[EOS]", model_max_length=128, **names
    )


def sentences(count: int, *, longest: int = 40, seed: int = 0) -> list[str]:
    """Of very different lengths."""
    r = Random(seed)
    return [" ".join(r.choices(WORDS, k=r.choice([2, 3, r.randint(4, longest)]))) for _ in range(count)]


def examples(count: int = STEPS * ROWS) -> list[dict[str, list[int]]]:
    """Ids and labels. No text predicts its first token: padded or not, as many labels count."""
    made = []
    for sentence in sentences(count):
        ids = tokenizer()(sentence)["input_ids"]
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return made


def built(name: str, head: str, attention: str = "sdpa", **options: Any) -> Any:
    """A random model, the same in each call."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    config._attn_implementation = attention
    return getattr(transformers, f"{name}{head}")(config)


def keeping(kind: type, losses: list[float]) -> type:
    """A trainer that keeps the loss of every step, unrounded."""

    class Keeping(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            out = super().compute_loss(model, inputs, return_outputs=return_outputs, **rest)
            losses.append(float((out[0] if return_outputs else out).detach()))
            return out

    return Keeping


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Of a run of `STEPS` steps in which the losses change."""
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 3e-3,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "seed": 0, "disable_tqdm": True, "bf16": False,
        **options,
    }  # fmt: skip


def differ(got: list[float], want: list[float]) -> None:
    """Texts that see each other have other losses: what `same` says means something."""
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) > 1000 * CLOSE


def same(got: list[float], want: list[float]) -> None:
    assert len(got) == len(want) == STEPS
    assert got == pytest.approx(want, abs=CLOSE)
    assert abs(want[0] - want[-1]) > 100 * CLOSE  # it has learned something: the steps were made
