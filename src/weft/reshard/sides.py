"""What a tensor is at the source and at the destination, as values and as JSON that ranks send each other. Pure.

What comes from another rank is believed only as far as it can be checked: numbers are whole and in range, ranks are
those of the group, and nothing is made that is larger than the text itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.layout import Layout, Mesh, ShardSizes

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
