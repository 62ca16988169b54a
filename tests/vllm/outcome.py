"""What a process with vLLM did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a process answered, and all that it wrote."""

    answer: dict[str, Any]
    log: str

    @property
    def said(self) -> list[str]:
        """The lines of the plugin."""
        return re.findall(r"weft: (.*)", self.log)
