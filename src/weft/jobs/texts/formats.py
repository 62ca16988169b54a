"""The bytes of outputs: arrays with a header of one size, lines of JSON, and Parquet. A file's bytes depend on its rows
alone, so that parts of a job give the same file when they are put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from typing import IO, Any

import numpy as np

HEADER_BYTES = 256  # room for the header, which is known only at the end
BLOCK_ROWS = 4096  # rows of a Parquet row group
LINES = ".jsonl"
OUTPUTS = (".npy", ".safetensors", ".parquet", LINES)

# [n, width] float32, or what each text has, by name, where rows are not all of one length
Rows = np.ndarray[Any, Any] | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RowTable:
    """The columns of rows that are no vectors, by Arrow's names of types, and what a Parquet file says of them."""

    columns: tuple[tuple[str, str], ...]
    about: dict[str, str] = field(default_factory=dict)

    def schema(self) -> Any:
        """As pyarrow has it."""
        pa: Any = import_module("pyarrow")
        kinds = {
            "string": pa.string(),
            "float": pa.float32(),
            "floats": pa.list_(pa.float32()),
            "ints": pa.list_(pa.int64()),
        }
        return pa.schema([(name, kinds[kind]) for name, kind in self.columns], metadata=self.about)  # fmt: skip


def header_bytes(suffix: str) -> int:
    """How long the header of such a file is."""
    return 0 if suffix in (".parquet", LINES) else HEADER_BYTES


def header(suffix: str, rows: int, width: int) -> bytes:
    """What an array in a .npy or .safetensors file begins with."""
    if suffix == ".npy":
        text = repr({"descr": "<f4", "fortran_order": False, "shape": (rows, width)}).encode()
        room = HEADER_BYTES - 10
        return b"\x93NUMPY\x01\x00" + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}
    text = json.dumps({"embeddings": entry}).encode()
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def packed(rows: Rows, width: int) -> bytes:
    """Vectors end to end."""
    assert isinstance(rows, np.ndarray)
    assert rows.dtype == np.float32
    assert rows.shape[1:] == (width,)
    return np.ascontiguousarray(rows).tobytes()


def lines(rows: Rows, before: int) -> bytes:
    """A line of JSON for each row, of which `before` are written already. A float32 is a double without loss."""
    found = []
    for i, row in enumerate(rows):
        named = {"vector": row} if isinstance(row, np.ndarray) else row
        plain = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in named.items()}
        try:
            text = json.dumps(plain, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"the embedding of text {before + i} has values that are not finite, for which JSON has no word; "
                f"look for them in the model's weights, or try --dtype float32; what is done is kept"
            ) from error
        found.append(text.encode() + b"\n")
    return b"".join(found)


def vectors_in(file: IO[bytes], width: int) -> Iterator[np.ndarray[Any, Any]]:
    """[n, width] a few thousand rows at a time, from where the file is at."""
    while data := file.read(BLOCK_ROWS * width * 4):
        yield np.frombuffer(data, np.float32).reshape(-1, width)


def write_vectors(file: IO[bytes], width: int, blocks: Iterable[np.ndarray[Any, Any]]) -> None:
    """A Parquet file with the column `embedding`. All blocks but the last have `BLOCK_ROWS` rows."""
    pa, parquet = arrow()
    schema = pa.schema([("embedding", pa.list_(pa.float32(), width))])
    with parquet.ParquetWriter(file, schema) as writer:
        for block in blocks:
            flat = pa.array(np.ascontiguousarray(block).reshape(-1))
            writer.write_table(pa.table([pa.FixedSizeListArray.from_arrays(flat, width)], schema=schema))


def write_table(file: IO[bytes], table: RowTable, rows: Iterable[dict[str, Any]]) -> None:
    """A Parquet file with the columns of a table."""
    pa, parquet = arrow()
    schema, source = table.schema(), iter(rows)
    with parquet.ParquetWriter(file, schema) as writer:
        while block := list(islice(source, BLOCK_ROWS)):
            writer.write_table(pa.Table.from_pylist(block, schema=schema))


def read_vectors(path: Any, width: int) -> Iterator[np.ndarray[Any, Any]]:
    """[n, width] of a Parquet file that `write_vectors` wrote."""
    _, parquet = arrow()
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=BLOCK_ROWS):
        yield batch.column(0).flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def read_table(path: Any) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file that `write_table` wrote."""
    _, parquet = arrow()
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=BLOCK_ROWS):
        yield from batch.to_pylist()


def arrow() -> tuple[Any, Any]:
    """pyarrow, and its part for Parquet."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow; pip install pyarrow") from error
