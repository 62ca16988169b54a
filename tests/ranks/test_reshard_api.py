"""`weft.reshard` and `weft.reshard_state_dict` with real processes: DTensors, shards, gradients, refusals."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

import weft.reshard
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh, ShardSizes
from weft.reference import shard
from weft.reshard import Source, reshard_state_dict
from weft.reshard.tensors import layout_of_dtensor, mesh_of, to_dtensor

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
SOURCES, TARGETS = (0, 1, 2, 3), (2, 3, 4, 5)
LIMIT = {"timeout": 30.0}


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", list(TARGETS))


def source(mesh: DeviceMesh) -> DTensor | None:
    """Cut by rows and columns; None where this rank has nothing of it."""
    if dist.get_rank() not in SOURCES:
        return None
    layout = Layout(Mesh.grid(2, 2), [Shard(0), Shard(1)])
    local = shard(WHOLE, layout)[dist.get_rank()].clone()
    return to_dtensor(local, mesh, [Shard(0), Shard(1)], WHOLE.shape)


def rows_of(rank: int) -> torch.Tensor:
    return shard(WHOLE, Layout(Mesh.of(TARGETS, hosts=[0] * 4), [Shard(0)]))[rank]


def columns_of(rank: int) -> torch.Tensor:
    return shard(WHOLE, Layout(Mesh.of(TARGETS, hosts=[0] * 4), [Shard(1)]))[rank]


def dtensors() -> None:
    me = dist.get_rank()
    a, b = meshes()
    x = source(a)
    y = weft.reshard(x, b, [Shard(0)], **LIMIT)
    if me in TARGETS:
        assert isinstance(y, DTensor)
        assert (y.device_mesh, y.placements, y.shape) == (b, (Shard(0),), WHOLE.shape)
        assert torch.equal(y.to_local(), rows_of(me))
    else:
        assert y.numel() == 0
    back = weft.reshard(y, a, [Replicate(), Shard(1)], **LIMIT)
    if me in SOURCES:
        assert torch.equal(back.to_local(), WHOLE[:, 3 * (me % 2) : 3 * (me % 2) + 3])
    wide = weft.reshard(x, b, [Replicate()], dtype=torch.float64, **LIMIT)
    assert me not in TARGETS or torch.equal(wide.to_local(), WHOLE.double())
    handle = weft.reshard(x, b, [Shard(1)], async_op=True, **LIMIT)
    if x is not None:
        x.to_local().fill_(-1.0)  # it was copied
    x = source(a)
    # Another move while this one is under way.
    out = torch.zeros_like(rows_of(me)) if me in TARGETS else None
    same = weft.reshard(x, b, [Shard(0)], out=out, **LIMIT)
    assert me not in TARGETS or (same.to_local().data_ptr() == out.data_ptr() and torch.equal(out, rows_of(me)))
    late = handle.wait()
    assert me not in TARGETS or torch.equal(late.to_local(), columns_of(me))


def test_dtensors_move_between_meshes() -> None:
    run_ranks(dtensors, 7)


def gradient_of_terms() -> None:
    """Plain shards; each term's gradient is the whole one."""
    me = dist.get_rank()
    known = Source(tuple(WHOLE.shape), torch.float32, Layout(Mesh.of([0, 1], hosts=[0, 0]), [Partial()]))
    term = torch.full(tuple(WHOLE.shape), float(me), requires_grad=True) if me < 2 else None
    total = weft.reshard(term, Mesh.of([2, 3], hosts=[0, 0]), [Shard(0)], src=known, **LIMIT)
    assert me not in (2, 3) or (total == 1).all()
    (total * 3).sum().backward()
    assert term is None or torch.equal(term.grad, torch.full_like(WHOLE, 3.0))


def test_the_gradient_of_terms() -> None:
    run_ranks(gradient_of_terms, 5)


def gradient_of_a_dtensor() -> torch.Tensor | None:
    me = dist.get_rank()
    a, b = meshes()
    layout = Layout(Mesh.grid(2, 2), [Shard(0), Shard(1)])
    local = shard(WHOLE, layout)[me].clone().requires_grad_() if me in SOURCES else None
    x = to_dtensor(local, a, [Shard(0), Shard(1)], WHOLE.shape) if local is not None else None
    y = weft.reshard(x, b, [Shard(0)], **LIMIT)
    (y.to_local() * rows_of(me) if me in TARGETS else y).sum().backward()
    return None if local is None else local.grad


def test_the_gradient_of_a_dtensor_lies_as_it_does() -> None:
    results = run_ranks(gradient_of_a_dtensor, 6)
    expected = shard(WHOLE, Layout(Mesh.grid(2, 2), [Shard(0), Shard(1)]))
    for rank in SOURCES:
        assert torch.equal(results[rank], expected[rank])


def state_dicts() -> None:
    """The trainer knows its side only, the engine its own; written in place, cast on the way."""
    me = dist.get_rank()
    a, _ = meshes()
    trains, infers = me in SOURCES, me in (4, 5)
    state = {"w": source(a), "steps": to_dtensor(torch.tensor(7), a, [Replicate()] * 2, ())} if trains else None
    engine = Mesh.of([4, 5], hosts=[0, 0])
    layouts = {"w": Layout(engine, [ShardSizes(1, (5, 1))]), "steps": Layout(engine, [Replicate()])}
    out = {
        "w": torch.zeros(7, 5 if me == 4 else 1, dtype=torch.bfloat16),
        "steps": torch.zeros((), dtype=torch.int64),
    }
    result = reshard_state_dict(
        state, layouts if infers else None, out=out if infers else None, cast=True, progress=True, **LIMIT
    )
    if not infers:
        assert result == {}
        return
    assert result["w"] is out["w"]
    assert torch.equal(out["w"], (WHOLE[:, :5] if me == 4 else WHOLE[:, 5:]).to(torch.bfloat16))
    assert int(out["steps"]) == 7


def test_a_state_dict_goes_from_trainer_to_engine() -> None:
    run_ranks(state_dicts, 7)


def strided() -> None:
    """What FSDP2 over tensor parallelism makes: the second axis cuts first."""
    me = dist.get_rank()
    mesh, hosts = DeviceMesh("cpu", [[0, 1], [2, 3]]), dict.fromkeys(range(4), 0)
    whole = torch.arange(16.0).reshape(8, 2)
    right_to_left = Layout(Mesh.of([[0, 1], [2, 3]], hosts=[[0, 0]] * 2), [Shard(0), Shard(0)], (1, 0))
    local = shard(whole, right_to_left)[me].clone()
    x = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
    assert layout_of_dtensor(x, hosts).order == (1, 0)
    assert torch.equal(x.full_tensor(), whole), "torch reads it the same way"
    y = weft.reshard(x, mesh, [Shard(0), Shard(0)], **LIMIT)
    assert torch.equal(y.to_local(), whole.chunk(4)[me])
    described = mesh_of(mesh, hosts)
    again = mesh_of(DeviceMesh("cpu", described.array.tolist(), mesh_dim_names=described.axes), hosts)
    assert again.ranks == (0, 1, 2, 3)


def test_strided_shards_of_fsdp2() -> None:
    run_ranks(strided, 4)


def refuse(kind: str) -> str:
    me = dist.get_rank()
    a, b = meshes()
    x = source(a)
    options: dict[str, object] = dict(LIMIT)
    mesh: object = b
    placements: list[object] = [Shard(0)]
    if kind == "placements":
        placements = [Shard(0), Replicate()]
    elif kind == "shape" and me == 4:
        options["out"] = torch.zeros(3, 3)
    elif kind == "dtype" and me in TARGETS:
        options["out"] = torch.zeros(rows_of(me).shape, dtype=torch.float64)
    elif kind == "mesh":
        options["group"] = dist.new_group([0, 1, 2, 3, 4])
        if me == 5:
            return "outside"
    elif kind == "plain" and me == 1:
        x = torch.ones(3)
    elif kind == "memory" and me == 2:
        memory = torch.zeros(12)
        x = to_dtensor(memory[:9].view(3, 3), a, [Shard(0), Shard(1)], WHOLE.shape)
        options["out"] = memory.view(2, 6)
    try:
        weft.reshard(x, mesh, placements, **options)  # type: ignore[arg-type]
    except (ValueError, PeerMismatch) as error:
        y = weft.reshard(source(a), b, [Shard(0)], **LIMIT) if kind != "mesh" else None
        assert y is None or me not in TARGETS or torch.equal(y.to_local(), rows_of(me))
        return f"{type(error).__name__}: {error}"
    return "no error"


REFUSALS = [  # what is wrong, what the ranks that did it say, and which they are
    ("placements", "got 2 placements", range(6)),
    ("shape", "local dst tensor of 'tensor' on rank 4 is ((3, 3), torch.float32), expected ((2, 6)", [4]),
    ("dtype", "torch.float64), expected", TARGETS),
    ("plain", "is a plain tensor of shape (3,), expected a DTensor", [1]),
    ("memory", "lies in the same memory as source", [2]),
    ("mesh", "the meshes have the ranks [5], which are not in the process group", range(5)),
]


def refuse_all() -> list[str]:
    return [refuse(kind) for kind, _, _ in REFUSALS]


def test_refusals_reach_all_ranks_and_break_nothing() -> None:
    results = run_ranks(refuse_all, 6, timeout=120.0)
    for rank, texts in enumerate(results):
        for (kind, message, guilty), text in zip(REFUSALS, texts, strict=True):
            if text == "outside":
                continue
            assert text.startswith("ValueError: " if rank in guilty else "PeerMismatch: "), (kind, rank, text)
            assert message in text or rank not in guilty, (kind, rank, text)
