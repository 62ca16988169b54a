"""sentence-transformers as its users run it, beside weft: scores of pairs of texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench.harness import Case
from weft.packed import pack

BATCHES = (8, 32)  # the second is the default; few texts, sorted, still differ enough for the first to be better
_LONGEST = 12  # sentences of a document
AGREEMENT = 1e-5


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
