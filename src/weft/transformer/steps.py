"""Requests that run together on one program, each in a slot of one cache, and the steps that they take.

A step is one pass through the model: one token of each request that decodes, and beside it a chunk of the prompts that
have just come. Requests join and leave between steps. The bits of a token depend on its own sequence only
(`passes.py`), so it does not matter to a request who else is there, nor how its prompt was cut.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from weft.transformer.call import inputs_of
from weft.transformer.memory import RankCache
from weft.transformer.program import RankProgram
from weft.transformer.requests import Decode, RequestState, TextRequest
from weft.transformer.sampling import ChosenToken, choose_each

_ROOM = 256  # tokens that a new cache has room for; it grows
_SLOTS = 8  # the same of sequences


@dataclass(frozen=True, eq=False)
class StepPart:
    """A request in a step: `count` tokens that its slot takes in; where these are all that it has, a token follows."""

    state: RequestState
    count: int
    chooses: bool

    def __str__(self) -> str:
        return f"{self.state.taken}+{self.count}"


class RequestBatch:
    """Requests that run together, at most `slots`; others wait. A step takes in up to `prefill` tokens of prompts.

    A step is planned, which changes nothing; begun, when ranks have compared their plans; run; and finished. Between
    these others may add requests and end some, of which the next plan knows.
    """

    def __init__(self, *, slots: int, prefill: int, first: tuple[int, int] = (_SLOTS, _ROOM)) -> None:
        """`first`: the slots and the tokens that the cache has room for before it grows."""
        self._slots, self._prefill, self._first = slots, prefill, first
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []  # with a slot
        self._cache: RankCache | None = None

    def add(self, request: TextRequest) -> RequestState:
        """A request that waits for its first step."""
        state = RequestState(request)
        if not state.is_done:
            self._waiting.append(state)
        return state

    @property
    def states(self) -> list[RequestState]:
        """Those that are not over, in the order of their coming."""
        return [state for state in (*self._running, *self._waiting) if not state.is_done]

    def plan(self) -> list[StepPart]:
        """The next step: one token of each that decodes, and prompts in their order. Empty where nothing is left."""
        parts, room = [], self._prefill
        for state in self.states[: self._slots]:
            count = left = state.known - state.taken
            if not state.made:
                count = min(left, room)
                room -= count
            if count:
                parts.append(StepPart(state, count, count == left))
        return parts

    def said(self, plan: list[StepPart]) -> str:
        """A plan and all requests, in words that ranks compare."""
        states, shown = self.states, ", ".join(map(str, plan[:8]))
        marks = "\n".join(f"{state.said} {state.taken} {state.made[-1:]}" for state in states)
        return (
            f"a step of {len(plan)} of {len(states)} requests ({zlib.crc32(marks.encode()):08x}), tokens {shown}"
            f"{' and more' if len(plan) > 8 else ''}; the last request is {states[-1].said}"
        )

    def begin(self, plan: list[StepPart], program: RankProgram) -> None:
        """Gives each request of a plan a slot; those that are over lose theirs."""
        planned = {part.state for part in plan}  # some of them may have been cancelled since
        self._running = [state for state in self._running if state in planned or not state.is_done]
        held = {state.slot for state in self._running}
        free = iter(slot for slot in range(self._slots) if slot not in held)
        for part in plan:
            if part.state.slot is None:
                part.state.slot = next(free)
                self._running.append(part.state)
        self._waiting = [state for state in self._waiting if state.slot is None and not state.is_done]
        slots = torch.tensor([state.slot for state in self._running])
        needed = max(int(slots.max()) + 1, min(self._first[0], self._slots))
        with torch.inference_mode():
            if self._cache is None:
                self._cache = program.cache(slots=needed, capacity=self._first[1])
            self._cache.reserve(1, slots=needed)
            # What is in a slot is what its request has taken in; the others may be written over.
            self._cache.lengths.zero_()
            self._cache.lengths[slots] = torch.tensor([state.taken for state in self._running])

    def run(self, plan: list[StepPart], program: RankProgram) -> list[ChosenToken]:
        """One pass; what follows in each request that has a next token, in the order of the plan."""
        cache = self._cache
        assert cache is not None
        choosing = [i for i, part in enumerate(plan) if part.chooses]
        with torch.inference_mode():
            slots = torch.tensor([part.state.slot for part in plan])
            counts = torch.tensor([part.count for part in plan])
            tokens = torch.cat([part.state.next_tokens(part.count) for part in plan])
            inputs = inputs_of(tokens, counts, cache.lengths[slots], program.transformer)
            last = inputs.cu_seqlens[1:].to(torch.int64)[choosing] - 1
            rows = None if last.numel() == tokens.numel() else last
            hidden = program.run(inputs, cache=cache, slots=slots, rows=rows)
            if not choosing:
                return []
            words, size = program.model.words, program.model.size
            each = [plan[i].state.row for i in choosing]
            return choose_each(program.logits(hidden), each, words, program.gather, size)

    @staticmethod
    def finish(plan: list[StepPart], chosen: list[ChosenToken], decode: Decode | None) -> None:
        """Adds what a step has given."""
        for part in plan:
            part.state.taken += part.count
        for state, token in zip((part.state for part in plan if part.chooses), chosen, strict=True):
            state.add(token, decode)

    def forget(self, error: Exception) -> bool:
        """Ends the requests that have begun by an error, and drops what is held for them; whether there were some."""
        ended = [state for state in self._running if not state.is_done]
        for state in ended:
            state.error = error
        self._running, self._cache = [], None
        return bool(ended)
