"""The job of `weft embed`: read, tokenize, fill batches by tokens, embed, write, and remember how far it came.

An input is known by its content: a hash of the records that are done tells whether the same job goes on.
"""

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

import numpy as np
from torch import Tensor

from weft.jobs.embed.readers import FORMATS, BadRecord, Record, TextRecord, format_of, read
from weft.jobs.embed.recipe import DENSE
from weft.jobs.embed.writers import EmbeddingWriter, Journal, Rows, check_output

TOKEN_BUDGET = 4096  # of a batch: enough rows for the matmuls, few enough for the caches
_TOKENIZED_AT_ONCE = 256  # texts, or fewer that are long
_CHARACTERS_AT_ONCE = 1 << 20
_BAD_AT_ONCE = 256  # bad records that a batch may hold


@dataclass(frozen=True)
class EmbedOptions:
    """What the command line asks. `source` None is standard input; `skip_bad` False makes a bad record fatal."""

    source: Path | None
    out: Path
    kind: str | None = None
    column: str = "text"
    token_budget: int = TOKEN_BUDGET
    skip_bad: bool = False
    resume: bool = True
    about: dict[str, Any] = field(default_factory=dict)  # what else makes this job this one: `Encoder.identity()`

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ValueError(f"the token budget of a batch must be at least 1, got {self.token_budget}")
        if self.format not in FORMATS:
            raise ValueError(f"got the format {self.kind!r}, expected one of {', '.join(FORMATS)}")

    @property
    def format(self) -> str:
        if self.kind is not None:
            return self.kind
        return "txt" if self.source is None else format_of(self.source)

    def check(self, kind: str = DENSE) -> None:
        """Raises where input or output cannot be opened, or not hold what a model of this kind makes of texts: before
        it is loaded, not after that."""
        check_output(self.out, kind)
        if self.source is None:
            return
        with open(self.source, "rb"):
            pass
        if self.out.exists() and self.out.samefile(self.source):
            raise ValueError(f"got {self.out} as input and as output; write to another file")


class TextEncoder(Protocol):
    """What makes embeddings; `Encoder` does. What `tokenize` gives for a text has a length, which counts its tokens.

    `embed` gives [texts, width], or for kinds of which rows differ in length what each text has, by name.
    """

    kind: str
    width: int

    def tokenize(self, texts: Sequence[str]) -> Sequence[Any]: ...

    def embed(self, ids: Sequence[Any]) -> Tensor | list[dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Progress:
    """How far a job is. `share` of the input is done, None where that is unknown."""

    rows: int
    tokens: int
    skipped: int
    seconds: float
    share: float | None


def run(
    options: EmbedOptions,
    encoder: TextEncoder,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Embeds everything; goes on where an earlier run of the same job was stopped."""
    options.check(encoder.kind)
    with _opened(options.source) as stream:
        size = options.source.stat().st_size if options.source is not None and options.format != "parquet" else 0
        job = {"format": options.format, "column": options.column, "width": encoder.width, **options.about}
        with EmbeddingWriter(options.out, width=encoder.width, job=job, resume=options.resume) as writer:
            records = read(stream, kind=options.format, column=options.column)
            identity = _skip_done(records, writer.journal)
            start, before = clock(), writer.journal.tokens
            progress = Progress(writer.journal.rows, 0, writer.journal.skipped, 0.0, None)
            for batch in _batches(_tokenized(records, encoder, options.skip_bad), options.token_budget, identity):
                rows = _embedded(encoder, batch)
                writer.append(
                    rows, records=batch.records, tokens=batch.tokens, skipped=batch.bad, identity=batch.identity
                )
                done = writer.journal
                share = batch.texts[-1].bytes_read / size if size and batch.texts else progress.share
                progress = Progress(done.rows, done.tokens - before, done.skipped, clock() - start, share)
                report(progress)
            writer.finish()
            return progress


@contextmanager
def _opened(source: Path | None) -> Iterator[IO[bytes]]:
    if source is None:
        if sys.stdin is None:
            raise ValueError("standard input is closed; give a file, or something to read")
        yield sys.stdin.buffer
        return
    with open(source, "rb") as stream:
        yield stream


def _skip_done(records: Iterator[Record], journal: Journal) -> InputIdentity:
    """Reads past the records that are done with, which must be those that the journal counted."""
    identity = InputIdentity()
    count = 0
    for record in islice(records, journal.records):
        identity.add(record_identity(record))
        count += 1
    if count < journal.records:
        raise ValueError(
            f"the input has {count} records, of which {journal.records} were embedded before: it is another one, or it "
            f"was cut; pass --restart to start anew, or write to another file"
        )
    if journal.records and str(identity) != journal.identity:
        raise ValueError(
            f"the first {count} records of the input are not those that were embedded before: it is another one, or it "
            f"was changed; pass --restart to start anew, or write to another file"
        )
    return identity


def _tokenized(records: Iterable[Record], encoder: TextEncoder, skip_bad: bool) -> Iterator[_TokenizedText | BadRecord]:
    """The records in order, texts tokenized a few hundred at a time."""
    for group in _groups(records):
        texts = [record for record in group if isinstance(record, TextRecord)]
        ids = iter(encoder.tokenize([record.text for record in texts]) if texts else [])
        for record in group:
            if isinstance(record, TextRecord):
                yield _TokenizedText(record_identity(record), next(ids), record.bytes_read)
            elif skip_bad:
                yield record
            else:
                raise ValueError(
                    f"line {record.line} of the input cannot be read: {record.reason}; "
                    f"mend it, or pass --errors skip; what is done is kept"
                )


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records a few hundred at a time; fewer where they are long, so that memory is bounded by characters."""
    group: list[Record] = []
    characters = 0
    for record in records:
        group.append(record)
        characters += len(record.text) if isinstance(record, TextRecord) else 0
        if len(group) == _TOKENIZED_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _batches(items: Iterable[_TokenizedText | BadRecord], budget: int, identity: InputIdentity) -> Iterator[_Batch]:
    """Batches of about `budget` tokens, in the order of the input: packing needs no sorting."""
    batch = _Batch()
    for item in items:
        if not batch.takes(item, budget):
            batch.identity = str(identity)
            yield batch
            batch = _Batch()
        batch.add(item)
        identity.add(record_identity(item) if isinstance(item, BadRecord) else item.identity)
    if batch.records:
        batch.identity = str(identity)
        yield batch


def _embedded(encoder: TextEncoder, batch: _Batch) -> Rows:
    if not batch.texts:  # nothing but bad records
        return np.zeros((0, encoder.width), np.float32)
    rows = encoder.embed([text.ids for text in batch.texts])
    if isinstance(rows, Tensor):
        return rows.numpy()
    return [{name: value.numpy() for name, value in row.items()} for row in rows]


@dataclass
class _Batch:
    """Texts that are embedded at once, and the bad records among them."""

    texts: list[_TokenizedText] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    tokens: int = 0
    identity: str = ""  # of the input up to the end of this batch

    @property
    def records(self) -> int:
        return len(self.texts) + len(self.bad)

    def takes(self, item: _TokenizedText | BadRecord, budget: int) -> bool:
        if isinstance(item, BadRecord):
            return len(self.bad) < _BAD_AT_ONCE
        return not self.texts or self.tokens + max(len(item.ids), 1) <= budget

    def add(self, item: _TokenizedText | BadRecord) -> None:
        if isinstance(item, BadRecord):
            self.bad.append(item)
        else:
            self.texts.append(item)
            self.tokens += max(len(item.ids), 1)  # texts without tokens are not free either


@dataclass(frozen=True)
class _TokenizedText:
    """A text by its tokens; the text itself may be long, and is not held."""

    identity: bytes
    ids: Any
    bytes_read: int


class InputIdentity:
    """A hash of the records so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, record: bytes) -> None:
        """The next one, as `record_identity` has it."""
        self._hash.update(record)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def record_identity(record: Record) -> bytes:
    """A hash of a record's text. Bad records are alike: none of them gives a row."""
    return hashlib.sha256(record.text.encode()).digest() if isinstance(record, TextRecord) else b"bad"
