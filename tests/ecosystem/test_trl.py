"""TRL's `SFTTrainer`: padding-free and packed, against the padded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import PAD, ROWS, STEPS, arguments, built, differ, keeping, same, sentences, tokenizer

pytest.importorskip("trl", reason="the tests of TRL need the extra `ecosystem`, and Python 3.11")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import weft

MODELS = {
    "registry": lambda: built("Llama", "ForCausalLM", "weft"),
    "packed": lambda: weft.pack(built("Llama", "ForCausalLM")),
}


def losses_of(model: Any, folder: Path, kind: type = SFTTrainer, **options: Any) -> list[float]:
    found: list[float] = []
    texts = options.pop("texts", STEPS * ROWS)
    data = Dataset.from_dict({"text": sentences(texts)})
    settings = SFTConfig(**arguments(folder, dataset_text_field="text", **{"max_length": None, **options}))
    trainer = keeping(kind, found)(model=model, args=settings, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of(built("Llama", "ForCausalLM"), tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("padding_free", [True, False])
def test_padding_free(
    model: str, padding_free: bool, stock: list[float], tmp_path: Path, by_registry: list[int]
) -> None:
    weft.register_attention()
    same(losses_of(MODELS[model](), tmp_path, padding_free=padding_free), stock)
    assert bool(by_registry) == (model == "registry")


class Apart(SFTTrainer):
    """Takes the texts of a flattened row apart and pads them: what a packed row must cost, by stock code alone."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
        lengths = inputs["cu_seq_lens_q"].diff().tolist()
        assert len(lengths) > ROWS  # several texts in a row, as packing wants it

        def rows(name: str, fill: int) -> torch.Tensor:
            parts = inputs[name][0].split(lengths)
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)

        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in lengths], batch_first=True).long()
        padded = {"input_ids": rows("input_ids", PAD), "labels": rows("labels", -100), "attention_mask": mask}
        return super().compute_loss(model, padded, *args, **rest)


class Mixed(SFTTrainer):
    """Says of a flattened row that it is one text."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **rest: Any) -> Any:
        row = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        return super().compute_loss(model, row, *args, **rest)


@pytest.mark.parametrize("model", MODELS)
def test_packing(model: str, tmp_path: Path, by_registry: list[int]) -> None:
    """Rows that TRL fills with texts, best fit first; against the same texts of each batch, apart and padded."""
    weft.register_attention()
    options = {"packing": True, "max_length": 64, "texts": 10 * STEPS * ROWS}
    want = losses_of(built("Llama", "ForCausalLM", "eager"), tmp_path / "stock", Apart, **options)
    differ(losses_of(built("Llama", "ForCausalLM", "eager"), tmp_path / "mixed", Mixed, **options), want)
    assert not by_registry
    same(losses_of(MODELS[model](), tmp_path / "weft", **options), want)
    assert bool(by_registry) == (model == "registry")
