"""What ranks say of their tensors: read back as it was written; anything else is a ValueError, never more."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from weft.layout import Layout, Mesh, Partial, Replicate, Shard, ShardSizes
from weft.reshard.describe import Source, Target, parse_side, read_source, read_target, side_text

RANKS = tuple(range(8))
MESH = Mesh.of([[0, 3], [5, 6]], hosts=[[0, 0], [1, 1]])
SOURCES = {
    "w": Source((7, 6), torch.bfloat16, Layout(MESH, [Shard(0), Shard(0)], (1, 0))),
    "ü.bias": Source((6,), torch.float32, Layout(MESH, [Partial("avg"), Replicate()])),
    "steps": Source((), torch.int64, Layout(Mesh.of([2], hosts=[4]), [Replicate()])),
    "cut": Source((5, 2), torch.bool, Layout(Mesh.of([4, 1], hosts=[1, 0]), [ShardSizes(0, (5, 0))])),
}
TARGETS = {
    "w": Target(Layout(MESH, [Shard(-1), Replicate()]), torch.float16, only_floating=True),
    "v": Target(Layout(MESH, [Shard(0), Replicate()]), None, shape=(4, 4)),
}
MOST = 1 << 20


def test_what_is_written_is_read() -> None:
    ties = [("w", "cut")]
    assert parse_side(side_text(SOURCES, ties), read_source, RANKS, most=MOST) == (SOURCES, ties)
    assert parse_side(side_text(TARGETS, []), read_target, RANKS, most=MOST) == (TARGETS, [])
    assert side_text({}, []) is None


def test_meshes_and_layouts_are_said_once() -> None:
    layout = SOURCES["w"].layout
    many = {f"layers.{i}": Source((64, 64), torch.float32, layout) for i in range(1000)}
    text = side_text(many, [])
    assert text is not None
    assert len(text) < 50 * len(many)


def mutate(value: Any, chance: random.Random) -> Any:
    """The same JSON with something else somewhere."""
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        if isinstance(value, dict):
            key = chance.choice(list(value))
            return {**value, key: mutate(value[key], chance)}
        place = chance.randrange(len(value))
        return [*value[:place], mutate(value[place], chance), *value[place + 1 :]]
    others = [None, True, -1, 0, 3, 99, 2**31, 2**63, 10**30, 1.5, "", "x" * 9, "shard", [], {}, [[]], [10**9] * 3]
    if isinstance(value, list):
        others += [value * 2, value[:-1]]
    return chance.choice(others)


@pytest.mark.parametrize("kind", ["sources", "targets"])
def test_anything_else_is_refused(kind: str) -> None:
    text = side_text(SOURCES, [("w", "cut")]) if kind == "sources" else side_text(TARGETS, [])
    read: Any = read_source if kind == "sources" else read_target
    assert text is not None
    chance, refused = random.Random(5), 0
    for _ in range(3000):
        said = json.loads(text)
        for _ in range(chance.randint(1, 3)):
            said = mutate(said, chance)
        try:
            found, _ = parse_side(json.dumps(said), read, RANKS, most=MOST)
        except ValueError:
            refused += 1
            continue
        for each in found.values():
            assert set(each.layout.mesh.ranks) <= set(range(max(RANKS) + 1))
    assert refused > 1500
    for broken in ("", "{", "[]", "null", "3", '"x"', text[:-3], text * 2, "[" * 100_000, b"bytes", None):
        with pytest.raises(ValueError, match=r".+"):
            parse_side(broken, read, RANKS, most=MOST)
    with pytest.raises(ValueError, match="too long"):
        parse_side(text, read, RANKS, most=100)
