"""How the lab starts a Python of its own."""

from __future__ import annotations

import os
import sys


def python(statements: str, *labels: str) -> list[str]:
    """The command that runs `statements` in a new interpreter, which finds modules where this one does.

    `labels` show in the process list and mean nothing else.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {statements}", *labels]
