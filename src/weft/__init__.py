"""weft: model-parallel transformers that neither wait for communication nor compute on padding.

Names load when they are first used, so that `weft --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.errors import PeerLost, PeerMismatch, PeerTimeout
    from weft.kernels import PackedWeight, linear
    from weft.timeline import Timeline
    from weft.tracing import trace

__all__ = ["PackedWeight", "PeerLost", "PeerMismatch", "PeerTimeout", "Timeline", "linear", "trace"]

__version__ = version("weft")

_HOME = {
    "PackedWeight": "weft.kernels",
    "PeerLost": "weft.errors",
    "PeerMismatch": "weft.errors",
    "PeerTimeout": "weft.errors",
    "Timeline": "weft.timeline",
    "linear": "weft.kernels",
    "trace": "weft.tracing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"weft has no {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
