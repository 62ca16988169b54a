"""transformers' `Trainer`: a padded run of the stock model against flattened texts, by the registry and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets", reason="these tests need the extra `ecosystem`")

from programs import NO_DROPOUT, PAD, arguments, built, differ, examples, keeping, same, tokenizer
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments

import weft
from weft.packed.huggingface import PackedHead


def losses_of(model: Any, collator: Any, folder: Path, **options: Any) -> list[float]:
    found: list[float] = []
    # Columns that no argument of `forward` names are what a collator makes here.
    settings = TrainingArguments(**arguments(folder, remove_unused_columns=False, **options))
    keeping(Trainer, found)(model=model, args=settings, train_dataset=examples(), data_collator=collator).train()
    return found


def padding() -> Any:
    return DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(built("Llama", "ForCausalLM"), padding(), tmp_path_factory.mktemp("stock"))


RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "registry, flattened": (lambda: built("Llama", "ForCausalLM", "weft"), DataCollatorWithFlattening, {}),
    "registry, flattened, offsets": (
        lambda: built("Llama", "ForCausalLM", "weft"),
        lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
        {},
    ),
    "registry, padded": (lambda: built("Llama", "ForCausalLM", "weft"), padding, {}),
    "packed, flattened": (lambda: weft.pack(built("Llama", "ForCausalLM")), DataCollatorWithFlattening, {}),
    "packed, flattened, offsets": (
        lambda: weft.pack(built("Llama", "ForCausalLM")),
        lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False),
        {"gradient_checkpointing": True},
    ),
    "packed, padded": (lambda: weft.pack(built("Llama", "ForCausalLM")), padding, {"gradient_accumulation_steps": 1}),
}


def mixing(features: Any) -> Any:
    """A flattened row, and a mask by which it is one text to the stock model."""
    row = DataCollatorWithFlattening(return_tensors="pt")(features)
    return {**row, "attention_mask": torch.ones_like(row["input_ids"])}


def test_texts_that_see_each_other_have_other_losses(stock: list[float], tmp_path: Path) -> None:
    differ(losses_of(built("Llama", "ForCausalLM"), mixing, tmp_path), stock)


@pytest.mark.parametrize("run", RUNS)
def test_a_decoder(run: str, stock: list[float], tmp_path: Path, by_registry: list[int]) -> None:
    weft.register_attention()
    make, collator, options = RUNS[run]
    model = make()
    same(losses_of(model, collator(), tmp_path, **options), stock)
    assert bool(by_registry) != isinstance(model, PackedHead)


@pytest.mark.parametrize(("family", "first"), [("Bert", 0), ("Roberta", PAD + 1), ("ModernBert", 0)])
def test_an_encoder_with_a_masked_language_head(
    family: str, first: int, tmp_path: Path, by_registry: list[int]
) -> None:
    """Whose rows transformers itself would mix."""
    options = {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 8} if family == "ModernBert" else NO_DROPOUT
    want = losses_of(built(family, "ForMaskedLM", **options), padding(), tmp_path / "stock")
    flat = DataCollatorWithFlattening(position_ids_start=first)
    differ(losses_of(built(family, "ForMaskedLM", **options), flat, tmp_path / "mixed"), want)
    same(losses_of(weft.pack(built(family, "ForMaskedLM", **options)), flat, tmp_path / "packed"), want)
    assert not by_registry
    weft.register_attention()
    same(losses_of(built(family, "ForMaskedLM", "weft", **options), flat, tmp_path / "registry"), want)
    assert by_registry
