"""Other people's programs on packed models, for `weft bench packed`: a step of transformers' `Trainer`, an encoder of
Qwen3's shape, requests that come and go. Each is measured against the same program as its users run it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from weft.bench.harness import Case, System
from weft.bench.systems.arrivals import continuous_against_closed
from weft.bench.systems.packed import PaddedBatch
from weft.packed import pack, register_attention
from weft.report import Row

WORDS = 8_192
TRAINED_TEXTS = 8


def trainer_case(padded: PaddedBatch, *, layers: int) -> Case:
    """One step of `Trainer` on a decoder: collated texts, forward, backward, AdamW.

    weft            packed model, flattened rows
    registry        `attn_implementation="weft"`, flattened rows; linears are torch's
    registry padded the same on padded rows: only attention leaves padding out
    hf sdpa         padded rows, as the default collator makes them
    """
    texts = [row[mask != 0].tolist() for row, mask in zip(padded.ids, padded.mask, strict=True)]
    systems = {
        "weft": _trainer_step("weft", texts, layers, flattened=True, packs=True),
        "registry": _trainer_step("weft", texts, layers, flattened=True),
        "registry padded": _trainer_step("weft", texts, layers, flattened=False),
        "hf sdpa": _trainer_step("sdpa", texts, layers, flattened=False),
    }
    labels = {"batch": len(texts), "tokens": padded.tokens, "padded": padded.ids.numel()}
    return Case(f"Trainer step, decoder of {layers} layers, uniform 512, batch {len(texts)}", systems, labels)


def _trainer_step(
    attention: str, texts: Sequence[Sequence[int]], layers: int, *, flattened: bool, packs: bool = False
) -> System:
    transformers: Any = import_module("transformers")
    register_attention()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        vocab_size=WORDS, max_position_embeddings=1024, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = pack(model) if packs else model
    folder = tempfile.TemporaryDirectory()
    options = transformers.TrainingArguments(folder.name, use_cpu=True, report_to=[], save_strategy="no")
    collate = transformers.DataCollatorWithFlattening() if flattened else _pad
    rows = [{"input_ids": list(text), "labels": list(text)} for text in texts]
    trainer = transformers.Trainer(model=model, args=options, data_collator=collate, train_dataset=rows)
    optimizer, batch = trainer.create_optimizer(), collate(rows)
    counted = (batch["labels"] != -100).sum()  # as its loop counts them

    def step() -> None:
        assert folder.name  # it lives as long as the trainer
        trainer.training_step(model, dict(batch), counted)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _pad(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What `DataCollatorForLanguageModeling` does with these rows, without a tokenizer."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        count = len(row["input_ids"])
        ids[i, :count], mask[i, :count] = torch.tensor(row["input_ids"]), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def qwen3(layers: int) -> Any:
    """Of Qwen3's shape with random weights; 18 layers are about 150 million parameters."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=6, head_dim=64, vocab_size=40_000, max_position_embeddings=1024, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3Model(config).eval()


def arrivals_row(*, quick: bool) -> Row:
    """Requests at random times: how many tokens a second `weft.Generator` serves where closed batches of the same model
    have the same p99. Each time is of one token."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, vocab_size=WORDS,
        max_position_embeddings=1024, eos_token_id=None,
    )  # fmt: skip
    model = pack(transformers.LlamaForCausalLM(config).eval())
    count = 60 if quick else 200
    found = continuous_against_closed(model, words=WORDS, count=count, factor=1.25 if quick else 1.12)
    return {
        "case": f"{count} arrivals, p99 {found['p99_s']:.2f} s, a token",
        "weft_ms": 1e3 / found["continuous_tokens_s"],
        "best_peer": "closed batches",
        "best_peer_ms": 1e3 / found["closed_tokens_s"],
        "vs_best_peer": found["continuous_vs_closed"],
        **found,
    }
