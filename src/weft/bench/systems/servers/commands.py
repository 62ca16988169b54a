"""The command `weft embed` as a whole, from start to end, against `SentenceTransformer.encode` after loading."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.bench.harness import Case, measure
from weft.bench.systems.sentence_transformers import BATCHES, sentences
from weft.errors import WeftError
from weft.report import Row

_DEADLINE_SECONDS = 600
_TRIED = 64  # texts that show which size of batches is the better one


def command_row(model: Path, home: Path, *, texts: int, rounds: int) -> Row:
    """Sentences from a file to a file, by a new process; the other has its model in memory, and gives arrays."""
    from sentence_transformers import SentenceTransformer

    peer: Any = SentenceTransformer(str(model), device="cpu")
    words = sentences(texts)

    def theirs(size: int, some: Sequence[str]) -> Callable[[], Any]:
        return lambda: peer.encode(list(some), batch_size=size, show_progress_bar=False)

    tried = Case("size", {str(size): theirs(size, words[:_TRIED]) for size in BATCHES})
    times = measure(tried, rounds=1, warmup=0, max_retries=0)
    best = min(BATCHES, key=lambda size: times.median(str(size)))
    systems = {"command": embed_command(model, home, words), "encode": theirs(best, words)}
    case = Case(f"weft embed, {texts:,} sentences", systems, {"figure": "command", "system": "weft"})
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds // 2)
    seconds = [measured.median(name) for name in systems]
    note = f"{seconds[0]:.1f} s with its start, encode alone {seconds[1]:.1f} s (batches of {best})"
    return {**measured.row(), "embed_command_vs_st": measured.ratio("encode", "command"), "note": note}


def start_row(model: Path, home: Path, *, rounds: int) -> Row:
    """The command on five texts, which is its start."""
    systems = {"command": embed_command(model, home, sentences(5))}
    case = Case("weft embed, 5 sentences", systems, {"figure": "start", "system": "weft"})
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds // 2)
    seconds = measured.median("command")
    return {**measured.row(), "embed_start_s": seconds, "note": f"{seconds:.2f} s"}


def embed_command(model: Path, home: Path, texts: Sequence[str]) -> Callable[[], None]:
    """What people type into a shell."""
    source, out = home / f"{len(texts)}.txt", home / f"{len(texts)}.npy"
    source.write_text("\n".join(texts), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "weft",
        "embed",
        str(source),
        "--out",
        str(out),
        "--model",
        str(model),
        "--restart",
    ]

    def call() -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS)
        if done.returncode:
            raise WeftError(f"weft embed ended with {done.returncode}: {done.stderr[-2000:]}")

    return call
