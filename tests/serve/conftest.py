"""Models that the tests of a run share: opening one takes longer than most tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from embed_folders import folder
from servers import Serving, serving

from weft.jobs.serve.models import ServedModel, open_model, warm_up
from weft.jobs.serve.options import ModelChoice

PROMPTS = {"prompts": {"query": "query: ", "long": "find this: "}, "default_prompt_name": None}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small folders by what they are."""
    root = tmp_path_factory.mktemp("models")
    found = {
        "unit": folder(root / "unit", modules=("Pooling", "Normalize"), config=PROMPTS),
        "plain": folder(
            root / "plain", modules=("Pooling", "Dense"), pooling={"include_prompt": False}, config=PROMPTS, seed=1
        ),
    }
    for name, labels in (("ranker", 1), ("classifier", 3)):
        path = folder(root / name, head="ForSequenceClassification", plain=True, seed=labels, num_labels=labels)
        found[name] = path
    return found


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, ServedModel]:
    """The same, open."""
    found = {name: open_model(ModelChoice(name, path)) for name, path in folders.items()}
    for model in found.values():
        warm_up(model)
    return found


@pytest.fixture(scope="session")
def server(models: dict[str, ServedModel]) -> Iterator[Serving]:
    """All of them, with the usual limits."""
    with serving(models) as running:
        yield running
