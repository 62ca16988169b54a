"""Embeddings to a file, row by row, with a journal that lets a job go on after it was killed.

While a job runs, its rows are in `OUT.partial` and its journal is `OUT.journal`. Rows are written first, then the
journal is replaced in one step, so that a kill loses at most rows that no journal counts; these are cut off when the
job goes on. At the end the file gets its header and its name. Records that were skipped are in `OUT.skipped`, a line
of JSON each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from weft.packed.embed.readers import Bad

_HEADER_BYTES = 256  # room for the header, which is known only at the end
_COPY_ROWS = 4096  # rows of a Parquet row group
OUTPUTS = (".npy", ".safetensors", ".parquet")


@dataclass(frozen=True)
class Journal:
    """How far a job has come. `job` says what it is, so that another job is not mistaken for it.

    `records` of the input are done with, skipped ones included; they gave `rows` rows. `skipped_bytes` is the length
    of the list of skipped records.
    """

    job: dict[str, Any]
    records: int = 0
    rows: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_bytes: int = 0

    @classmethod
    def load(cls, path: Path) -> Journal:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the journal {path} is broken: {error}; delete it to start anew") from error


class Writer:
    """Appends rows [n, width] to an output. Use it as a context; `finish` gives the file its name."""

    def __init__(self, out: Path, *, width: int, job: dict[str, Any], resume: bool) -> None:
        if out.suffix not in OUTPUTS:
            raise ValueError(f"got the output {out}, expected a name that ends in {', '.join(OUTPUTS)}")
        self.out, self.width = out, width
        self._partial, self._journal, self._skips = (
            out.with_name(out.name + ending) for ending in (".partial", ".journal", ".skipped")
        )
        self.journal = self._open(job, resume)
        self._rows = open(self._partial, "r+b")  # noqa: SIM115
        self._skipped = open(self._skips, "r+b")  # noqa: SIM115
        self._rows.truncate(self._row_at(self.journal.rows))
        self._skipped.truncate(self.journal.skipped_bytes)
        self._rows.seek(0, os.SEEK_END)
        self._skipped.seek(0, os.SEEK_END)

    def _open(self, job: dict[str, Any], resume: bool) -> Journal:
        if resume and self._journal.exists():
            journal = Journal.load(self._journal)
            if journal.job != job:
                changed = sorted(k for k in {*job, *journal.job} if job.get(k) != journal.job.get(k))
                raise ValueError(
                    f"{self._journal} is of another job: {', '.join(changed)} differ; "
                    f"pass --restart to start anew, or write to another file"
                )
            if self._partial.exists() and self._partial.stat().st_size >= self._row_at(journal.rows):
                self._skips.touch()
                return journal
            raise ValueError(f"{self._partial} has lost rows that {self._journal} counts; pass --restart to start anew")
        self._partial.write_bytes(b"\0" * self._header_bytes)
        self._skips.write_bytes(b"")
        journal = Journal(job)
        self._replace_journal(journal)
        return journal

    @property
    def _header_bytes(self) -> int:
        return 0 if self.out.suffix == ".parquet" else _HEADER_BYTES

    def _row_at(self, row: int) -> int:
        return self._header_bytes + row * self.width * 4

    def append(self, rows: np.ndarray[Any, Any], *, records: int, tokens: int, skipped: Iterable[Bad]) -> None:
        """Adds rows, after which `records` records of the input are done with; then they are safe."""
        assert rows.dtype == np.float32
        assert rows.shape[1:] == (self.width,)
        self._rows.write(np.ascontiguousarray(rows).tobytes())
        self._rows.flush()
        bad = list(skipped)
        for record in bad:
            self._skipped.write(json.dumps(asdict(record)).encode() + b"\n")
        self._skipped.flush()
        done = self.journal
        self.journal = Journal(
            done.job,
            records,
            done.rows + len(rows),
            done.tokens + tokens,
            done.skipped + len(bad),
            self._skipped.tell(),
        )
        self._replace_journal(self.journal)

    def _replace_journal(self, journal: Journal) -> None:
        new = self._journal.with_name(self._journal.name + ".new")
        new.write_text(json.dumps(asdict(journal)), encoding="utf-8")
        os.replace(new, self._journal)

    def finish(self) -> None:
        """Completes the output, gives it its name, and removes the journal."""
        if self.out.suffix == ".parquet":
            self._rows.close()
            self._to_parquet()
        else:
            header = _npy_header if self.out.suffix == ".npy" else _safetensors_header
            self._rows.seek(0)
            self._rows.write(header(self.journal.rows, self.width))
            self._rows.flush()
            os.fsync(self._rows.fileno())
            self._rows.close()
        os.replace(self._partial, self.out)
        self._journal.unlink()
        self._skipped.close()
        if self.journal.skipped == 0:
            self._skips.unlink()

    def _to_parquet(self) -> None:
        pa: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
        schema = pa.schema([("embedding", pa.list_(pa.float32(), self.width))])
        new = self._partial.with_name(self._partial.name + ".new")
        with parquet.ParquetWriter(new, schema) as writer, open(self._partial, "rb") as rows:
            while data := rows.read(_COPY_ROWS * self.width * 4):
                flat = pa.array(np.frombuffer(data, np.float32))
                writer.write_table(pa.table([pa.FixedSizeListArray.from_arrays(flat, self.width)], schema=schema))
        os.replace(new, self._partial)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.close()
        self._skipped.close()


def _npy_header(rows: int, width: int) -> bytes:
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, width)}).encode()
    room = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"


def _safetensors_header(rows: int, width: int) -> bytes:
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}
    text = json.dumps({"embeddings": entry}).encode()
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8)
