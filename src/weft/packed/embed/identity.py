"""What tells one model from another, and one input from another: their content, not their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from weft.packed.embed.readers import Record, Text
from weft.packed.embed.recipe import Recipe

_WEIGHTS = (".safetensors", ".bin")
_CONFIGS = (".json", ".txt", ".model", ".jinja")  # vocabularies and merges are among them
_CHUNK = 1 << 20


def folder_identity(recipe: Recipe) -> dict[str, str]:
    """Hashes of the files that a model is loaded from. Weights are read in full, about a second for each GB."""
    files = [path for folder in recipe.folders for path in sorted(folder.iterdir()) if path.is_file()]
    return {
        "weights": _hash(path for path in files if path.suffix in _WEIGHTS),
        "config": _hash(path for path in files if path.suffix in _CONFIGS),
    }


def _hash(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                content.update(data)
        whole.update(f"{path.name}\0{content.hexdigest()}\0".encode())
    return whole.hexdigest()


def record_identity(record: Record) -> bytes:
    """A hash of a record's text. Bad records are alike: none of them gives a row."""
    return hashlib.sha256(record.text.encode()).digest() if isinstance(record, Text) else b"bad"


class InputIdentity:
    """A hash of the records so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, record: bytes) -> None:
        """The next one, as `record_identity` has it."""
        self._hash.update(record)

    def __str__(self) -> str:
        return self._hash.hexdigest()
