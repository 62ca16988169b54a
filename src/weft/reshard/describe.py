"""How ranks that know only their own tensors learn of all others.

A trainer knows its shards, an inference engine its own, a stage of a pipeline its layers: every rank says what it has,
and all read all of it. What two ranks say of one tensor must be the same, or both are named. Ranks that say the same
post it once. The texts are JSON in the group's store, of bounded size; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.comm import Group
from weft.comm.deadline import Deadline
from weft.comm.tell import Meeting
from weft.errors import PeerMismatch
from weft.layout import Layout
from weft.reshard.sides import Side, Source, Target, parse_side, read_source, read_target, side_text
from weft.reshard.tensors import Tie
from weft.reshard.terms import LINEAR
from weft.reshard.units import TensorSpec

MOST_BYTES = 1 << 24
"""What a rank may say of one side: some 100,000 tensors."""
_MOST_COMPLAINT = 4096


Said = tuple[int, dict[str, Side], list[Tie]]
"""What a rank said of one side."""


@dataclass
class Word:
    """What a rank says before a move.

    ask:       which function was called with which options; the same on all ranks
    gradient:  a tensor of the source requires one; `recording`: this rank records operations for gradients
    writes:    this rank gives tensors to write into
    ties:      names of one memory, of sources and of destinations
    problem:   what is wrong with this rank's arguments: told to all
    """

    ask: str
    sources: dict[str, Source] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    source_ties: list[Tie] = field(default_factory=list)
    target_ties: list[Tie] = field(default_factory=list)
    gradient: bool = False
    recording: bool = True
    writes: bool = False
    problem: Exception | None = None


@dataclass(frozen=True)
class Known:
    """What all ranks know then: the tensors to move, whether they are differentiated, and the number of the move."""

    specs: tuple[TensorSpec, ...]
    differentiable: bool
    number: int


def exchange(group: Group, ranks: Sequence[int], word: Word) -> Known:
    """All that any rank says, joined. Collective; `ranks` are those of the group.

    A rank with a problem raises it here, and all others say what it is.
    """
    deadline = Deadline.after(group.timeout)
    meeting = Meeting(group.pg, "reshard", ("has", "src", "dst"), deadline=deadline, store=None)
    texts, problem = _texts(word)
    rows = meeting.gather("has", _row(word, texts, problem))
    if problem is not None:
        raise problem
    for rank, row in enumerate(rows):
        if row["problem"] is not None:
            raise PeerMismatch(f"rank {ranks[rank]} refused to reshard: {row['problem']}")
    _check_same([str(row["ask"]) for row in rows], ranks)
    sources = _read(meeting, "src", rows, texts, read_source, ranks)
    targets = _read(meeting, "dst", rows, texts, read_target, ranks)
    specs = join(sources, targets)
    return Known(specs, _is_differentiable(rows, specs, ranks), meeting.number)


def _read(
    meeting: Meeting,
    step: str,
    rows: Sequence[Mapping[str, Any]],
    texts: Mapping[str, str | None],
    read: Callable[[Any, Sequence[Layout]], Side],
    ranks: Sequence[int],
) -> list[Said[Side]]:
    """What ranks say of one side; of those that say the same, the first one speaks."""
    first = {str(row[step]): rank for rank, row in reversed(list(enumerate(rows))) if row[step] is not None}
    speakers = sorted(first.values())
    if meeting.rank in speakers:
        meeting.post(step, texts[step])
    found: list[Said[Side]] = []
    for rank, text in zip(speakers, meeting.read(step, speakers), strict=True):
        side, ties = parse_side(text, read, ranks, most=MOST_BYTES)
        found.append((ranks[rank], side, ties))
    return found


def _texts(word: Word) -> tuple[dict[str, str | None], Exception | None]:
    """What this rank says of both sides, and its problem: something that cannot be said is one too."""
    if word.problem is not None:
        return {"src": None, "dst": None}, word.problem
    try:
        texts = {"src": side_text(word.sources, word.source_ties), "dst": side_text(word.targets, word.target_ties)}
    except (TypeError, ValueError, AttributeError) as error:
        return {"src": None, "dst": None}, error
    longest = max(len(text or "") for text in texts.values())
    if longest <= MOST_BYTES:
        return texts, None
    return texts, ValueError(
        f"the description of this rank's tensors has {longest} bytes, expected at most {MOST_BYTES}; move fewer at once"
    )


def _row(word: Word, texts: Mapping[str, str | None], problem: Exception | None) -> dict[str, Any]:
    complaint = None
    if problem is not None:
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        complaint = f"{kind}{problem}"[:_MOST_COMPLAINT]
    digests = {step: text and hashlib.sha256(text.encode()).hexdigest() for step, text in texts.items()}
    flags = {"gradient": word.gradient, "recording": word.recording, "writes": word.writes}
    return {**digests, **flags, "ask": word.ask, "problem": complaint}


def _check_same(asks: Sequence[str], ranks: Sequence[int]) -> None:
    """All ranks must have called the same function with the same options."""
    if len(set(asks)) > 1:
        sides = "".join(f"\n  rank {rank}: {ask}" for rank, ask in zip(ranks, asks, strict=True))
        raise PeerMismatch(f"ranks are about to do different things:{sides}")


def _is_differentiable(rows: Sequence[Mapping[str, Any]], specs: Sequence[TensorSpec], ranks: Sequence[int]) -> bool:
    """Whether gradients flow back; a ValueError on every rank where they should and cannot."""
    wants = [rank for rank, row in zip(ranks, rows, strict=True) if row["gradient"]]
    if not wants:
        return False
    who = f"tensor {specs[0].name!r} requires a gradient on rank {wants[0]}"
    remedy = "detach() it, or call under torch.no_grad() on all ranks"
    off = [rank for rank, row in zip(ranks, rows, strict=True) if not row["recording"]]
    if off:
        raise ValueError(
            f"{who}, but rank {off[0]} records nothing for gradients (no_grad or inference_mode), expected all ranks "
            f"to: backward is collective; {remedy}"
        )
    written = [rank for rank, row in zip(ranks, rows, strict=True) if row["writes"]]
    if written:
        raise ValueError(f"{who}, but rank {written[0]} gives out=, which has no gradient; leave it away, or {remedy}")
    op = specs[0].src.reduce_op
    if op not in (None, *LINEAR):
        raise ValueError(f"{who}, but its terms are reduced by {op!r}, expected one of {LINEAR}; {remedy}")
    return specs[0].dst_dtype.is_floating_point or specs[0].dst_dtype.is_complex


def join(sources: Sequence[Said[Source]], targets: Sequence[Said[Target]]) -> tuple[TensorSpec, ...]:
    """The tensors of a plan from what ranks said of both sides, which must name the same ones."""
    if not sources or not targets:
        missing = "destination" if sources else "source"
        raise ValueError(f"no rank has a {missing}, expected at least one that gives it")
    before = _merge(((rank, said) for rank, said, _ in sources), "source")
    shaped = ((rank, {name: _shaped(name, each, before) for name, each in said.items()}) for rank, said, _ in targets)
    after = _merge(shaped, "destination")
    if before.keys() != after.keys():
        only = [sorted(set(a) - set(b))[:5] for a, b in ((before, after), (after, before))]
        raise ValueError(
            f"sources without a destination: {only[0]}, destinations without a source: {only[1]}; expected the same "
            "names on both sides; leave out what is not to be moved"
        )
    tied = {tie for _, _, ties in sources for tie in ties}
    for rank, _, ties in targets:
        for a, b in ties:
            if (a, b) not in tied and (b, a) not in tied:
                raise ValueError(
                    f"destinations {a!r} and {b!r} are one memory on rank {rank}, but two sources are to be written "
                    "into it, expected sources that are one memory too; leave one of the names out"
                )
    return tuple(
        TensorSpec(name, source.shape, source.dtype, source.layout, after[name].layout, _final(source, after[name]))
        for name, source in before.items()
    )


def _merge(said: Iterable[tuple[int, Mapping[str, Side]]], side: str) -> dict[str, Side]:
    found: dict[str, Side] = {}
    speaker: dict[str, int] = {}
    for rank, tensors in said:
        for name, each in tensors.items():
            speaker.setdefault(name, rank)
            if found.setdefault(name, each) != each:
                raise PeerMismatch(
                    f"{side} of tensor {name!r} is {each} on rank {rank}, but {found[name]} on rank {speaker[name]}; "
                    "expected the same from all ranks that give it; give tensors that differ different names, and "
                    "copies of one as a mesh of all that hold it, or from one of them only"
                )
    return found


def _shaped(name: str, target: Target, sources: Mapping[str, Source]) -> Target:
    """The target with the shape of its source, so that what ranks say can be compared."""
    if name not in sources:
        return target
    shape = sources[name].shape
    if target.shape not in (None, shape):
        raise ValueError(
            f"tensor {name!r} is {shape} at the source and {target.shape} at the destination, expected one shape"
        )
    return Target(target.layout.normal(len(shape)), target.dtype, target.only_floating, shape)


def _final(source: Source, target: Target) -> torch.dtype:
    if target.dtype is None or (target.only_floating and not source.dtype.is_floating_point):
        return source.dtype
    return target.dtype
