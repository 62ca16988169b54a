"""What servers are asked: folders of models that all of them can read, texts of 16 to 512 tokens, and requests."""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.bench.systems.sentence_transformers import minilm_folder, sentences
from weft.bench.systems.servers.client import HttpRequest

SHORTEST, LONGEST = 16, 512
MODEL = "bench"  # the name under which every server has its model
ROUTE = "/v1/embeddings"
_SENTENCES = 20_000


@dataclass(frozen=True)
class SizedText:
    """A text, and its tokens, special ones included."""

    text: str
    tokens: int

    def request(self) -> HttpRequest:
        """What OpenAI's client would send: vectors come back in base64."""
        payload = {"model": MODEL, "input": self.text, "encoding_format": "base64"}
        return HttpRequest.post(ROUTE, payload, tokens=self.tokens)


def minilm(folder: Path) -> Path:
    """all-MiniLM-L6-v2 with its real weights, made to read all of its 512 positions instead of 256."""
    shutil.copytree(minilm_folder(), folder, copy_function=_link)
    limits = folder / "sentence_bert_config.json"
    known = json.loads(limits.read_text())
    limits.unlink()
    limits.write_text(json.dumps({**known, "max_seq_length": LONGEST}))
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def bert_base(folder: Path) -> Path:
    """A BERT-base with random weights, MiniLM's tokenizer, mean pooling and normalised vectors."""
    import transformers

    minilm(folder)
    torch.manual_seed(0)
    model: Any = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    model.save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    known = json.loads(pooling.read_text())
    pooling.unlink()
    pooling.write_text(json.dumps({**known, "word_embedding_dimension": model.config.hidden_size}))
    return folder


def mixed_texts(folder: Path, count: int, *, shortest: int = SHORTEST, longest: int = LONGEST) -> list[SizedText]:
    """Different texts of real sentences. Their lengths are spread evenly on a logarithmic scale, like those of queries
    and passages: most texts are short, most tokens are in long ones."""
    import tokenizers

    cutter: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    cutter.no_padding()
    cutter.no_truncation()
    draw, pool = random.Random(0), sentences(_SENTENCES)
    found: dict[str, int] = {}
    while len(found) < count:
        wanted = round(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        text = _cut(cutter, draw, pool, wanted)
        found.setdefault(text, len(cutter.encode(text).ids))
    return [SizedText(text, tokens) for text, tokens in found.items()]


def _cut(cutter: Any, draw: random.Random, pool: Sequence[str], wanted: int) -> str:
    """Sentences in a row, cut to as many tokens as are wanted, special ones included."""
    parts: list[str] = []
    words = 0
    while words < 2 * wanted:  # a word has a token at least; sentences of punctuation have fewer words
        parts.append(draw.choice(pool))
        words += len(parts[-1].split())
    text = " ".join(parts)
    found = cutter.encode(text)
    special = sum(found.special_tokens_mask)
    ends = [
        end for (_, end), is_special in zip(found.offsets, found.special_tokens_mask, strict=True) if not is_special
    ]
    return text[: ends[min(wanted - special, len(ends)) - 1]]


@dataclass(frozen=True)
class MixedRequest:
    """A request with one text or several, by their numbers, to one route or another."""

    request: HttpRequest
    texts: tuple[int, ...]


def mixed_requests(texts: Sequence[SizedText], count: int) -> list[MixedRequest]:
    """Requests of all kinds in a random order: one text or several, floats or base64, OpenAI's route and TEI's.

    >>> sorted({len(one.texts) for one in mixed_requests([SizedText("a", 3)], 50)})
    [1, 2, 4]
    """
    draw = random.Random(1)
    return [_mixed_request(draw, texts) for _ in range(count)]


def _mixed_request(draw: random.Random, texts: Sequence[SizedText]) -> MixedRequest:
    chosen = tuple(draw.randrange(len(texts)) for _ in range(draw.choice((1, 1, 1, 1, 2, 4))))
    tokens, words = sum(texts[n].tokens for n in chosen), [texts[n].text for n in chosen]
    given = words if len(words) > 1 or draw.random() < 0.2 else words[0]
    if draw.random() < 0.25:
        return MixedRequest(HttpRequest.post("/embed", {"inputs": given}, tokens=tokens), chosen)
    form = draw.choice(("float", "base64"))
    payload = {"model": MODEL, "input": given, "encoding_format": form}
    return MixedRequest(HttpRequest.post(ROUTE, payload, tokens=tokens), chosen)


def vectors(answer: Any) -> list[NDArray[np.float32]]:
    """The vectors of an answer, as OpenAI's route gives them (floats or base64) or as TEI's does.

    >>> [row.tolist() for row in vectors({"data": [{"embedding": "AACAPwAAAEA="}]})], vectors([[0.5]])[0].tolist()
    ([[1.0, 2.0]], [0.5])
    """
    rows = [one["embedding"] for one in answer["data"]] if isinstance(answer, dict) else answer
    return [
        np.frombuffer(base64.b64decode(row), dtype="<f4") if isinstance(row, str) else np.array(row, dtype=np.float32)
        for row in rows
    ]
