"""`weft embed`: the whole command against `SentenceTransformer.encode` after loading, and what its data path adds."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.harness import Case, measure
from weft.bench.systems.sentence_transformers import BATCHES, sentences
from weft.errors import WeftError
from weft.jobs.embed import EmbedOptions, Encoder
from weft.jobs.embed import run as run_embed
from weft.jobs.embed.job import TOKEN_BUDGET
from weft.jobs.embed.tasks import EmbedTask
from weft.jobs.texts.batches import Batches, InputIdentity
from weft.jobs.texts.readers import RecordShape, read
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
    systems = {
        "command": embed_command(model, home, words),
        "encode": theirs(best, words),
        "encode_default": lambda: peer.encode(words, show_progress_bar=False),
    }
    case = Case(f"weft embed, {texts:,} sentences", systems, {"figure": "command", "system": "weft"})
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds // 2)
    seconds = [measured.median(name) for name in systems]
    note = (
        f"{seconds[0]:.1f} s with its start, encode alone {seconds[1]:.1f} s at its best (batches of {best}), "
        f"{seconds[2]:.1f} s as it comes"
    )
    ratios = {
        "embed_command_vs_st": measured.ratio("encode", "command"),
        "embed_command_vs_st_default": measured.ratio("encode_default", "command"),
    }
    return {**measured.row(), **ratios, "note": note}


def start_row(model: Path, home: Path, *, rounds: int) -> Row:
    """The command on five texts, which is its start."""
    systems = {"command": embed_command(model, home, sentences(5))}
    case = Case("weft embed, 5 sentences", systems, {"figure": "start", "system": "weft"})
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds // 2)
    seconds = measured.median("command")
    return {**measured.row(), "embed_start_s": seconds, "note": f"{seconds:.2f} s"}


def data_path_row(encoder: Encoder, home: Path, *, texts: int, rounds: int) -> Row:
    """What reading, tokenizing and writing add to computing: the job of `weft embed`, from file to file, against the
    encoder on the same batches, tokenized before. Each round has texts of its own."""
    words, out = sentences(texts), home / "path.npy"
    pieces = [_Piece.of(encoder, words[i::rounds], home / f"path{i}.txt") for i in range(rounds)]
    turns = dict.fromkeys(("job", "compute"), -1)

    def piece(name: str) -> _Piece:
        turns[name] += 1
        return pieces[turns[name] % rounds]

    def job() -> None:
        run_embed(EmbedOptions(piece("job").source, out, resume=False), encoder)

    def compute() -> None:
        for batch in piece("compute").batches:
            encoder.embed(batch)

    case = Case(
        f"weft embed, {texts:,} sentences, data path",
        {"job": job, "compute": compute},
        {"figure": "path", "system": "weft"},
    )
    measured = measure(case, rounds=rounds, warmup=0, max_retries=rounds)
    added = statistics.median(
        job / compute - 1 for job, compute in zip(measured.seconds("job"), measured.seconds("compute"), strict=True)
    )
    return {**measured.row(), "embed_path_share": added, "note": f"{added:+.1%} over computing"}


@dataclass(frozen=True)
class _Piece:
    """Some texts: in a file, and as the batches that the job makes of them."""

    source: Path
    batches: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, encoder: Encoder, words: Sequence[str], source: Path) -> _Piece:
        source.write_text("\n".join(words), encoding="utf-8")
        task = EmbedTask(encoder)
        with open(source, "rb") as file:
            records = read(file, kind="txt", column=RecordShape("text"))
            cutter = Batches(task, 0, budget=TOKEN_BUDGET, skip_bad=False, shard=None)
            return cls(source, [batch.fresh for batch in cutter.of(records, InputIdentity(), 0)])


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
