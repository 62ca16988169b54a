"""A progress bar for long transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes, from any thread; it draws a bar on a terminal's stderr if `show`."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("reshard"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("reshard", total=total)
        yield lambda count: bar.advance(task, count)
