"""Embeddings to a file, row by row, with a journal that lets a job go on after it was killed.

While a job runs, its rows are in `OUT.partial` and its journal is `OUT.journal`. Rows are written first, then the
journal is replaced in one step, so that a kill loses at most rows that no journal counts; these are cut off when the
job goes on. At the end the file gets its header and its name. Records that were skipped are in `OUT.skipped`, a line
of JSON each. A file is written by one job at a time: the rows are locked.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from weft.jobs.texts.formats import (
    LINES,
    OUTPUTS,
    Rows,
    RowTable,
    arrow,
    header,
    header_bytes,
    lines,
    packed,
    vectors_in,
    write_table,
    write_vectors,
)
from weft.jobs.texts.parts import PART, SHARD, JobPart
from weft.jobs.texts.readers import BadRecord


@dataclass(frozen=True)
class Journal:
    """How far a job has come. `job` says what it is, so that another job is not mistaken for it.

    `records` of the input are done with, skipped ones included; `identity` is a hash of them, and they gave `rows`
    rows. `skipped_bytes` is the length of the list of skipped records. While `is_finishing` the rows may have their
    final name already. Rows of a file of lines have any length: `line_bytes` is that of all.
    """

    job: dict[str, Any]
    records: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    identity: str = ""
    line_bytes: int = 0
    is_finishing: bool = False

    @classmethod
    def load(cls, path: Path) -> Journal:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the journal {path} is broken: {error}; delete it to start anew") from error


def check_output(out: Path) -> None:
    """Raises where no file of this name can be written."""
    if out.suffix not in OUTPUTS:
        raise ValueError(f"got the output {out}, expected a name that ends in {', '.join(OUTPUTS)}")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"got the output {out}, but {folder} is not a directory; create it first")
    if out.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"got the output {out}, which cannot be written; choose another place")
    if out.suffix == ".parquet":
        arrow()


class EmbeddingWriter:
    """Appends rows to an output: [n, width], or of any length to one of lines, or those of a `table`. Use it as a
    context; `finish` gives the file its name."""

    def __init__(
        self, out: Path, *, width: int, job: dict[str, Any], resume: bool, table: RowTable | None = None
    ) -> None:
        check_output(out)
        self.out, self.width, self._table = out, width, table
        self._partial, self._journal, self._skips = (
            out.with_name(out.name + ending) for ending in (".partial", ".journal", ".skipped")
        )
        earlier = self._earlier(job) if resume and self._journal.exists() else None
        if earlier is not None and earlier.is_finishing and out.exists() and not self._partial.exists():
            self._rows = _open_alone(out)  # it was stopped when only the journal was left to remove
            os.replace(out, self._partial)
        else:
            self._rows = _open_alone(self._partial)
        try:
            self._skipped = open(self._skips, "r+b" if earlier is not None and self._skips.exists() else "w+b")  # noqa: SIM115
            self.journal = self._start(job) if earlier is None else self._go_on(earlier)
        except BaseException:
            self._rows.close()
            raise

    def _earlier(self, job: dict[str, Any]) -> Journal | None:
        """The journal of this job, or None where nothing was done yet."""
        journal = Journal.load(self._journal)
        if journal.records == 0:
            return None
        changed = _changes(job, journal.job)
        if changed:
            raise ValueError(
                f"{self._journal} is of another job: {', '.join(changed)} differ; "
                f"pass --restart to start anew, or write to another file"
            )
        return journal

    def _start(self, job: dict[str, Any]) -> Journal:
        self._rows.truncate(0)
        self._rows.write(b"\0" * header_bytes(self.out.suffix))
        self._rows.flush()
        self._skipped.truncate(0)
        journal = Journal(job)
        self._replace_journal(journal)
        return journal

    def _go_on(self, journal: Journal) -> Journal:
        """Cuts off what the journal does not count."""
        rows_end = (
            journal.line_bytes if self._is_lines else header_bytes(self.out.suffix) + journal.rows * self.width * 4
        )
        counted = ((self._rows, rows_end), (self._skipped, journal.skipped_bytes))
        for file, size in counted:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(
                    f"{file.name} has lost what {self._journal} counts in it; pass --restart to start anew"
                )
        for file, size in counted:
            file.truncate(size)
            file.seek(size)
        return journal

    @property
    def _is_lines(self) -> bool:
        return self._table is not None or self.out.suffix == LINES

    def append(self, rows: Rows, *, records: int, tokens: int, skipped: Iterable[BadRecord], identity: str) -> None:
        """Adds the rows of the next `records` records, after which the input is `identity`; then they are safe."""
        data = lines(rows, self.journal.rows) if self._is_lines else packed(rows, self.width)
        bad = list(skipped)
        with self._named_errors():
            self._rows.write(data)
            self._rows.flush()
            for record in bad:
                self._skipped.write(json.dumps(asdict(record)).encode() + b"\n")
            self._skipped.flush()
            done = self.journal
            journal = replace(
                done, records=done.records + records, rows=done.rows + len(rows), tokens=done.tokens + tokens,
                skipped=done.skipped + len(bad), skipped_bytes=self._skipped.tell(), identity=identity,
                line_bytes=self._rows.tell() if self._is_lines else 0,
            )  # fmt: skip
            self._replace_journal(journal)
            self.journal = journal

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """A full disk says neither what was written nor what becomes of it."""
        try:
            yield
        except OSError as error:
            what = f"{error.strerror}; what is done is kept, and the same command goes on from there"
            raise OSError(error.errno, what, str(self.out)) from error

    def _replace_journal(self, journal: Journal) -> None:
        new = self._journal.with_name(self._journal.name + ".new")
        try:
            new.write_text(json.dumps(asdict(journal)), encoding="utf-8")
            os.replace(new, self._journal)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def finish(self) -> None:
        """Completes the output, gives it its name, and removes the journal."""
        with self._named_errors():
            self._write_part()
            if self.out.suffix == ".parquet":
                self._to_parquet()
            else:
                self._write_header()
                os.fsync(self._rows.fileno())
                self._replace_journal(replace(self.journal, is_finishing=True))
                os.replace(self._partial, self.out)
            self._journal.unlink()
        if self.out.suffix == ".parquet":
            self._partial.unlink()
        if self.journal.skipped == 0:
            self._skips.unlink(missing_ok=True)

    def _write_part(self) -> None:
        """Beside a part of a job: what `weft embed merge` must know of it."""
        path = self.out.with_name(self.out.name + PART)
        if SHARD not in self.journal.job:
            path.unlink(missing_ok=True)  # of an earlier job
            return
        done = self.journal
        part = JobPart(done.job, done.records, done.rows, done.skipped, done.identity, self._table)
        new = path.with_name(path.name + ".new")
        new.write_text(part.text(), encoding="utf-8")
        os.replace(new, path)

    def _write_header(self) -> None:
        if not self._is_lines:
            self._rows.seek(0)
            self._rows.write(header(self.out.suffix, self.journal.rows, self.width))
        self._rows.flush()

    def _to_parquet(self) -> None:
        """Beside the rows, which stay what the journal says until it is gone."""
        new = self._partial.with_name(self._partial.name + ".new")
        try:
            with open(new, "wb") as file, open(self._partial, "rb") as rows:
                if self._table is None:
                    write_vectors(file, self.width, vectors_in(rows, self.width))
                else:
                    write_table(file, self._table, map(json.loads, rows))
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.out)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def __enter__(self) -> EmbeddingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.journal.records == 0:  # nothing to go on with
            for path in (self._journal, self._partial, self._skips):
                path.unlink(missing_ok=True)
        for file in (self._rows, self._skipped):
            with suppress(OSError):  # what counts was flushed; what was not is cut off
                file.close()


def _open_alone(path: Path) -> IO[bytes]:
    """Opens a file for this process alone, and makes it if there is none."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file  # else its owner has just finished, and the name is free
        except BlockingIOError:
            file.close()
            raise ValueError(f"another weft embed writes {path} now; wait for it, or write to another file") from None
        except BaseException:
            file.close()
            raise
        file.close()


def _changes(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """The names of what differs, inner ones by their path."""
    changed = []
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name), theirs.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            changed += _changes(one, other, f"{prefix}{name} ")
        elif one != other:
            changed.append(prefix + name)
    return changed
