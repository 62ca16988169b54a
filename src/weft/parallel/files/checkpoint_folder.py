"""A directory of checkpoints: which are whole, which is the newest, and how one becomes part of it at once."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ABOUT = "weft.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LATEST = "latest"


@dataclass(frozen=True)
class Folder:
    """`root` holds checkpoints `step-00000020`, `step-00000020.1` where that was saved again, and `latest`."""

    root: Path

    def whole(self) -> list[Path]:
        """The checkpoints, oldest first. Each is whole: it got its name after it was written."""
        found = {path: key for path in self.root.glob("step-*") if (key := _key(path))}
        return sorted(found, key=found.__getitem__)

    def begin(self, step: int) -> Path:
        """An empty place to write to; what writers left that died is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in self.root.glob(".step-*.part"):
            shutil.rmtree(stale)
        part = self.part(step)
        part.mkdir()
        return part

    def part(self, step: int) -> Path:
        """Where a checkpoint is written to."""
        return self.root / f".step-{step:08d}.part"

    def publish(self, step: int, about: str, *, keep: int) -> Path:
        """Gives what was written its name, points to it, and removes older ones until `keep` are left."""
        part, final = self.part(step), self.root / f"step-{step:08d}"
        again = 0
        while final.exists():  # of a run that was resumed before this step; it stays until the new one is there
            again += 1
            final = self.root / f"step-{step:08d}.{again}"
        write_through(part / ABOUT, about)
        force(part)
        part.rename(final)
        force(self.root)
        pointer = self.root / f".{_LATEST}.part"
        write_through(pointer, final.name)
        pointer.replace(self.root / _LATEST)
        force(self.root)
        whole = self.whole()
        for old in whole[: max(0, whole.index(final) - keep + 1)]:
            shutil.rmtree(old)
        return final

    def find(self, step: int | None) -> Path:
        """The checkpoint of a step; the newest unless told. Raises OSError where there is none."""
        whole = self.whole()
        if step is not None:
            found = [path for path in whole if (_key(path) or (-1,))[0] == step]
            if not found:
                names = ", ".join(path.name for path in whole) or "none"
                raise FileNotFoundError(f"there is no checkpoint of step {step}; there are: {names}")
            return found[-1]
        if not whole:
            raise FileNotFoundError("there is no checkpoint; expected directories named step-*")
        # A kill between the two renames leaves the pointer one behind, or none: what it names, and the newest
        # without it, are whole all the same.
        pointer = self.root / _LATEST
        named = self.root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        return named if named in whole else whole[-1]


def write_through(file: Path, text: str) -> None:
    """Writes a file and forces it to the disk."""
    with file.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def force(directory: Path) -> None:
    """Forces a directory's names to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _key(path: Path) -> tuple[int, int] | None:
    """(step, how often it was saved again), by which checkpoints are ordered.

    >>> _key(Path("runs/step-00000020.1")), _key(Path("runs/step-x"))
    ((20, 1), None)
    """
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 0)) if found else None
