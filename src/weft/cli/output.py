"""What commands share: output files, checked before the work and announced after it; the terminal; `HOSTSxDEVICES`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """Standard output; a table that goes to a file or a pipe is not squeezed into 80 columns."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)


def check_writable(*files: Path | None) -> None:
    """Raises where a file cannot be written; None is no file. Called before the work is done, not after it."""
    for file in files:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ValueError(f"got the output file {file}, but {folder} is not a directory; create it first")
        if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
            raise ValueError(f"got the output file {file}, which cannot be written; choose another place")


def write(file: Path, text: str) -> None:
    """Writes a file, and says so."""
    file.write_text(text, encoding="utf-8")
    announce(file)


def announce(file: Path) -> None:
    """Says that a file was written."""
    typer.echo(f"wrote {file}", err=True)


def parse_grid(text: str) -> tuple[int, int] | None:
    """Hosts and devices of each; None where the text is something else.

    >>> parse_grid("16x8"), parse_grid("16"), parse_grid("0x8")
    ((16, 8), None, None)
    """
    hosts, _, devices = text.partition("x")
    if not (hosts.isdigit() and devices.isdigit() and int(hosts) and int(devices)):
        return None
    return int(hosts), int(devices)
