"""The job of `weft embed`: read, tokenize, fill batches by tokens, embed, write, and remember how far it came."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from torch import Tensor

from weft.packed.embed.readers import Bad, Record, Text, format_of, read
from weft.packed.embed.writers import Writer

TOKEN_BUDGET = 4096  # of a batch: enough rows for the matmuls, few enough for the caches
_TOKENIZED_AT_ONCE = 256  # texts, or fewer that are long
_CHARACTERS_AT_ONCE = 1 << 20


class Embeds(Protocol):
    """What makes embeddings; `Encoder` does."""

    width: int

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]: ...

    def embed(self, ids: Sequence[Sequence[int]]) -> Tensor: ...


@dataclass(frozen=True)
class Options:
    """What the command line asks. `source` None is standard input; `skip_bad` False makes a bad record fatal."""

    source: Path | None
    out: Path
    kind: str | None = None
    column: str = "text"
    token_budget: int = TOKEN_BUDGET
    skip_bad: bool = False
    resume: bool = True
    about: dict[str, Any] = field(default_factory=dict)  # what else makes this job this one: model, length

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ValueError(f"the token budget of a batch must be at least 1, got {self.token_budget}")


@dataclass(frozen=True)
class Progress:
    """How far a job is. `share` of the input is done, None where that is unknown."""

    rows: int
    tokens: int
    skipped: int
    seconds: float
    share: float | None


@dataclass(frozen=True)
class _Tokenized:
    record: int  # place in the input, from 0
    ids: list[int]
    bytes_read: int


@dataclass
class _Batch:
    """Texts that are embedded at once, and the bad records among them."""

    texts: list[_Tokenized] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    tokens: int = 0
    records: int = 0  # of the input that are done with after this batch


def run(
    options: Options,
    encoder: Embeds,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Embeds everything; goes on where an earlier run of the same job was stopped."""
    with _opened(options.source) as stream:
        kind = options.kind or ("txt" if options.source is None else format_of(options.source))
        size = options.source.stat().st_size if options.source is not None and kind != "parquet" else 0
        job = {"source": _identity(options.source), "kind": kind, "column": options.column, **options.about}
        with Writer(options.out, width=encoder.width, job=job, resume=options.resume) as writer:
            records = enumerate(read(stream, kind=kind, column=options.column))
            fresh = islice(records, writer.journal.records, None)
            start, before = clock(), writer.journal.tokens
            progress = Progress(writer.journal.rows, 0, writer.journal.skipped, 0.0, 0.0)
            for batch in _batches(_tokenized(fresh, encoder, options.skip_bad), options.token_budget):
                rows = encoder.embed([text.ids for text in batch.texts]).numpy()
                writer.append(rows, records=batch.records, tokens=batch.tokens, skipped=batch.bad)
                at = batch.texts[-1].bytes_read if batch.texts else 0
                done = writer.journal
                share = at / size if size and at else None
                progress = Progress(done.rows, done.tokens - before, done.skipped, clock() - start, share)
                report(progress)
            writer.finish()
            return progress


@contextmanager
def _opened(source: Path | None) -> Iterator[IO[bytes]]:
    if source is None:
        yield sys.stdin.buffer
        return
    with open(source, "rb") as stream:
        yield stream


def _identity(source: Path | None) -> dict[str, Any]:
    """What tells one input from another without reading all of it."""
    if source is None:
        return {"stdin": True}
    with open(source, "rb") as stream:
        head = hashlib.sha256(stream.read(1 << 16)).hexdigest()
    return {"name": source.name, "bytes": source.stat().st_size, "head": head}


def _tokenized(
    records: Iterable[tuple[int, Record]], encoder: Embeds, skip_bad: bool
) -> Iterator[_Tokenized | tuple[int, Bad]]:
    """The records in order, texts tokenized a few hundred at a time."""
    for group in _groups(records):
        texts = [(i, record) for i, record in group if isinstance(record, Text)]
        ids = iter(encoder.tokenize([record.text for _, record in texts]) if texts else [])
        for i, record in group:
            if isinstance(record, Text):
                yield _Tokenized(i, next(ids), record.bytes_read)
            elif skip_bad:
                yield i, record
            else:
                raise ValueError(
                    f"line {record.line} of the input cannot be read: {record.reason}; "
                    f"mend it, or pass --errors skip; what is done is kept"
                )


def _groups(records: Iterable[tuple[int, Record]]) -> Iterator[list[tuple[int, Record]]]:
    """Records a few hundred at a time; fewer where they are long, so that memory is bounded by characters."""
    group: list[tuple[int, Record]] = []
    characters = 0
    for i, record in records:
        group.append((i, record))
        characters += len(record.text) if isinstance(record, Text) else 0
        if len(group) == _TOKENIZED_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _batches(items: Iterable[_Tokenized | tuple[int, Bad]], budget: int) -> Iterator[_Batch]:
    """Batches of about `budget` tokens, in the order of the input: packing needs no sorting."""
    batch = _Batch()
    for item in items:
        if isinstance(item, _Tokenized):
            if batch.texts and batch.tokens + len(item.ids) > budget:
                yield batch
                batch = _Batch()
            batch.texts.append(item)
            batch.tokens += len(item.ids)
            batch.records = item.record + 1
        else:
            batch.bad.append(item[1])
            batch.records = item[0] + 1
    if batch.records:
        yield batch
