"""Parts of a job, computed by several processes or machines, and how they become one output.

Part i of n takes every n-th text, from text i on. All parts read the whole input, so that each knows what the others
know: how many texts there are and what they say. Text k is row k // n of its part; so parts are dealt out again as
cards are, in one pass, and give the bytes of the job that was never cut.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from weft.jobs.texts.formats import (
    BLOCK_ROWS,
    LINES,
    OUTPUTS,
    RowTable,
    header,
    header_bytes,
    read_table,
    read_vectors,
    vectors_in,
    write_table,
    write_vectors,
)

PART = ".shard"  # the ending of the file beside a part
SHARD = "shard"  # what a part's job says of it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count`, from 1 on.

    >>> Shard.parse("2/4"), [k for k in range(9) if Shard.parse("2/4").takes(k)]
    (Shard(number=2, count=4), [1, 5])
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        parts = text.split("/")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"got the shard {text!r}, expected a number and a count such as 1/4")
        shard = cls(int(parts[0]), int(parts[1]))
        if not 1 <= shard.number <= shard.count:
            raise ValueError(f"got the shard {text}, expected 1/{parts[1]} to {parts[1]}/{parts[1]}")
        return shard

    def takes(self, text: int) -> bool:
        """Whether text number `text`, from 0 on, is in this part."""
        return text % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class JobPart:
    """What is known of a finished part: the job, the records of the whole input with their hash, and its own rows."""

    job: dict[str, Any]
    records: int
    rows: int
    skipped: int
    identity: str
    table: RowTable | None = None

    @property
    def shard(self) -> Shard:
        return Shard.parse(self.job[SHARD])

    @property
    def whole(self) -> dict[str, Any]:
        """What all parts of a job have in common."""
        job = {name: value for name, value in self.job.items() if name != SHARD}
        read = {"records": self.records, "skipped records": self.skipped, "input": self.identity}
        return {**job, **read, "parts": self.shard.count}

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, path: Path) -> JobPart:
        """What is beside a part."""
        beside = path.with_name(path.name + PART)
        if not path.exists():
            raise ValueError(f"got the part {path}, which is not there")
        if not beside.exists():
            raise ValueError(f"{path} has no {beside.name} beside it: it is no part of a job, or it was moved alone")
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
            table = found.pop("table")
            if table is not None:
                table = RowTable(tuple((name, kind) for name, kind in table["columns"]), table["about"])
            part = cls(**found, table=table)
            part.shard  # noqa: B018  # raises where there is none
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{beside} is broken: {error}; compute that part again") from error
        return part


def merge(out: Path, parts: Sequence[Path]) -> int:
    """Puts the parts of a job together, in any order, and returns the rows of `out`: the same file, byte by byte, that
    the job writes when it is not cut. Parts stay as they are."""
    if out.suffix not in OUTPUTS:
        raise ValueError(f"got the output {out}, expected a name that ends in {', '.join(OUTPUTS)}")
    ordered = _checked(out, parts)
    first = ordered[0][1]
    rows, width = sum(part.rows for _, part in ordered), int(first.job["width"])
    new = out.with_name(out.name + ".new")
    try:
        with open(new, "wb") as file, ExitStack() as stack:
            if out.suffix == LINES:
                opened = [stack.enter_context(path.open("rb")) for path, _ in ordered]
                file.writelines(_dealt(opened, rows))
            elif first.table is not None:
                write_table(file, first.table, _dealt([read_table(path) for path, _ in ordered], rows))
            else:
                blocks = _vectors(stack, [path for path, _ in ordered], width)
                _write_vectors(file, out.suffix, rows, width, _blocks(blocks, rows, width))
            file.flush()
            os.fsync(file.fileno())
        for ending in (".skipped", PART):  # of an earlier job
            out.with_name(out.name + ending).unlink(missing_ok=True)
        if first.skipped:
            path = ordered[0][0]
            shutil.copyfile(path.with_name(path.name + ".skipped"), out.with_name(out.name + ".skipped"))
        os.replace(new, out)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return rows


def _checked(out: Path, parts: Sequence[Path]) -> list[tuple[Path, JobPart]]:
    """The parts in their order. Raises unless all of one job are there, once each, and whole."""
    found = [(path, JobPart.of(path)) for path in parts]
    if not found:
        raise ValueError("got no parts, expected all of one job")
    for path, part in found:
        if path.suffix != out.suffix:
            raise ValueError(f"got the part {path} for {out}, expected a name that ends in {out.suffix}")
        if path.absolute() == out.absolute():
            raise ValueError(f"got {out} as a part and as the output; write to another file")
        differ = sorted(n for n, value in part.whole.items() if found[0][1].whole.get(n) != value)
        if differ:
            raise ValueError(f"{path} and {found[0][0]} are parts of different jobs: {', '.join(differ)} differ")
    by_number = {part.shard.number: (path, part) for path, part in found}
    count = found[0][1].shard.count
    missing = [f"{number}/{count}" for number in range(1, count + 1) if number not in by_number]
    if missing or len(found) != count:
        twice = sorted(f"{n}/{count}" for n in by_number if sum(p.shard.number == n for _, p in found) > 1)
        said = [f"{', '.join(missing)} missing"] * bool(missing) + [f"{', '.join(twice)} twice"] * bool(twice)
        raise ValueError(f"got {len(found)} of {count} parts: {'; '.join(said)}; expected each once")
    ordered = [by_number[number] for number in range(1, count + 1)]
    total = sum(part.rows for _, part in ordered)
    for path, part in ordered:
        if part.rows != len(range(part.shard.number - 1, total, count)):
            raise ValueError(f"{path} has {part.rows} of {total} rows, which is not its share; compute it again")
        size = header_bytes(path.suffix) + part.rows * int(part.job["width"]) * 4
        if header_bytes(path.suffix) and path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {size}; compute it again")
    return ordered


def _dealt(sources: Sequence[Iterable[_T]], rows: int) -> Iterator[_T]:
    """One of each in turn, `rows` in all. Raises where a source has less, or more."""
    turns = [iter(source) for source in sources]
    for k in range(rows):
        found = next(turns[k % len(turns)], None)
        if found is None:
            raise ValueError(f"part {k % len(turns) + 1} ends before row {k // len(turns)}; compute it again")
        yield found
    if any(next(turn, None) is not None for turn in turns):
        raise ValueError("a part has more rows than was said of it; compute it again")


def _vectors(stack: ExitStack, paths: Sequence[Path], width: int) -> list[Iterator[np.ndarray[Any, Any]]]:
    """Each part's rows, a few thousand at a time."""
    if paths[0].suffix == ".parquet":
        return [read_vectors(path, width) for path in paths]
    opened = [stack.enter_context(path.open("rb")) for path in paths]
    for file in opened:
        file.seek(header_bytes(paths[0].suffix))
    return [vectors_in(file, width) for file in opened]


def _blocks(
    parts: Sequence[Iterator[np.ndarray[Any, Any]]], rows: int, width: int
) -> Iterator[np.ndarray[Any, Any]]:  # fmt: skip
    """All rows in the order of the input, in blocks as `write_vectors` takes them."""
    singles = _dealt([chain.from_iterable(part) for part in parts], rows)
    while block := list(islice(singles, BLOCK_ROWS)):
        yield np.stack(block).reshape(-1, width)


def _write_vectors(
    file: IO[bytes], suffix: str, rows: int, width: int, blocks: Iterable[np.ndarray[Any, Any]]
) -> None:  # fmt: skip
    if suffix == ".parquet":
        write_vectors(file, width, blocks)
        return
    file.write(header(suffix, rows, width))
    for block in blocks:
        file.write(block.tobytes())
