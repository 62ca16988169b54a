"""What lies in safetensors files, found from their headers, and boxes of it, read block by block.

A path is one file, an index (`*.safetensors.index.json`), or a folder with `model.safetensors.index.json`,
`model.safetensors` or a single `*.safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.layout.layout import Box

INDEX_NAME, FILE_NAME = "model.safetensors.index.json", "model.safetensors"
BLOCK_BYTES = 32 << 20
"""What is mapped at once: files are closed after as much, so that pages which were read do not stay resident."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `dtype` as the file spells it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a checkpoint by name, and what is wrong with its files, one line each."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def scan(cls, path: str | Path) -> WeightFiles:
        """Reads the index and the headers, no tensors. What cannot be read is a problem, not an error."""
        found = cls(Path(path))
        try:
            chosen = _choose(found.path)
            if chosen.name.endswith(".json"):
                found._add_index(chosen)
            else:
                found.tensors.update(_header(chosen))
        except _Unreadable as error:
            found.problems.append(str(error))
        return found

    def _add_index(self, index: Path) -> None:
        by_file: dict[str, list[str]] = {}
        for name, file in _weight_map(index).items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            if not _stays_inside(file):
                self.problems.append(f"{index.name} names the file {file!r}, which is outside of its folder")
                continue
            try:
                held = _header(index.parent / file)
            except _Unreadable as error:
                self.problems.append(str(error))
                continue
            self.problems.extend(
                f"{index.name} says that {name} is in {file}, which has no such tensor"
                for name in names
                if name not in held
            )
            self.tensors.update({name: held[name] for name in names if name in held})

    def digest(self) -> str:
        """A text that is the same for the same names, shapes and types."""
        rows = sorted((name, stored.shape, stored.dtype) for name, stored in self.tensors.items())
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def blocks(self, name: str, box: Box) -> Iterator[tuple[slice, Tensor]]:
        """The box of a tensor in runs of its first dim: (where in the box, the block), as the file has it.

        A block is a view of the mapped file: copy it before the next one is asked for, and keep none of it.
        """
        stored = self.tensors[name]
        if not box:
            with _opened(stored.file) as file:
                yield slice(None), file.get_tensor(name).reshape(1)
            return
        (first, end), others = box[0], tuple(slice(a, b) for a, b in box[1:])
        # Whole rows count, as reading some columns maps the pages of all.
        row_bytes = math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize
        rows = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(first, end, rows):
            stop = min(end, start + rows)
            with _opened(stored.file) as file:
                yield slice(start - first, stop - first), file.get_slice(name)[(slice(start, stop), *others)]

    def copy_into(self, out: Tensor, name: str, box: Box) -> None:
        """Copies a box of a tensor into `out`, which has its shape, and its own dtype and device."""
        target = out if box else out.reshape(1)
        for where, block in self.blocks(name, box):
            target[where].copy_(block)


class _Unreadable(Exception):
    """What is wrong with a file, in a sentence."""


def _choose(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise _Unreadable(f"{path} is neither a file nor a folder")
    for name in (INDEX_NAME, FILE_NAME):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise _Unreadable(f"{path} has neither {INDEX_NAME} nor {FILE_NAME}, and {len(found)} other *.safetensors")
    return found[0]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _Unreadable(f"{index.name} cannot be read: {error}") from error
    mapping = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise _Unreadable(f"{index.name} has no weight_map of names to files")
    return mapping


def _stays_inside(file: str) -> bool:
    """Whether the name is of a file below the index. Links are followed: caches of models are made of them.

    >>> [_stays_inside(name) for name in ("a.safetensors", "../a", "/etc/a", "b/../../a", "b/a")]
    [True, False, False, False, True]
    """
    parts = PurePosixPath(file).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in file and "\\" not in file


def _header(file: Path) -> dict[str, Stored]:
    try:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
            return {name: Stored(file, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _Unreadable(f"{file.name} cannot be read: {error or type(error).__name__}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with safe_open(file, framework="pt", device="cpu") as opened:
        yield opened
