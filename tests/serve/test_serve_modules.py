"""Folders that sentence-transformers' own modules compute: sparse vectors, a vector for each token, other routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from embed_folders import TEXTS
from servers import DEADLINE, Serving, serving

from weft.jobs.embed import open_encoder
from weft.jobs.serve.models import ServedModel, open_model, warm_up
from weft.jobs.serve.options import ModelChoice

pytest.importorskip("sentence_transformers")
from library_models import asymmetric, late, splade

MAKE = {"sparse": splade, "late": late, "routes": asymmetric}
TEXTS = [text for text in TEXTS if 0 < len(text) < 50]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("modules")
    for name, make in MAKE.items():
        make(root / f"{name}-parts").save_pretrained(str(root / name), create_model_card=False)
    return {name: root / name for name in MAKE}


@pytest.fixture(scope="module")
def running(paths: dict[str, Path]) -> Iterator[Serving]:
    models: dict[str, ServedModel] = {}
    for name, path in paths.items():
        models[name] = open_model(ModelChoice(name, path))
        warm_up(models[name])
    with serving(models) as server:
        yield server


def wanted(path: Path) -> Any:
    encoder = open_encoder(path)
    return encoder.embed(encoder.tokenize(TEXTS))  # type: ignore[arg-type]


def asked(server: Serving, path: str, model: str) -> list[Any]:
    """The results of all texts, alone and in one request at the same time."""

    async def main() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
            bodies = [{"inputs": text, "model": model} for text in TEXTS] + [{"inputs": TEXTS, "model": model}]
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    *alone, together = asyncio.run(main())
    assert [answer.json()[0] for answer in alone] == together.json()
    return together.json()  # type: ignore[no-any-return]


def test_sparse(running: Serving, paths: dict[str, Path]) -> None:
    for found, row in zip(asked(running, "/embed_sparse", "sparse"), wanted(paths["sparse"]), strict=True):
        assert [value["index"] for value in found] == row["indices"].tolist()
        values = np.array([value["value"] for value in found], np.float32)
        assert values.tobytes() == row["values"].numpy().tobytes()


def test_a_vector_for_each_token(running: Serving, paths: dict[str, Path]) -> None:
    for found, row in zip(asked(running, "/embed_all", "late"), wanted(paths["late"]), strict=True):
        assert np.array(found, np.float32).tobytes() == row["vectors"].numpy().tobytes()


def test_a_dense_model_with_routes(running: Serving, paths: dict[str, Path]) -> None:
    body = {"input": TEXTS, "model": "routes"}
    rows = [row["embedding"] for row in running.post("/v1/embeddings", body).json()["data"]]
    raw = wanted(paths["routes"]).numpy()
    assert np.array(rows, np.float32).tobytes() == raw.tobytes()
    unit = np.array(asked(running, "/embed", "routes"), np.float32)
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        ("/embed_sparse", {"inputs": [5, 6], "model": "sparse"}, 424, "no ids"),
        ("/embed_sparse", {"inputs": "a", "prompt_name": "query", "model": "sparse"}, 424, "no prompt_name"),
        ("/embed", {"inputs": "a", "dimensions": 3, "model": "routes"}, 424, "no dimensions"),
        ("/embed", {"inputs": "a", "model": "sparse"}, 424, "not an embedding model"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left", "model": "routes"}, 424, "no truncation_direction"),
        ("/embed_sparse", {"inputs": "ab" * 60, "model": "sparse"}, 413, "must have less than"),
        ("/tokenize", {"inputs": "a", "model": "sparse"}, 424, "tokenizer of their own"),
    ],
)
def test_what_they_do_not_take(running: Serving, path: str, body: Any, code: int, said: str) -> None:
    answer = running.post(path, body)
    assert answer.status_code == code, answer.text
    assert said in answer.json()["error"]


def test_long_texts_are_cut_where_that_is_asked(running: Serving) -> None:
    body = {"inputs": "ab" * 60, "model": "sparse", "truncate": True}
    assert running.post("/embed_sparse", body).status_code == 200
