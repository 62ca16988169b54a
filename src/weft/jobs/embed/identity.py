"""What makes a model this one and no other: hashes of the files in its folder."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

_WEIGHTS = (".safetensors", ".bin")
_CONFIGS = (".json", ".txt", ".model", ".jinja")  # vocabularies and merges are among them
_PAGES = (".md", ".png", ".jpg", ".jpeg", ".svg", ".gif")
_ELSEWHERE = ("onnx", "openvino")
_CHUNK = 1 << 20
_ResultT = TypeVar("_ResultT")


class Beside(Generic[_ResultT]):
    """What a function gives, computed by a thread of its own: weights are hashed while they are loaded, packed and
    first computed with, since hashing lets other threads run."""

    def __init__(self, function: Callable[[], _ResultT]) -> None:
        self._function = function
        self._results: list[_ResultT] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weft-beside", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> _ResultT:
        """Waits for it; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


def identity_of(folders: Iterable[Path]) -> dict[str, str]:
    """Hashes of the weights in some folders, and of what is beside them. Weights are read in full, about a second for
    each GB."""
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return {
        "weights": _hash(path for path in files if path.suffix in _WEIGHTS),
        "config": _hash(path for path in files if path.suffix in _CONFIGS),
    }


def identity_of_all(folder: Path) -> dict[str, str]:
    """As `identity_of`, of a folder of which any file may belong to a module: all but pages, hidden files and what
    other programs compute with."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in _PAGES]
    files = [p for p in files if not any(part.startswith((".", *_ELSEWHERE)) for part in p.relative_to(folder).parts)]
    return {
        "weights": _hash((path for path in files if path.suffix in _WEIGHTS), folder),
        "config": _hash((path for path in files if path.suffix not in _WEIGHTS), folder),
    }


def _hash(files: Iterable[Path], inside: Path | None = None) -> str:
    whole = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                content.update(data)
        name = path.name if inside is None else path.relative_to(inside)
        whole.update(f"{name}\0{content.hexdigest()}\0".encode())
    return whole.hexdigest()
