"""Texts from files and pipes, one at a time, so that a file may be larger than memory.

A reader yields a `TextRecord` for each text, and a `BadRecord` for each record that cannot be read, with the number of
its line (or of its row, in Parquet), from 1 on. What follows a bad record is read as usual.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

MAX_LINE_BYTES = 16 * 1024 * 1024
_PARQUET_ROWS = 1024  # read at once


@dataclass(frozen=True)
class TextRecord:
    """One text, the line it started on, and how many bytes of the input were read by then.

    `beside` are the texts that it is compared with.
    """

    line: int
    text: str
    bytes_read: int = 0
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read, and why."""

    line: int
    reason: str


Record = TextRecord | BadRecord


@dataclass(frozen=True)
class RecordShape:
    """Which columns of a record are read: `text`, and `beside` where texts are compared with others, one or, with
    `lists`, a list. A `query` stands for the first column in every record."""

    text: str = "text"
    beside: str | None = None
    query: str | None = None
    lists: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, in order. The last is what a line of plain text is, or JSON that is no object."""
        given = (None if self.query is not None else self.text, self.beside)
        return tuple(name for name in given if name is not None)

    def record(self, line: int, values: Sequence[Any], bytes_read: int) -> Record:
        """Of what the columns hold."""
        first = values[0] if self.query is None else self.query
        reason = _fault("the query" if self.lists else "the text", first)
        others: list[Any] = []
        if self.beside is not None:
            is_list = self.lists and isinstance(values[-1], list)
            others = values[-1] if is_list else [values[-1]]
            names = [f"document {i}" if is_list else f"{self.beside!r}" for i in range(len(others))]
            for name, one in zip(names, others, strict=True):
                reason = reason or _fault(name, one)
        return TextRecord(line, first, bytes_read, tuple(others)) if reason is None else BadRecord(line, reason)


def _fault(what: str, value: Any) -> str | None:
    """Why a value is no text."""
    if not isinstance(value, str):
        return f"{what} is {type(value).__name__}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{what} holds half of a surrogate pair"
    return None


FORMATS = ("txt", "jsonl", "csv", "parquet")


def format_of(path: Path) -> str:
    """The format that a file's name ends in."""
    ending = path.suffix.lower().lstrip(".")
    names = {"txt": "txt", "text": "txt", "jsonl": "jsonl", "ndjson": "jsonl", "csv": "csv", "parquet": "parquet"}
    if ending not in names:
        raise ValueError(f"got the input {path}, expected a name that ends in {', '.join(names)}; or pass --format")
    return names[ending]


def read(
    stream: IO[bytes], *, kind: str, column: str | RecordShape, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Record]:  # fmt: skip
    """The records of a binary stream. `column` names the key or column of the text, or several; plain text has none.

    >>> import io
    >>> good, bad = read(io.BytesIO(b'{"text": "a"}\\n{"id": 1}'), kind="jsonl", column="text")
    >>> good.text, bad
    ('a', BadRecord(line=2, reason="no key 'text'; there are 'id'"))
    """
    shape = RecordShape(column) if isinstance(column, str) else column
    if kind == "parquet":
        return _parquet(stream, shape)
    lines = _lines(stream, max_line_bytes)
    if kind == "txt":
        if len(shape.columns) > 1:
            raise ValueError("plain text has one text a line and no columns; pass --query, or another format")
        return _txt(lines, shape)
    if kind == "jsonl":
        return _jsonl(lines, shape)
    if kind == "csv":
        return _csv(lines, shape, max_line_bytes)
    raise ValueError(f"got the format {kind!r}, expected one of {', '.join(FORMATS)}")


@dataclass(frozen=True)
class _Line:
    number: int
    data: bytes | None  # with its end; None: too long, and skipped
    bytes_read: int
    quotes: int = 0  # in a line that was skipped


def _lines(stream: IO[bytes], limit: int) -> Iterator[_Line]:
    """Lines with their ends. At most `limit` bytes of one are ever held."""
    number = read_so_far = 0
    while data := stream.readline(limit + 1):
        number, read_so_far = number + 1, read_so_far + len(data)
        if len(data) <= limit or data.endswith(b"\n"):
            yield _Line(number, data, read_so_far)
            continue
        quotes = data.count(b'"')
        while not data.endswith(b"\n") and (data := stream.readline(limit)):
            read_so_far += len(data)
            quotes += data.count(b'"')
        yield _Line(number, None, read_so_far, quotes)


def _decode(line: _Line) -> str | BadRecord:
    if line.data is None:
        return BadRecord(line.number, "the line is too long")
    try:
        return line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = line.data[error.start]
        return BadRecord(line.number, f"not UTF-8: byte {error.start + 1} of the line is 0x{byte:02x}")


def _txt(lines: Iterable[_Line], shape: RecordShape) -> Iterator[Record]:
    for line in lines:
        text = _decode(line)
        if isinstance(text, BadRecord):
            yield text
        else:
            yield shape.record(line.number, [text.removesuffix("\n").removesuffix("\r")], line.bytes_read)


def _jsonl(lines: Iterable[_Line], shape: RecordShape) -> Iterator[Record]:
    for line in lines:
        text = _decode(line)
        if isinstance(text, BadRecord):
            yield text
        elif text.strip():  # a blank line is no record
            yield _json_record(line, text.rstrip("\r\n"), shape)


def _json_record(line: _Line, text: str, shape: RecordShape) -> Record:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRecord(line.number, f"not JSON: {error}")
    if not isinstance(value, dict):
        if len(shape.columns) > 1:
            return BadRecord(line.number, f"{type(value).__name__}, expected an object with {_named(shape.columns)}")
        return shape.record(line.number, [value], line.bytes_read)
    for column in shape.columns:
        if column not in value:
            return BadRecord(line.number, f"no key {column!r}; there are {_named(list(value)[:8]) or 'none'}")
    return shape.record(line.number, [value[column] for column in shape.columns], line.bytes_read)


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _csv(lines: Iterable[_Line], shape: RecordShape, limit: int) -> Iterator[Record]:
    source = _CsvLines(lines)
    rows = csv.reader(source, strict=True)
    header: list[str] | None = None
    while True:
        source.begin()
        row, failure = _next_row(rows, limit)
        if "field limit" in failure:
            raise ValueError(
                f"a quote is opened on line {source.first} of the input and not closed within {limit} bytes"
            )
        bad = source.bad or (BadRecord(source.first, f"no CSV: {failure}{source.extent}") if failure else None)
        if header is None and bad is not None:
            raise ValueError(f"the header of the input cannot be read: {bad.reason}")
        if bad is not None:
            yield bad
        elif row is None:
            return
        elif header is None:
            header = row
            for column in shape.columns:
                _check_column(column, header)
        elif row:  # a blank line is no record
            yield _csv_record(row, header, shape, source)


def _next_row(rows: Iterator[list[str]], limit: int) -> tuple[list[str] | None, str]:
    """The next row, None at the end; or what is wrong with it. The module's own limit is lower, and global."""
    before = csv.field_size_limit(limit)
    try:
        return next(rows, None), ""
    except csv.Error as error:
        return None, str(error)
    finally:
        csv.field_size_limit(before)


def _check_column(column: str, names: list[str]) -> None:
    if column not in names:
        raise ValueError(f"the input has no column {column!r}; there are {', '.join(map(repr, names)) or 'none'}")
    if names.count(column) > 1:
        raise ValueError(f"the input has {names.count(column)} columns {column!r}; rename all but one")


def _csv_record(row: list[str], header: list[str], shape: RecordShape, source: _CsvLines) -> Record:
    if len(row) != len(header):
        return BadRecord(source.first, f"{len(row)} fields, expected {len(header)} as in the header{source.extent}")
    return shape.record(source.first, [row[header.index(name)] for name in shape.columns], source.bytes_read)


class _CsvLines:
    """Feeds lines to csv.reader, and remembers where it is.

    A line that cannot be read makes its whole record bad. The reader gets something in its place that opens and closes
    the same quotes, so that it finds the end of the record.
    """

    def __init__(self, lines: Iterable[_Line]) -> None:
        self._lines = iter(lines)
        self.bytes_read = 0
        self._last = 0
        self.begin()

    def begin(self) -> None:
        """The next line begins a record."""
        self.first = 0  # the line on which the record began; 0 before its first line
        self.bad: BadRecord | None = None

    @property
    def extent(self) -> str:
        """For messages: how far the record goes."""
        return "" if self._last == self.first else f", on lines {self.first} to {self._last}"

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.bytes_read, self._last = line.bytes_read, line.number
        self.first = self.first or line.number
        text = _decode(line)
        if isinstance(text, str):
            return text
        self.bad = self.bad or BadRecord(self.first, text.reason)
        return '"' * (line.quotes % 2) + "\n" if line.data is None else line.data.decode(errors="replace")


def _parquet(stream: IO[bytes], shape: RecordShape) -> Iterator[Record]:
    try:
        arrow: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow; pip install pyarrow") from error
    if not stream.seekable():
        raise ValueError(
            "Parquet cannot be read from a pipe: its table of contents is at its end; give the file's name"
        )
    # UnicodeDecodeError: the names of columns are bytes of the file, too.
    broken = (import_module("pyarrow").ArrowException, OSError, UnicodeDecodeError)
    try:
        file = arrow.ParquetFile(stream, pre_buffer=False)  # which would hold all that was ever read
        names = file.schema_arrow.names
    except broken as error:
        raise ValueError(f"the input is not a Parquet file: {error}") from error
    for column in shape.columns:
        _check_column(column, names)
    # A name with a dot would be taken for a path into a struct: such a table is read as a whole.
    columns = None if any("." in column for column in shape.columns) else list(dict.fromkeys(shape.columns))
    number = 0
    try:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=columns):
                at = [batch.schema.names.index(column) for column in shape.columns]
                for values in zip(*(batch.column(i) for i in at), strict=True):
                    number += 1
                    yield _parquet_record(number, values, shape)
    except broken as error:
        raise ValueError(f"the Parquet file is broken after row {number}: {error}") from error


def _parquet_record(number: int, values: Sequence[Any], shape: RecordShape) -> Record:
    try:
        return shape.record(number, [value.as_py() for value in values], 0)
    except UnicodeDecodeError:
        return BadRecord(number, "not UTF-8")
