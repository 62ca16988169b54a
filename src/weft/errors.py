"""The few errors that weft names; everything else is a `ValueError` that says got, expected and the remedy."""

from __future__ import annotations

LONGEST_SECONDS = 1e6
"""The longest deadline that may be asked for, eleven days: every layer below can count that far."""


class WeftError(RuntimeError):
    """The base of all named errors, so that one `except` catches them."""


class PeerTimeout(WeftError, TimeoutError):
    """A wait for another rank or thread ran past its deadline.

    >>> raise PeerTimeout("group 3 of matmul_reduce_scatter from rank 1", seconds=30.0)
    Traceback (most recent call last):
    ...
    weft.errors.PeerTimeout: waited 30 s for group 3 of matmul_reduce_scatter from rank 1
    """

    def __init__(self, what: str, *, seconds: float) -> None:
        super().__init__(f"waited {seconds:g} s for {what}")
        self.what = what
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        return (_peer_timeout, (self.what, self.seconds))


def _peer_timeout(what: str, seconds: float) -> PeerTimeout:
    return PeerTimeout(what, seconds=seconds)


class PeerLost(WeftError):
    """The connection to another rank is closed: it died, or gave up first; the message names it and the wait."""


class PeerMismatch(WeftError):
    """Ranks were about to do different things; the message names both sides. No byte has moved."""


class ModelChanged(WeftError):
    """The model has changed while a request was under way, whose tokens so far are those of the old one; ask again."""


class WindowUnavailable(WeftError):
    """Ranks of one host cannot share memory; the message names the rank, the reason and the remedy."""


class RankFailed(WeftError):
    """A rank of a lab raised, died or was killed; the message carries its own traceback."""


class LabUnavailable(WeftError):
    """This machine cannot make a lab of network namespaces; the message says what is missing and the remedy."""


class Unsupported(ValueError):
    """A model, an option or a way of calling that weft cannot compute rightly; the message names it and the remedy."""
