"""How a failure of one stage becomes known to all ranks, with the stage, the action and the micro-batch.

Ranks say so in the store of their process group, which outlives any of them under torchrun. The first rank that
fails writes there what went wrong, and then closes its connections; whoever loses a connection, or waits for long,
reads the store first. A rank that waits for too long says for whom, so that the one to blame is found: the rank that
all others wait for, and that waits for nobody itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from weft.errors import WeftError

T = TypeVar("T")

# How long the store may take to answer; a store whose server hangs never does.
_ANSWER_SECONDS = 1.0


class StageFailed(WeftError):
    """A stage on another rank raised, died or hung; the message names rank, stage, action and micro-batch."""


class FailureStore:
    """What the ranks of a pipeline say when something goes wrong. Nothing here raises or waits for long."""

    def __init__(self, store: Store, rank: int) -> None:
        """`store` is one of this pipeline alone, as that of a group of its own is."""
        self._store, self.rank, self._prefix = store, rank, "weft/pipeline"
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def post(self, text: str) -> str:
        """Says what failed on this rank; returns what was said first, which is what to blame."""
        mine = json.dumps({"rank": self.rank, "text": text})
        key = f"{self._prefix}/failed"
        found = self._ask(lambda: self._store.compare_set(key, "", mine))
        return text if found is None else str(json.loads(found)["text"])

    def read(self) -> str | None:
        """What failed first, if anything has."""
        key = f"{self._prefix}/failed"
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else str(json.loads(found)["text"])

    def say_waiting(self, ranks: tuple[int, ...], what: str) -> None:
        """Says for which ranks this one has been waiting for a while."""
        text = json.dumps({"ranks": list(ranks), "what": what})
        self._ask(lambda: self._store.set(f"{self._prefix}/waits/{self.rank}", text))

    def say_going_on(self) -> None:
        """Takes back what `say_waiting` said."""
        self._ask(lambda: self._store.delete_key(f"{self._prefix}/waits/{self.rank}"))

    def blame(self, ranks: tuple[int, ...]) -> str:
        """Whom the ranks that this one waits for are waiting for themselves, down to those that say nothing."""
        seen = {self.rank}
        chain: list[str] = []
        while True:
            said = {rank: self._waits(rank) for rank in ranks if rank not in seen}
            seen |= said.keys()
            silent = [rank for rank, words in said.items() if words is None]
            if silent or not said:
                who = f"rank {', '.join(map(str, silent or ranks))}"
                return "; ".join([*chain, f"{who} says nothing: it is stopped, dead or computing"])
            rank, words = next(iter(said.items()))
            assert words is not None
            chain.append(f"rank {rank} waits for {words['what']}")
            ranks = tuple(words["ranks"])

    def _waits(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/waits/{rank}"
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def _ask(self, call: Callable[[], T]) -> T | None:
        """`call()` in a thread: a store blocks its client for ever when its server hangs.

        One question at a time: while the last one has no answer, the next ones have none either, at once, and the
        thread that waits stays the only one.
        """
        answer: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the base of torch's store and network errors
                answer.append(call())

        with self._lock:
            if self._asking is not None and self._asking.is_alive():
                return None
            self._asking = threading.Thread(target=ask, name="weft-pipeline-failures", daemon=True)
            self._asking.start()
            self._asking.join(_ANSWER_SECONDS)
        return answer[0] if answer else None


def call_name(step: int, train: bool) -> str:
    """Which call a rank is in, for errors."""
    return f"{'step' if train else 'eval_step'} number {step}"
