"""A schedule for these costs that keeps within a memory limit: `weft.schedule("search", memory=..., costs=...)`. Pure.

Micro-batches are alike, so each rank takes them in order, and its list is a *word* of the letters F, B, I and W. The
search starts from words of the known kinds (warm-up, then turns, with W at once, later or as a bubble filler) that keep
within the limits, takes the best few, and changes one rank at a time while the step gets shorter: a letter moves, a B
comes apart into I and W, an I and the next W join. Steps are those of the simulator, transfers and cards included.

Of two words with equally long steps the better one has ranks that end earlier, so that the search crosses plateaus. It
is deterministic: no random numbers, no clock; the number of simulated words is what limits it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from weft.pipeline.schedules.costs import Costs
from weft.pipeline.schedules.graph import Action, Kind, chain
from weft.pipeline.schedules.lower import decide
from weft.pipeline.schedules.schedule import Schedule

Words = tuple[str, ...]
_STARTS = 4  # words from which the search goes on
_ACTIONS = 150_000  # that are simulated in one search, about: some seconds


def search(stages: int, microbatches: int, *, memory: int | Sequence[int] | None, costs: Costs | None) -> Schedule:
    """The shortest step that was found, on a rank for each stage.

    memory: the most micro-batches that a rank may keep activations of at once, from F to B or W: one number for all
            ranks, or one for each; as many as there are micro-batches by default
    costs:  seconds of the actions and transfers; equal stages by default

    >>> costs = Costs.uniform(3, transfer=0.5)
    >>> found = search(3, 3, memory=2, costs=costs)
    >>> max(found.peak_activations), found.simulate(costs).seconds
    (2, 18.0)
    """
    costs = Costs.uniform(stages) if costs is None else costs
    if costs.stages != stages:
        raise ValueError(f"got costs of {costs.stages} stages for {stages} stages; expected the same number")
    hunt = _Hunt(costs, _limits(stages, microbatches, memory), microbatches)
    starts = sorted(set(_starts(hunt.limits, microbatches)), key=hunt.price)
    best = min((hunt.improve(words) for words in starts[:_STARTS]), key=hunt.price)
    return hunt.schedule(best)


def _limits(stages: int, microbatches: int, memory: int | Sequence[int] | None) -> tuple[int, ...]:
    given = (microbatches,) * stages if memory is None else (memory,) * stages if isinstance(memory, int) else memory
    limits = tuple(min(int(each), microbatches) for each in given)
    if len(limits) != stages or min(limits) < 1:
        raise ValueError(
            f"got memory={memory}; expected the most micro-batches that a rank may keep, at least 1: one number, or "
            f"one for each of the {stages} ranks"
        )
    return limits


def _starts(limits: Sequence[int], microbatches: int) -> Iterator[Words]:
    """Words of the known kinds: every combination of how eager forwards are and where W goes."""
    stages = len(limits)
    everything = microbatches
    ways_to_warm_up = (
        [stages - s for s in range(stages)],
        [2 * (stages - s) - 1 for s in range(stages)],
        [everything] * stages,
    )
    delays: tuple[int | str | None, ...] = (None, 0, 1, "stage", "room")
    for warm_up, delay in itertools.product(ways_to_warm_up, delays):
        words = []
        for stage, limit in enumerate(limits):
            first = min(warm_up[stage], limit, microbatches)
            room = limit - first
            later = {"stage": min(stage, room), "room": room}[delay] if isinstance(delay, str) else delay
            words.append(_word(microbatches, first, limit, later))
        yield tuple(words)


def _word(microbatches: int, warm_up: int, limit: int, delay: int | None) -> str:
    """Forwards up to the warm-up, then backwards and forwards in turns; W `delay` backwards later, or when it must."""
    word = "F" * warm_up
    forwards, backwards, owed = warm_up, 0, 0
    while backwards < microbatches:
        backwards += 1
        word += "B" if delay is None else "I"
        owed += delay is not None
        while owed and (owed > (delay or 0) or (forwards < microbatches and forwards - backwards + owed >= limit)):
            word += "W"
            owed -= 1
        if forwards < microbatches:
            word += "F"
            forwards += 1
    return word + "W" * owed


def is_word(word: str, microbatches: int, limit: int) -> bool:
    """Whether a rank can follow it, and keeps within its limit.

    >>> is_word("FFIIWW", 2, 2), is_word("FFIIWW", 2, 1), is_word("FWI", 1, 1)
    (True, False, False)
    """
    forwards = gradients = owed = live = 0
    for letter in word:
        if letter == "F":
            forwards += 1
            live += 1
        elif letter == "W":
            owed -= 1
            live -= 1
        else:
            gradients += 1
            owed += letter == "I"
            live -= letter == "B"
        if live > limit or gradients > forwards or owed < 0:
            return False
    return forwards == gradients == microbatches and owed == 0


def actions_of(stage: int, word: str) -> tuple[Action, ...]:
    """The list that a word stands for; micro-batches in order, W after the I that waited longest.

    >>> actions_of(1, "FFBIW")
    (1F0, 1F1, 1B0, 1I1, 1W1)
    """
    found: list[Action] = []
    forwards = gradients = 0
    owed: deque[int] = deque()
    for letter in word:
        if letter == "F":
            microbatch, forwards = forwards, forwards + 1
        elif letter == "W":
            microbatch = owed.popleft()
        else:
            microbatch, gradients = gradients, gradients + 1
            if letter == "I":
                owed.append(microbatch)
        found.append(Action(stage, Kind(letter), microbatch))
    return tuple(found)


class _Hunt:
    """What is known of words: each is simulated once, until as many were as the search may take."""

    def __init__(self, costs: Costs, limits: tuple[int, ...], microbatches: int) -> None:
        self.limits = limits
        self._costs, self._microbatches, self._graph = costs, microbatches, chain(len(limits))
        self._prices: dict[Words, tuple[float, ...]] = {}
        self._left = max(60, _ACTIONS // (3 * microbatches * len(limits)))

    def schedule(self, words: Words) -> Schedule:
        lists = tuple(actions_of(stage, word) for stage, word in enumerate(words))
        return Schedule("search", len(words), self._microbatches, lists)

    def price(self, words: Words) -> tuple[float, ...]:
        """The length of the step, then the ends of all ranks, then the starts of all actions; less is better."""
        if words not in self._prices:
            made = self.schedule(words)
            if made.steps(self._graph).stuck:
                self._prices[words] = (float("inf"),)
            else:
                self._left -= 1
                ran = decide(made, self._graph, self._costs).run.actions
                ends = [max(ran[action][1] for action in actions) for actions in made.ranks]
                self._prices[words] = (max(ends), sum(ends), sum(start for start, _ in ran.values()))
        return self._prices[words]

    def improve(self, words: Words) -> Words:
        """Changes one rank's word at a time, as long as that makes the step better."""
        bound = self._left - self._left // _STARTS  # what is left for the other starts
        changed = True
        while changed and self._left > bound:
            changed = False
            for stage in range(len(words)):
                for word in _neighbours(words[stage]):
                    if self._left <= bound:
                        break
                    if not is_word(word, self._microbatches, self.limits[stage]):
                        continue
                    other = (*words[:stage], word, *words[stage + 1 :])
                    if self.price(other) < self.price(words):
                        words, changed = other, True
                        break
        return words


def _neighbours(word: str) -> Iterator[str]:
    """Words that differ by one change, small moves first."""
    for distance in range(1, len(word)):
        for at in range(len(word)):
            rest = word[:at] + word[at + 1 :]
            for to in (at - distance, at + distance):
                if 0 <= to <= len(rest):
                    moved = rest[:to] + word[at] + rest[to:]
                    if moved != word:
                        yield moved
        if distance == 1:
            yield from _joined_and_split(word)


def _joined_and_split(word: str) -> Iterator[str]:
    for at, letter in enumerate(word):
        if letter == "B":
            yield word[:at] + "IW" + word[at + 1 :]
            for to in range(at + 1, len(word) + 1):
                yield word[:at] + "I" + word[at + 1 : to] + "W" + word[to:]
        elif letter == "I":
            to = word.find("W", at)
            yield word[:at] + "B" + word[at + 1 : to] + word[to + 1 :]
            yield word[:at] + word[at + 1 : to] + "B" + word[to + 1 :]
