"""The rows of `weft bench end_to_end`: which model does what, on how many hosts, over links of which speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from weft.bench.end_to_end_inputs import mixed_lengths, spread_lengths
from weft.bench.end_to_end_sizes import GPT2, LLAMA, QUICK_LLAMA, TINY_GPT2, TINY_LLAMA, ModelSize

GROUPS = ((1, 2), (2, 1), (2, 2))  # hosts, devices of each
SHARES = (0.15, 0.3, 0.5)
HEADLINE_SHARE = 0.3
SIDE_ROUNDS = 3  # with more, all rows would take most of a day


class Kind(Enum):
    """What is timed."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Load:
    """How much each kind of row has to do.

    >>> load = Load()
    >>> sum(load.train_lengths), sum(load.prompt_lengths), sum(load.decode_lengths)
    (2048, 4352, 256)
    """

    train_tokens: int = 2048
    longest_text: int = 512
    prompts: int = 16
    shortest_prompt: int = 32
    longest_prompt: int = 512
    decode_prompt: int = 16
    new_tokens: int = 64

    @property
    def train_lengths(self) -> tuple[int, ...]:
        return mixed_lengths(self.train_tokens, longest=self.longest_text)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return spread_lengths(self.prompts, shortest=self.shortest_prompt, longest=self.longest_prompt)

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Of the prompts that decoding goes on from."""
        return (self.decode_prompt,) * self.prompts


@dataclass(frozen=True)
class Place:
    """A model on a group of ranks; `share` is the part of torch's training step that the links take, None for one host.

    >>> Place(LLAMA, 2, 1, 0.3).name
    'llama, 2x1, 30 %'
    """

    size: ModelSize
    hosts: int
    devices: int
    share: float | None

    @property
    def name(self) -> str:
        link = "" if self.share is None else f", {self.share:.0%}".replace("%", " %")
        return f"{self.size.name}, {self.hosts}x{self.devices}{link}"

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices

    @property
    def is_headline(self) -> bool:
        """Whether the summary counts it."""
        return self.size.family == "llama" and self.share in (None, HEADLINE_SHARE)


@dataclass(frozen=True)
class Scale:
    """All rows of one run: the places, what is timed at each, and the load.

    rounds:    of the rows that the summary counts; the others have at most SIDE_ROUNDS
    promises:  whether these rows also have weft with a promise switched off
    vllm:      whether vLLM takes part, where it is installed
    """

    places: Sequence[tuple[Place, tuple[Kind, ...]]]
    load: Load
    rounds: int
    promises: bool = True
    vllm: bool = True

    def rounds_of(self, place: Place) -> int:
        return self.rounds if place.is_headline else min(self.rounds, SIDE_ROUNDS)


EVERY = tuple(Kind)


def full() -> Scale:
    """Every group and share. Hugging Face has no tensor-parallel plan for GPT-2, and generates with Llama only."""
    return Scale([*_places(LLAMA, EVERY), *_places(GPT2, (Kind.TRAIN,))], Load(), rounds=7)


def quick() -> Scale:
    """The fewest rows that fill the summary."""
    places = [
        (Place(QUICK_LLAMA, 2, 1, HEADLINE_SHARE), (Kind.TRAIN,)),
        (Place(QUICK_LLAMA, 1, 2, None), (Kind.PREFILL, Kind.DECODE)),
    ]
    return Scale(places, Load(train_tokens=1024), rounds=3, promises=False)


def tiny() -> Scale:
    """A test: every path, and no figure worth reading."""
    load = Load(
        train_tokens=96, longest_text=40, prompts=4, shortest_prompt=4, longest_prompt=24, decode_prompt=5, new_tokens=4
    )
    places = [
        (Place(TINY_LLAMA, 2, 1, HEADLINE_SHARE), EVERY),
        (Place(TINY_LLAMA, 1, 2, None), (Kind.PREFILL, Kind.DECODE)),
        (Place(TINY_GPT2, 2, 1, HEADLINE_SHARE), (Kind.TRAIN,)),
    ]
    return Scale(places, load, rounds=1, vllm=False)


def _places(size: ModelSize, kinds: tuple[Kind, ...]) -> Iterator[tuple[Place, tuple[Kind, ...]]]:
    for hosts, devices in GROUPS:
        for share in SHARES if hosts > 1 else (None,):
            yield Place(size, hosts, devices, share), kinds
