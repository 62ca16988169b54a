"""One thing that a stage does with one micro-batch."""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass

_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)", re.ASCII)


@functools.total_ordering
class Kind(enum.Enum):
    """What is computed; sorts in the order in which a micro-batch needs it."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    __hash__ = object.__hash__  # by identity: members are single, and Enum's own hash is slow

    def __lt__(self, other: Kind) -> bool:
        return _RANKING[self] < _RANKING[other]

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch is kept on the stage once this is done."""
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


_RANKING = {kind: i for i, kind in enumerate(Kind)}


@dataclass(frozen=True, order=True)
class Action:
    """Stage, kind and micro-batch; prints as `2F0` and parses back.

    >>> Action(2, Kind.FORWARD, 0)
    2F0
    >>> Action.parse("3B11").microbatch
    11
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"got stage {self.stage} and micro-batch {self.microbatch}; expected both to be 0 or more")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"got the action {text!r}; expected stage, F, B, I or W, and micro-batch, such as 2F0: "
                f"forward, full backward, gradient of the input, gradient of the weights"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
