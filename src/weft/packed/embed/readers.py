"""Texts from files and pipes, one at a time, so that a file may be larger than memory.

A reader yields a `Text` for each record, and a `Bad` for each that cannot be read, with the number of its line (or of
its row, in Parquet), from 1 on. What follows a bad record is read as usual.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

MAX_LINE_BYTES = 16 * 1024 * 1024
_PARQUET_ROWS = 1024  # read at once


@dataclass(frozen=True)
class Text:
    """One text, the line it started on, and how many bytes of the input were read by then."""

    line: int
    text: str
    bytes_read: int = 0


@dataclass(frozen=True)
class Bad:
    """A record that cannot be read, and why."""

    line: int
    reason: str


Record = Text | Bad
FORMATS = ("txt", "jsonl", "csv", "parquet")


def format_of(path: Path) -> str:
    """The format that a file's name ends in."""
    ending = path.suffix.lower().lstrip(".")
    names = {"txt": "txt", "text": "txt", "jsonl": "jsonl", "ndjson": "jsonl", "csv": "csv", "parquet": "parquet"}
    if ending not in names:
        raise ValueError(f"got the input {path}, expected a name that ends in {', '.join(names)}; or pass --format")
    return names[ending]


def read(stream: IO[bytes], *, kind: str, column: str, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Record]:
    """The records of a binary stream. `column` names the key or column of the text; plain text has none.

    >>> import io
    >>> list(read(io.BytesIO(b'{"text": "a"}\\n{"id": 1}'), kind="jsonl", column="text"))
    [Text(line=1, text='a', bytes_read=14), Bad(line=2, reason="no key 'text'; there are 'id'")]
    """
    if kind == "parquet":
        return _parquet(stream, column)
    lines = _lines(stream, max_line_bytes)
    if kind == "txt":
        return _txt(lines)
    if kind == "jsonl":
        return _jsonl(lines, column)
    if kind == "csv":
        return _csv(lines, column)
    raise ValueError(f"got the format {kind!r}, expected one of {', '.join(FORMATS)}")


@dataclass(frozen=True)
class _Line:
    number: int
    data: bytes | None  # None: too long, and skipped
    bytes_read: int


def _lines(stream: IO[bytes], limit: int) -> Iterator[_Line]:
    """Lines without their ends. At most `limit` bytes of one are ever held."""
    number = read_so_far = 0
    while data := stream.readline(limit + 1):
        number, read_so_far = number + 1, read_so_far + len(data)
        if len(data) <= limit or data.endswith(b"\n"):
            yield _Line(number, data.rstrip(b"\r\n"), read_so_far)
            continue
        while (rest := stream.readline(limit)) and not rest.endswith(b"\n"):
            read_so_far += len(rest)
        read_so_far += len(rest)
        yield _Line(number, None, read_so_far)


def _decode(line: _Line) -> str | Bad:
    if line.data is None:
        return Bad(line.number, "the line is too long")
    try:
        return line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return Bad(line.number, f"no UTF-8: byte {error.start + 1} of the line is 0x{line.data[error.start]:02x}")


def _txt(lines: Iterable[_Line]) -> Iterator[Record]:
    for line in lines:
        text = _decode(line)
        yield text if isinstance(text, Bad) else Text(line.number, text, line.bytes_read)


def _jsonl(lines: Iterable[_Line], column: str) -> Iterator[Record]:
    for line in lines:
        text = _decode(line)
        if isinstance(text, Bad):
            yield text
        elif text.strip():  # a blank line is no record
            yield _json_record(line, text, column)


def _json_record(line: _Line, text: str, column: str) -> Record:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Bad(line.number, f"no JSON: {error}")
    if isinstance(value, dict):
        if column not in value:
            return Bad(line.number, f"no key {column!r}; there are {', '.join(map(repr, list(value)[:8])) or 'none'}")
        value = value[column]
    return _text(line.number, value, line.bytes_read)


def _text(number: int, value: Any, bytes_read: int) -> Record:
    if not isinstance(value, str):
        return Bad(number, f"the text is {type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        return Bad(number, "the text holds half of a surrogate pair")
    return Text(number, value, bytes_read)


def _csv(lines: Iterable[_Line], column: str) -> Iterator[Record]:
    source = _CsvLines(lines)
    rows = csv.reader(source, strict=True)
    header: list[str] | None = None
    while True:
        source.first, row, failure = 0, None, ""
        try:
            row = next(rows, None)
        except csv.Error as error:
            failure = str(error)
        bad, source.bad = source.bad, []
        yield from bad
        if failure:
            yield Bad(source.first, f"no CSV: {failure}")
        elif row is None:
            return
        elif header is None:
            header = row
            if column not in header:
                raise ValueError(f"the input has no column {column!r}; there are {', '.join(map(repr, header))}")
        elif row:  # a blank line is no record
            yield _csv_record(row, header, column, source)


def _csv_record(row: list[str], header: list[str], column: str, source: _CsvLines) -> Record:
    if len(row) != len(header):
        return Bad(source.first, f"{len(row)} fields, expected {len(header)} as in the header")
    return _text(source.first, row[header.index(column)], source.bytes_read)


class _CsvLines:
    """Feeds lines to csv.reader, leaves out those that are no UTF-8, and remembers where it is."""

    def __init__(self, lines: Iterable[_Line]) -> None:
        self._lines = iter(lines)
        self.bytes_read = 0
        self.first = 0  # the line on which the record began; 0 before its first line
        self.bad: list[Bad] = []

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        for line in self._lines:
            self.bytes_read = line.bytes_read
            text = _decode(line)
            if isinstance(text, str):
                self.first = self.first or line.number
                return text + "\n"
            self.bad.append(text)
        raise StopIteration


def _parquet(stream: IO[bytes], column: str) -> Iterator[Record]:
    try:
        arrow: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow; pip install pyarrow") from error
    broken: type[Exception] = import_module("pyarrow").ArrowException
    try:
        file = arrow.ParquetFile(stream, pre_buffer=False)  # which would hold all that was ever read
    except (broken, OSError) as error:
        raise ValueError(f"the input is no Parquet file: {error}") from error
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"the input has no column {column!r}; there are {', '.join(map(repr, names))}")
    number = 0
    try:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=[column]):
                for value in batch.column(0):
                    number += 1
                    yield _parquet_value(number, value)
    except (broken, OSError) as error:
        raise ValueError(f"the Parquet file is broken after row {number}: {error}") from error


def _parquet_value(number: int, value: Any) -> Record:
    try:
        return _text(number, value.as_py(), 0)
    except UnicodeDecodeError:
        return Bad(number, "no UTF-8")
