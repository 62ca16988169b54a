"""Writes whole tensors, one after the other, into safetensors files whose headers are known before."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from weft.parallel.files.weight_files import DTYPES, FILE_NAME, INDEX_NAME


@dataclass(frozen=True)
class Entry:
    """A whole tensor to be written; `home` is the first rank of the mesh that gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    home: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Writer:
    """Writes tensors, in the order of the entries, into files of about equal size. Errors are kept for the end."""

    def __init__(self, folder: Path, entries: list[Entry], max_file_bytes: int) -> None:
        self._folder = folder
        self._files = _cut(entries, max_file_bytes)
        self._places = {e.name: number for number, file in enumerate(self._files) for e in file}
        self._left = [len(file) for file in self._files]
        self._open: dict[int, BinaryIO] = {}
        self._problem: OSError | None = None

    def write(self, tensors: dict[str, Tensor]) -> None:
        """The next tensors. After an error nothing more is written, while the ranks go on to the end together."""
        for name, tensor in tensors.items():
            if self._problem is None:
                try:
                    self._write(name, tensor)
                except OSError as error:
                    self._problem = error

    def finish(self, model: nn.Module) -> list[str]:
        """Puts the files under their names; what went wrong."""
        try:
            if self._problem is None:
                self._publish(model)
        except OSError as error:
            self._problem = error
        for file in self._open.values():
            file.close()
        with suppress(OSError):
            for number in range(len(self._files)):
                self._partial(number).unlink(missing_ok=True)
        return [] if self._problem is None else [f"{type(self._problem).__name__}: {self._problem}"]

    def _write(self, name: str, tensor: Tensor) -> None:
        number = self._places[name]
        if number not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[number] = self._partial(number).open("wb")
            self._open[number].write(_header(self._files[number]))
        data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._open[number].write(memoryview(data))
        self._left[number] -= 1
        if self._left[number] == 0:
            file = self._open.pop(number)
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _publish(self, model: nn.Module) -> None:
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(self._folder)
        for number in range(len(self._files)):
            self._partial(number).replace(self._folder / self._name(number))
        if len(self._files) > 1:
            total = sum(e.nbytes for file in self._files for e in file)
            names = {name: self._name(number) for name, number in self._places.items()}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True)
            (self._folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")

    def _name(self, number: int) -> str:
        count = len(self._files)
        return FILE_NAME if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _partial(self, number: int) -> Path:
        return self._folder / f".{self._name(number)}.partial"


def _cut(entries: list[Entry], most: int) -> list[list[Entry]]:
    """The entries of each file: as many as fit, at least one."""
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > most:
            files.append([])
        files[-1].append(entry)
    return files


def _header(entries: list[Entry]) -> bytes:
    """The head of a safetensors file: its length as 8 bytes, then JSON, padded so that data start at a multiple of 8.

    >>> _header([Entry("a", (2,), "F32", 0)])[8:]
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for e in entries:
        described[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [start, start + e.nbytes]}
        start += e.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
