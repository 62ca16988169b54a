"""Has a weight that vLLM keeps beside its packed copy changed?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

_LINES = 64  # rows that are looked at


class Stamp:
    """What some tensors were like when it was made: memory, version and some of the content."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._marks = [_mark(t) for t in tensors]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Stamp:
        """The stamp of some tensors."""
        return cls(list(tensors))

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are the same, with the same content as far as that was looked at."""
        return [_mark(t) for t in tensors] == self._marks


def _mark(t: Tensor) -> tuple[int, int, list[float]]:
    sample = t.detach().reshape(-1)[:: max(1, t.numel() // _LINES)].tolist()
    return t.data_ptr(), -1 if t.is_inference() else t._version, sample
