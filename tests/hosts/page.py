"""The recipes of docs/hosts.md, by the heading that they stand under."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hosts.md"
_PART = re.compile(r"^#+ ([^\n]+)$|<!-- runs: no: tests/hosts \w+ it -->\n```(\w+)\n(.*?)```", re.DOTALL | re.MULTILINE)


def recipes() -> dict[str, list[str]]:
    """The code of all blocks."""
    found: dict[str, list[str]] = defaultdict(list)
    heading = ""
    for title, _, code in _PART.findall(PAGE.read_text(encoding="utf-8")):
        heading = title or heading
        if code:
            found[heading].append(code)
    return found


def folder_of_a_user(folder: Path) -> Path:
    """A directory with `examples`, as the recipes expect it."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def losses_in(text: str) -> dict[int, float]:
    """The losses that examples/05_train.py has printed, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss +([\d.]+)", text)}


def path_with_this_python() -> dict[str, str]:
    """torchrun and python are those of this environment, as on a node that is set up for the job."""
    import sys

    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
