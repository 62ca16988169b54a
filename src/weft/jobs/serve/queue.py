"""What waits, and what goes into the next batch: first come, first served, up to a budget of tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LOOK_AHEAD = 256  # texts that are too long for what is left of a batch and are passed over, at most


@dataclass(eq=False)
class Ticket:
    """A request on its way: the results of its texts, and who waits for them."""

    future: asyncio.Future[None]
    results: list[Any]
    left: int  # texts that are not computed yet
    is_gone: bool = False  # nobody waits any more
    queue_seconds: float = 0.0  # the longest of its texts
    compute_seconds: float = 0.0  # of the batches that held some of it, the longest


@dataclass(eq=False)
class QueuedText:
    """A text by its tokens; `content` is what the model takes."""

    ticket: Ticket
    index: int
    content: Any
    tokens: int
    since: float

    @property
    def cost(self) -> int:
        return max(self.tokens, 1)  # a text without tokens is not free either


@dataclass
class TextQueue:
    """Texts in the order in which they came."""

    texts: deque[QueuedText] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, texts: Iterable[QueuedText]) -> None:
        self.texts.extend(texts)

    def oldest(self) -> float | None:
        """Since when the first one waits."""
        return self.texts[0].since if self.texts else None

    def take(self, budget: int) -> list[QueuedText]:
        """The next batch. The first text is always in it, so none waits for ever; one that does not fit into what is
        left is passed over, so that it does not hold up short ones behind it, and is the first of the next batch.
        """
        batch: list[QueuedText] = []
        passed: list[QueuedText] = []
        left = budget
        while self.texts and left > 0 and len(passed) < LOOK_AHEAD:
            text = self.texts.popleft()
            if text.ticket.is_gone:
                continue
            if batch and text.cost > left:
                passed.append(text)
                continue
            batch.append(text)
            left -= text.cost
        self.texts.extendleft(reversed(passed))
        return batch
