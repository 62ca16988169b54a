"""How ranks that know only their own tensors learn of all others.

A trainer knows its shards, an inference engine its own, a stage of a pipeline its layers: every rank says what it has,
and all read all of it. What two ranks say of one tensor must be the same, or both are named. Ranks that say the same
post it once.

The texts are JSON in the group's store, of bounded size; nothing is unpickled. What comes from another rank is believed
only as far as it can be checked: numbers are whole and in range, ranks are those of the group, and nothing is made that
is larger than the text itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.comm import Group
from weft.comm.deadline import Deadline
from weft.comm.tell import Meeting, meeting
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh, ShardSizes
from weft.reshard.spec import LINEAR, TensorSpec
from weft.reshard.tensors import Tie

MOST_BYTES = 1 << 24
"""What a rank may say of one side: some 100,000 tensors."""
_MOST_COMPLAINT = 4096
_MOST_DIMS = 64
_LARGEST = 2**62


@dataclass(frozen=True)
class Source:
    """What a tensor is before the move."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Target:
    """What it is to become.

    dtype:         None for the source's own
    only_floating: tensors of other types keep theirs
    shape:         the whole tensor's, where it is known on this side
    """

    layout: Layout
    dtype: torch.dtype | None = None
    only_floating: bool = False
    shape: tuple[int, ...] | None = None


Side = TypeVar("Side", Source, Target)
SideReport = tuple[int, dict[str, Side], list[Tie]]
"""What a rank says of one side: its number, the tensors by name, and which names are one memory."""


@dataclass
class RankRequest:
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
class JointRequest:
    """What all ranks together ask for: the tensors to move, whether they are differentiated, the number of the call."""

    specs: tuple[TensorSpec, ...]
    differentiable: bool
    number: int


def exchange(group: Group, ranks: Sequence[int], request: RankRequest, what: str) -> JointRequest:
    """All that any rank says, joined. Collective; `ranks` are those of the group, `what` the user called.

    A rank with a problem raises it here, and all others say what it is. Where one does not come in time, all leave
    here, and the group is as good as before: nobody goes on to messages that another rank will not send.
    """
    deadline, steps = Deadline.after(group.timeout), ("has", "src", "dst", "known")
    texts, problem = _texts(request)
    with meeting(group.pg, "reshard", steps, deadline=deadline, store=None, what=what) as held:
        rows = held.gather("has", _row(request, texts, problem))
        if problem is not None:
            raise problem
        for rank, row in enumerate(rows):
            if row["problem"] is not None:
                raise PeerMismatch(f"rank {ranks[rank]} refused to reshard: {row['problem']}")
        _check_same([str(row["ask"]) for row in rows], ranks)
        told = [_read(held, "src", rows, texts), _read(held, "dst", rows, texts)]
        held.gather("known", None)
    sources, targets = _parse(told[0], read_source, ranks), _parse(told[1], read_target, ranks)
    specs = join(sources, targets)
    return JointRequest(specs, _is_differentiable(rows, specs, ranks), held.number)


def _texts(request: RankRequest) -> tuple[dict[str, str | None], Exception | None]:
    """What this rank says of both sides, and its problem: something that cannot be said is one too."""
    if request.problem is not None:
        return {"src": None, "dst": None}, request.problem
    try:
        texts = {
            "src": side_text(request.sources, request.source_ties),
            "dst": side_text(request.targets, request.target_ties),
        }
    except (TypeError, ValueError, AttributeError) as error:
        return {"src": None, "dst": None}, error
    longest = max(len(text or "") for text in texts.values())
    if longest <= MOST_BYTES:
        return texts, None
    return texts, ValueError(
        f"the description of this rank's tensors has {longest} bytes, expected at most {MOST_BYTES}; move fewer at once"
    )


def _row(request: RankRequest, texts: Mapping[str, str | None], problem: Exception | None) -> dict[str, Any]:
    complaint = None
    if problem is not None:
        kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
        complaint = f"{kind}{problem}"[:_MOST_COMPLAINT]
    digests = {step: text and hashlib.sha256(text.encode()).hexdigest() for step, text in texts.items()}
    flags = {"gradient": request.gradient, "recording": request.recording, "writes": request.writes}
    return {**digests, **flags, "ask": request.ask, "problem": complaint}


def _check_same(asks: Sequence[str], ranks: Sequence[int]) -> None:
    """All ranks must have called the same function with the same options."""
    if len(set(asks)) > 1:
        sides = "".join(f"\n  rank {rank}: {ask}" for rank, ask in zip(ranks, asks, strict=True))
        raise PeerMismatch(f"ranks are about to do different things:{sides}")


def _read(
    held: Meeting, step: str, rows: Sequence[Mapping[str, Any]], texts: Mapping[str, str | None]
) -> dict[int, Any]:
    """What ranks say of one side, by rank; of those that say the same, the first one speaks."""
    first = {str(row[step]): rank for rank, row in reversed(list(enumerate(rows))) if row[step] is not None}
    speakers = sorted(first.values())
    if held.rank in speakers:
        held.post(step, texts[step])
    return dict(zip(speakers, held.read(step, speakers), strict=True))


def _parse(
    told: Mapping[int, Any], read: Callable[[Any, Sequence[Layout]], Side], ranks: Sequence[int]
) -> list[SideReport[Side]]:
    found: list[SideReport[Side]] = []
    for rank, text in told.items():
        side, ties = parse_side(text, read, ranks, most=MOST_BYTES)
        found.append((ranks[rank], side, ties))
    return found


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


def join(sources: Sequence[SideReport[Source]], targets: Sequence[SideReport[Target]]) -> tuple[TensorSpec, ...]:
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


def side_text(side: Mapping[str, Source] | Mapping[str, Target], ties: Sequence[tuple[str, str]]) -> str | None:
    """What a rank says of its sources or its destinations; None where it has none. Meshes and layouts are said once."""
    if not side:
        return None
    meshes: dict[Mesh, int] = {}
    layouts: dict[Layout, int] = {}
    tensors = []
    for name, each in side.items():
        meshes.setdefault(each.layout.mesh, len(meshes))
        number = layouts.setdefault(each.layout, len(layouts))
        shape = None if each.shape is None else list(each.shape)
        dtype = None if each.dtype is None else str(each.dtype).removeprefix("torch.")
        tensors.append([name, number, shape, dtype, isinstance(each, Target) and each.only_floating])
    said = {
        "meshes": [[list(mesh.shape), list(mesh.ranks), list(mesh.hosts)] for mesh in meshes],
        "layouts": [
            [meshes[layout.mesh], [_placement_row(each) for each in layout.placements], list(layout.order)]
            for layout in layouts
        ],
        "tensors": tensors,
        "ties": [list(tie) for tie in ties],
    }
    return json.dumps(said, separators=(",", ":"))


def _placement_row(placement: object) -> list[Any]:
    if isinstance(placement, ShardSizes):
        return ["sizes", placement.dim, list(placement.sizes)]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    return ["partial", placement.reduce_op] if isinstance(placement, Partial) else ["replicate"]


def parse_side(
    text: object, read: Callable[[Any, Sequence[Layout]], Side], ranks: Sequence[int], *, most: int
) -> tuple[dict[str, Side], list[tuple[str, str]]]:
    """What `side_text` wrote on another rank; `read` is `read_source` or `read_target`, `ranks` those of the group."""
    if not isinstance(text, str) or len(text) > most:
        raise _bad(f"a {type(text).__name__} as text, or one that is too long")
    try:
        said = json.loads(text)
        meshes = [_mesh(row, ranks) for row in said["meshes"]]
        layouts = [_layout(row, meshes) for row in said["layouts"]]
        side = {_text(row[0]): read(row, layouts) for row in said["tensors"]}
        ties = [(_text(a), _text(b)) for a, b in said["ties"]]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _bad(f"{type(error).__name__}: {error}") from error
    return side, ties


def read_source(row: Any, layouts: Sequence[Layout]) -> Source:
    """A tensor of the source from its row."""
    layout, shape, dtype, _ = _tensor(row, layouts)
    if shape is None or dtype is None:
        raise _bad("a source without a shape or a dtype")
    return Source(shape, dtype, layout)


def read_target(row: Any, layouts: Sequence[Layout]) -> Target:
    """A tensor of the destination from its row."""
    layout, shape, dtype, only_floating = _tensor(row, layouts)
    return Target(layout, dtype, only_floating, shape)


def _tensor(row: Any, layouts: Sequence[Layout]) -> tuple[Layout, tuple[int, ...] | None, torch.dtype | None, bool]:
    _, number, sizes, dtype, only_floating = row
    layout = layouts[_int(number, 0, len(layouts) - 1)]
    shape = None if sizes is None else _ints(sizes, 0, _LARGEST, most=_MOST_DIMS)
    if math.prod(shape or ()) > _LARGEST:
        raise _bad(f"a tensor of shape {shape}")
    if only_floating not in (False, True):
        raise _bad(f"{only_floating!r} for a flag")
    layout = layout if shape is None else layout.normal(len(shape))
    return layout, shape, None if dtype is None else _dtype(dtype), bool(only_floating)


def _mesh(row: Any, ranks: Sequence[int]) -> Mesh:
    shape, members, hosts = row
    sizes = _ints(shape, 1, len(ranks), most=_MOST_DIMS)
    highest = max(ranks, default=0)
    found = _ints(members, 0, highest, most=len(ranks))
    return Mesh(found, sizes, _ints(hosts, 0, _LARGEST, most=len(ranks)), tuple(f"a{i}" for i in range(len(sizes))))


def _layout(row: Any, meshes: Sequence[Mesh]) -> Layout:
    number, placements, order = row
    mesh = meshes[_int(number, 0, len(meshes) - 1)]
    count = len(mesh.shape)
    if len(placements) > count:
        raise _bad(f"{len(placements)} placements for a mesh of {count} axes")
    return Layout(mesh, tuple(_placement(*each) for each in placements), _ints(order, 0, count - 1, most=count))


def _placement(kind: str, *rest: Any) -> Any:
    if kind == "sizes":
        return ShardSizes(_int(rest[0], -_MOST_DIMS, _MOST_DIMS), _ints(rest[1], 0, _LARGEST, most=_LARGEST))
    if kind == "shard":
        return Shard(_int(rest[0], -_MOST_DIMS, _MOST_DIMS))
    if kind == "partial":
        return Partial(_text(rest[0]))
    if kind == "replicate":
        return Replicate()
    raise _bad(f"the placement {kind!r}")


def _dtype(text: Any) -> torch.dtype:
    value = getattr(torch, _text(text), None)
    if not isinstance(value, torch.dtype):
        raise _bad(f"the dtype {text!r}, which this torch does not have")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(f"{value!r} for a text")
    return value


def _int(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _bad(f"{value!r} for a whole number from {low} to {high}")
    return value


def _ints(values: Any, low: int, high: int, *, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise _bad(f"{values!r:.100} for a list of up to {most}")
    return tuple(_int(value, low, high) for value in values)


def _bad(what: str) -> ValueError:
    return ValueError(f"another rank described its tensors with {what}, expected what this version of weft writes")
