"""Every kind of input to a reshard works, or is refused on all ranks before a byte moves; nothing breaks the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reshard_cases import (
    DTYPES,
    MODES,
    STRIDES,
    expected,
    mode_of,
    same,
    shards_of,
    torch_warnings_off,
    values,
    with_strides,
)
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import weft.reshard
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh
from weft.reshard import Source, TensorSpec, plan_reshard
from weft.reshard.spec import REDUCE, why_not_cast, why_not_reduced

LIMIT = {"timeout": 30.0}


def spec_of(shape: tuple[int, ...], dtype: torch.dtype, src: list[object], dst: list[object]) -> TensorSpec:
    """From ranks 1 and 0 to ranks 1 and 2."""
    before, after = Mesh.of([1, 0], hosts=[0, 0]), Mesh.of([1, 2], hosts=[0, 0])
    return TensorSpec("tensor", shape, dtype, Layout(before, src), Layout(after, dst), dtype)  # type: ignore[arg-type]


def move(spec: TensorSpec, source: torch.Tensor | None, **options: object) -> torch.Tensor:
    known = Source(spec.shape, spec.dtype, spec.src)
    return weft.reshard(source, spec.dst.mesh, spec.dst.placements, src=known, **options, **LIMIT)  # type: ignore[arg-type]


def every_stride() -> int:
    """Types x strides, modes and ways in turn: all are right, with results of the mode that they were asked in."""
    me = dist.get_rank()
    ways: list[tuple[list[object], list[object]]] = [
        ([Shard(0)], [Shard(1)]),
        ([Replicate()], [Shard(0)]),
        ([Shard(-1)], [Replicate()]),
    ]
    cases = [(dtype, kind) for dtype in DTYPES if why_not_cast(dtype, dtype) is None for kind in STRIDES]
    for count, (dtype, kind) in enumerate(cases):
        src, dst = ways[count % 3]
        mode = MODES[count // 3 % 3]
        spec = spec_of((1, 1) if kind == "one" else (5, 4), dtype, src, dst)
        with mode_of(mode), torch_warnings_off():
            mine = shards_of(spec, count).get(me)
            kept = None if mine is None else mine.clone()
            given = None if mine is None else with_strides(mine, kind)
            result = move(spec, given)
        if me in (1, 2):
            assert same(result, expected(spec, count)[me]), (dtype, kind, mode, src)
            assert result.is_inference() == (mode == "inference")
        assert kept is None or same(given, kept), "the source was changed"
    return len(cases)


def test_every_type_and_stride_in_every_mode() -> None:
    (count,) = set(run_ranks(every_stride, 3, timeout=240.0))
    assert count > 150


def every_term() -> list[str]:
    """Types x ways to reduce: right, or refused on all ranks alike."""
    me, refused = dist.get_rank(), []
    with torch_warnings_off():
        for dtype in DTYPES:
            if why_not_cast(dtype, dtype) is not None:
                continue
            for op in REDUCE:
                before, after = Mesh.of([1, 0], hosts=[0, 0]), Mesh.of([1, 2], hosts=[0, 0])
                layouts = Layout(before, [Partial(op)]), Layout(after, [Shard(0)])
                mine = values((5, 4), dtype, seed=7 + me) if me < 2 else None
                try:
                    result = weft.reshard(
                        mine, after, [Shard(0)], src=Source((5, 4), dtype, layouts[0]), strategy="optimal", **LIMIT
                    )
                except ValueError as error:
                    refused.append(str(error).split(":")[0])
                    continue
                spec = TensorSpec("tensor", (5, 4), dtype, *layouts, dtype)
                if me > 0:
                    terms = {rank: values((5, 4), dtype, seed=7 + rank) for rank in (0, 1)}
                    total = terms[1].clone()  # the mesh has rank 1 first
                    REDUCE[op](total, terms[0])
                    total = total / 2 if op == "avg" else total
                    assert same(result, total[:3] if me == 1 else total[3:]), (dtype, op, spec)
    return refused


def test_terms_of_every_type() -> None:
    results = run_ranks(every_term, 3, timeout=120.0)
    with torch_warnings_off():
        usable = [dtype for dtype in DTYPES if why_not_cast(dtype, dtype) is None]
        wrong = [f"{dtype} {op}" for dtype in usable for op in REDUCE if why_not_reduced(dtype, op) is not None]
    named = [
        f"tensor 'tensor' of {each.split()[0]} has terms that are to be reduced by '{each.split()[1]}'"
        for each in wrong
    ]
    assert results == [named] * 3
    assert {"torch.int64 avg", "torch.bool sum", "torch.complex64 max"} <= set(wrong)
    assert not {"torch.int64 sum", "torch.bool max", "torch.complex64 avg", "torch.float32 product"} & set(wrong)


SHAPES = [(), (0,), (1,), (0, 3), (3, 0), (1, 1), (2, 1, 3), (7,)]


def every_shape() -> None:
    """Scalars, tensors without elements, ranks without any: forth, back in place, and with gradients."""
    me = dist.get_rank()
    for seed, shape in enumerate(SHAPES):
        cut = [Shard(0)] if shape else [Replicate()]
        for src, dst in ((cut, [Replicate()]), ([Replicate()], cut), ([Partial()], cut)):
            spec = spec_of(shape, torch.float32, src, dst)  # type: ignore[arg-type]
            mine = shards_of(spec, seed).get(me)
            goal = expected(spec, seed).get(me)
            if mine is not None:
                mine.requires_grad_()
            result = move(spec, mine)
            assert goal is None or same(result, goal), (shape, src, dst)
            (result * 3).sum().backward()
            assert mine is None or torch.equal(mine.grad, torch.full_like(mine, 3.0)), (shape, src, dst)
            out = None if goal is None else torch.full_like(goal, 5.0)
            with torch.no_grad():
                move(spec, mine, out=out)
            assert out is None or same(out, goal)


def test_every_shape() -> None:
    run_ranks(every_shape, 3)


def casts() -> None:
    """A type that is asked for is got, whatever the source's; what would lose something is refused."""
    me = dist.get_rank()
    pairs = [
        (torch.int64, torch.float32),
        (torch.float32, torch.int32),
        (torch.float64, torch.bool),
        (torch.float32, torch.complex64),
        (torch.bfloat16, torch.float16),
        (torch.bool, torch.int64),
    ]
    for seed, (dtype, other) in enumerate(pairs):
        spec = spec_of((5, 4), dtype, [Shard(0)], [Shard(1)])
        result = move(spec, shards_of(spec, seed).get(me), dtype=other)
        assert me == 0 or same(result, expected(spec, seed)[me].to(other)), (dtype, other)
    spec = spec_of((5, 4), torch.complex64, [Shard(0)], [Shard(1)])
    with pytest.raises(ValueError, match=r"cannot become torch\.float32: the imaginary part would be lost"):
        move(spec, shards_of(spec, 0).get(me), dtype=torch.float32)


def test_casts() -> None:
    run_ranks(casts, 3)


def test_terms_that_cannot_be_reduced_are_refused_in_planning() -> None:
    mesh = Mesh.grid(1, 2)
    src, dst = Layout(mesh, [Replicate(), Partial("avg")]), Layout(mesh, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match=r"torch\.int64 has terms that are to be reduced by 'avg'"):
        plan_reshard((4,), torch.int64, src=src, dst=dst)
    other = Layout(mesh, [Replicate(), Partial("other")])
    with pytest.raises(ValueError, match="expected one of sum, avg, product, max, min"):
        plan_reshard((4,), torch.float32, src=other, dst=dst)


# What is refused --------------------------------------------------------------------------------------------


def bad_calls(me: int) -> dict[str, tuple[str, dict[str, object]]]:
    """Calls that rank 1 makes wrongly while the others make them well: the text of rank 1's error, and how."""
    x = torch.arange(6.0).view(2, 3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    deep = torch.ones(2, 3, requires_grad=True) * 2
    return {
        "text": ("'tensor' is a str, expected a tensor", {"tensor": "no tensor"}),
        "list": ("'tensor' is a list, expected a tensor", {"tensor": [1.0]}),
        "sparse": ("is sparse or nested", {"tensor": x.to_sparse()}),
        "nested": ("is sparse or nested", {"tensor": jagged}),
        "meta": ("is on the meta device", {"tensor": x.to("meta")}),
        "shape": ("local src tensor of 'tensor' on rank 1 is ((6,), torch.float32)", {"tensor": x.view(6)}),
        "dtype": ("local src tensor of 'tensor' on rank 1 is ((2, 3), torch.float64)", {"tensor": x.double()}),
        "missing": ("local src tensor of 'tensor' on rank 1 is None", {"tensor": None}),
        "source": ("'list' object has no attribute 'shape'", {"src": [1, 2]}),
        "placements": ("got 0 placements", {"placements": []}),
        "placement": ("placement of axis 0 is 'rows'", {"placements": ["rows"]}),
        "no placements": ("'int' object is not iterable", {"placements": 5}),
        "mesh": ("'NoneType' object has no attribute 'ndim'", {"mesh": None, "placements": [Shard(0)]}),
        "expanded out": ("several elements share memory", {"out": torch.zeros(1, 3).expand(2, 3)}),
        "recorded out": ("recorded for gradients", {"out": deep}),
        "shared out": ("lies in the same memory as source 'tensor'", {"tensor": x, "out": x}),
        "out type": ("'tensor' is a int, expected a tensor", {"out": 3}),
        "timeout": ("timeout is -1", {"timeout": -1}),
        "timeout type": ("'<' not supported", {"timeout": "soon"}),
    }


def refuse(kind: str) -> str:
    """Rank 1 makes a call wrongly; then all make one that works."""
    me = dist.get_rank()
    mesh = Mesh.of([0, 1], hosts=[0, 0])
    known = Source((4, 3), torch.float32, Layout(mesh, [Shard(0)]))
    whole = torch.arange(12.0).view(4, 3)
    good = {"tensor": whole[2 * me : 2 * me + 2], "mesh": mesh, "placements": [Shard(0)], "src": known, "timeout": 30.0}
    asked = {**good, **(bad_calls(me)[kind][1] if me == 1 else {})}
    text = "no error"
    try:
        tensor, to, placements = (asked.pop(name) for name in ("tensor", "mesh", "placements"))
        weft.reshard(tensor, to, placements, **asked)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError, PeerMismatch) as error:
        text = f"{type(error).__name__}: {error}"
    columns = weft.reshard(good["tensor"], mesh, [Shard(1)], src=known, **LIMIT)  # type: ignore[arg-type]
    assert torch.equal(columns, whole[:, :2] if me == 0 else whole[:, 2:]), kind
    return text


def refuse_all() -> list[str]:
    return [refuse(kind) for kind in bad_calls(dist.get_rank())]


def test_a_bad_call_of_one_rank_is_told_to_all() -> None:
    told, own = run_ranks(refuse_all, 2, timeout=120.0)
    for (kind, (message, _)), theirs, mine in zip(bad_calls(0).items(), told, own, strict=True):
        assert message in mine, (kind, mine)
        assert theirs.startswith("PeerMismatch: "), (kind, theirs)
        assert message in theirs, (kind, theirs)


def different_asks() -> list[str]:
    """Ranks that ask for different things are told both sides."""
    me, texts = dist.get_rank(), []
    mesh = Mesh.of([0, 1], hosts=[0, 0])
    turned = Mesh.of([1, 0], hosts=[0, 0])
    known = Source((4, 4), torch.float32, Layout(mesh, [Shard(0)]))
    other = Source((4, 4), torch.float32, Layout(mesh, [Shard(1)]))
    flat = Source((2, 8), torch.float32, Layout(mesh, [Shard(0)]))
    double = Source((4, 4), torch.float64, Layout(mesh, [Shard(0)]))
    x = torch.arange(8.0).view(2, 4) + me
    bad: list[dict[str, object]] = [
        {"src": other if me else known},
        {"src": flat if me else known},
        {"src": double if me else known},
        {"mesh": turned if me else mesh},
        {"placements": [Shard(0)] if me else [Shard(1)]},
        {"placements": [Replicate()] if me else [Shard(1)]},
        {"dtype": torch.float64 if me else None},
        {"strategy": "broadcast" if me else "optimal"},
        {"chunk_bytes": 4096 if me else None},
        {"max_staging_bytes": 1 << 20 if me else 1 << 21},
        {"strategy": "none such"},
        {"chunk_bytes": 3},
        {"max_staging_bytes": 3},
    ]
    for each in bad:
        asked: dict[str, object] = {"mesh": mesh, "placements": [Shard(1)], "src": known, **each}
        try:
            weft.reshard(x, asked.pop("mesh"), asked.pop("placements"), **asked, **LIMIT)  # type: ignore[arg-type]
            texts.append("no error")
        except (ValueError, PeerMismatch) as error:
            texts.append(f"{type(error).__name__}: {error}")
        columns = weft.reshard(x, mesh, [Shard(1)], src=known, **LIMIT)
        whole = torch.cat([torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4) + 1])
        assert torch.equal(columns, whole[:, 2 * me : 2 * me + 2])
    return texts


def test_ranks_that_ask_for_different_things() -> None:
    results = run_ranks(different_asks, 2, timeout=120.0)
    assert results[0] == results[1]
    for number, text in enumerate(results[0]):
        assert text.startswith("PeerMismatch: " if number < 10 else "ValueError: "), (number, text)
        assert "rank 0" in text or number >= 10, text
        assert "rank 1" in text or number >= 10, text
