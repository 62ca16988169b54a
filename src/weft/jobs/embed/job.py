"""A job on texts: read, tokenize, fill batches by tokens, compute, write, and remember how far it came.

Reading and tokenizing run ahead of computing, and writing behind it, by a thread each. An input is known by its
content: a hash of the records that are done tells whether the same job goes on.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from weft.jobs.embed.recipe import DENSE, SCORES
from weft.jobs.embed.tasks import EmbedTask, TextEncoder
from weft.jobs.texts.batches import Batches, InputIdentity, Kept, TextBatch, TextTask, record_identity
from weft.jobs.texts.flow import Ahead, Behind
from weft.jobs.texts.formats import LINES, Rows, RowTable
from weft.jobs.texts.parts import SHARD, Shard
from weft.jobs.texts.readers import FORMATS, Record, RecordShape, TextRecord, format_of, read
from weft.jobs.texts.writers import EmbeddingWriter, Journal, check_output

TOKEN_BUDGET = 4096  # of a batch: enough rows for the matmuls, few enough for the caches
_ROOM = 2  # batches that wait to be computed, or to be written


@dataclass(frozen=True)
class EmbedOptions:
    """What the command line asks. `source` None is standard input; `skip_bad` False makes a bad record fatal.

    Where texts are compared with others, `beside` is the column of these, which may hold `lists`; a `query` stands for
    `column` in every record. A `shard` takes a part of the texts.
    """

    source: Path | None
    out: Path
    kind: str | None = None
    column: str = "text"
    token_budget: int = TOKEN_BUDGET
    skip_bad: bool = False
    resume: bool = True
    about: dict[str, Any] = field(default_factory=dict)  # what else makes this job this one: `Encoder.identity()`
    beside: str | None = None
    query: str | None = None
    lists: bool = False
    shard: Shard | None = None

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

    @property
    def shape(self) -> RecordShape:
        """What is read of a record."""
        return RecordShape(self.column, self.beside, self.query, self.lists)

    def job(self, width: int) -> dict[str, Any]:
        """What makes this job this one."""
        extra = {"documents": self.beside, "query": self.query, SHARD: None if self.shard is None else str(self.shard)}
        given = {name: value for name, value in extra.items() if value is not None}
        return {"format": self.format, "column": self.column, "width": width, **given, **self.about}

    def with_about(self, about: dict[str, Any]) -> EmbedOptions:
        """The same, of a model that is known by this."""
        return replace(self, about=about)

    def check(self, kind: str = DENSE) -> None:
        """Raises where input or output cannot be opened, or not hold what a model of this kind makes of texts: before
        it is loaded, not after that."""
        check_output(self.out)
        ending = self.out.suffix
        if kind == SCORES and ending not in (LINES, ".parquet"):
            raise ValueError(f"got the output {self.out} for scores, expected a name that ends in {LINES} or .parquet")
        if kind not in (DENSE, SCORES) and ending != LINES:
            raise ValueError(
                f"got the output {self.out} for a {kind}, whose rows differ in length; expected a name that ends in "
                f"{LINES}"
            )
        if self.source is None:
            return
        with open(self.source, "rb"):
            pass
        if self.out.exists() and self.out.samefile(self.source):
            raise ValueError(f"got {self.out} as input and as output; write to another file")


class JobTask(TextTask, Protocol):
    """What is done to each record, and what of it is written.

    `kind` is that of the model; rows have `width` numbers, or are those of a `table`. `compute` gives a result for each
    input, and `rows` what is written for each record, which has so many inputs as `counts` says.
    """

    kind: str
    width: int
    table: RowTable | None

    def compute(self, ids: Sequence[Any]) -> Rows: ...

    def rows(self, results: Rows, counts: Sequence[int]) -> Rows: ...


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
    return run_task(options, EmbedTask(encoder), report=report, clock=clock)


def run_task(
    options: EmbedOptions,
    task: JobTask,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Does a task to all records; goes on where an earlier run of the same job was stopped."""
    options.check(task.kind)
    stream = _Stream(options)
    try:
        with EmbeddingWriter(
            options.out, width=task.width, job=options.job(task.width), resume=options.resume, table=task.table
        ) as writer:
            records = read(stream.file, kind=options.format, column=options.shape)
            identity, texts = _skip_done(records, writer.journal)
            kept = Kept(task.numbers)
            cutter = Batches(
                task, kept.slots, budget=options.token_budget, skip_bad=options.skip_bad, shard=options.shard
            )  # fmt: skip
            stream.ahead = Ahead(cutter.of(records, identity, texts), room=_ROOM)
            told = _Told(writer, stream.size, clock)
            # What is behind is left first: all that was computed is written, whatever ends this.
            with stream.ahead, Behind(told.write, room=_ROOM) as behind:
                for batch in stream.ahead:
                    behind.put((batch, _computed(task, kept, batch, options.token_budget)))
                    for progress in behind.done():
                        report(progress)
                for progress in behind.finish():
                    report(progress)
            writer.finish()
            return told.progress
    finally:
        stream.close()


class _Told:
    """Writes what was computed, and says how far the job is."""

    def __init__(self, writer: EmbeddingWriter, size: int, clock: Callable[[], float]) -> None:
        self._writer, self._size, self._clock = writer, size, clock
        self._start, self._before = clock(), writer.journal.tokens
        self.progress = Progress(writer.journal.rows, 0, writer.journal.skipped, 0.0, None)

    def write(self, computed: tuple[TextBatch, Rows]) -> Progress:
        batch, rows = computed
        self._writer.append(
            rows, records=batch.records, tokens=batch.tokens, skipped=batch.bad, identity=batch.identity
        )  # fmt: skip
        done = self._writer.journal
        share = batch.bytes_read / self._size if self._size and batch.bytes_read else self.progress.share
        tokens, seconds = done.tokens - self._before, self._clock() - self._start
        self.progress = Progress(done.rows, tokens, done.skipped, seconds, share)
        return self.progress


class _Stream:
    """The input. `size` is 0 where nobody knows how much of it is read."""

    def __init__(self, options: EmbedOptions) -> None:
        source = options.source
        self.file = _opened(source)
        self.size = source.stat().st_size if source is not None and options.format != "parquet" else 0
        self.ahead: Ahead[TextBatch] | None = None

    def close(self) -> None:
        """Not while a thread waits for it, nor what stands for standard input."""
        is_free = self.ahead is None or self.ahead.has_ended
        if is_free and self.file is not getattr(sys.stdin, "buffer", None):
            self.file.close()


def _opened(source: Path | None) -> IO[bytes]:
    if source is not None:
        return open(source, "rb")
    if sys.stdin is None:
        raise ValueError("standard input is closed; give a file, or something to read")
    try:
        # A file of its own: a thread that waits for a pipe holds the lock of what it reads, and at its end Python would
        # wait for that of sys.stdin.
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except (io.UnsupportedOperation, OSError):  # it stands for something else, as in tests
        return sys.stdin.buffer


def _skip_done(records: Iterator[Record], journal: Journal) -> tuple[InputIdentity, int]:
    """Reads past the records that are done with, which must be those that the journal counted; how many are texts."""
    identity = InputIdentity()
    count = texts = 0
    for record in islice(records, journal.records):
        identity.add(record_identity(record))
        count += 1
        texts += isinstance(record, TextRecord)
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
    return identity, texts


def _computed(task: JobTask, kept: Kept, batch: TextBatch, budget: int) -> Rows:
    """What is written for the records of a batch."""
    if not batch.counts:  # nothing but bad records, and those of other parts
        return np.zeros((0, task.width), np.float32) if task.table is None else []
    results: Rows = np.zeros((0, task.numbers or 0), np.float32)
    parts = [task.compute(part) for part in _cut(batch.fresh, budget)]
    if parts and isinstance(parts[0], np.ndarray):
        results = parts[0] if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])
    elif parts:
        results = [row for part in parts for row in part]
    return task.rows(kept.placed(batch, results), batch.counts)


def _cut(ids: Sequence[Any], budget: int) -> Iterator[Sequence[Any]]:
    """Inputs by about `budget` tokens: a record may have many."""
    start = tokens = 0
    for i, one in enumerate(ids):
        count = max(len(one), 1)
        if i > start and tokens + count > budget:
            yield ids[start:i]
            start, tokens = i, 0
        tokens += count
    if start < len(ids):
        yield ids[start:]
