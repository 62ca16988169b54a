"""DTensors as other libraries make them: strided, uneven, masked, on parts of a mesh, still being written."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard
from torch.utils.flop_counter import FlopCounterMode

import weft.reshard
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh
from weft.reference import shard
from weft.reshard import Source, reshard_state_dict

LIMIT = {"timeout": 30.0}


def value(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fsdp() -> None:
    """FSDP2 over tensor parallelism, of any size: what the second axis cut first goes to plain shards and back."""
    me = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for size in (8, 7, 5, 3, 1):
        torch.manual_seed(size)
        layer = nn.Linear(3, size, bias=False)
        whole = layer.weight.detach().clone()
        model = nn.Sequential(layer)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        weight = model[0].weight
        assert isinstance(weight.placements[0], _StridedShard)
        flat = weft.reshard(weight.detach(), mesh, [Shard(0), Shard(0)], **LIMIT)
        plain = Layout(Mesh.of([[0, 1], [2, 3]], hosts=[[0, 0]] * 2), [Shard(0), Shard(0)])
        assert torch.equal(flat.to_local(), shard(whole, plain)[me]), size
        back = weft.reshard(flat * 2, mesh, weight.placements, **LIMIT)
        assert torch.equal(back.to_local(), weight.to_local() * 2), size
        reshard_state_dict({"w": flat * 3}, {"w": weight}, **LIMIT)
        assert torch.equal(weight.full_tensor(), whole * 3), "in place, and torch reads it so"


def test_what_fsdp_makes_of_any_size() -> None:
    run_ranks(fsdp, 4)


def orders() -> None:
    """Three axes cut one dim; torch has two ways to say in which order."""
    me = dist.get_rank()
    mesh, shape = init_device_mesh("cpu", (2, 1, 3)), (13, 2)
    whole = value(1, shape)
    for order in ((0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)):
        layout = Layout(Mesh.of(mesh.mesh.numpy(), hosts=[[[0] * 3]] * 2), [Shard(0)] * 3, order)
        local = shard(whole, layout)[me].clone()
        spec = DTensorSpec(
            mesh,
            (Shard(0),) * 3,
            TensorMeta(torch.Size(shape), (2, 1), torch.float32),
            shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=order),),
        )
        x = DTensor(local, spec, requires_grad=False)
        y = weft.reshard(x, mesh, [Replicate()] * 3, **LIMIT)
        assert torch.equal(y.to_local(), whole), order
        strided = DTensorSpec._convert_shard_order_to_StridedShard(spec.shard_order, spec.placements, mesh)
        z = weft.reshard(y, mesh, strided, **LIMIT)
        assert torch.equal(z.to_local(), local), (order, strided)
        assert torch.equal(weft.reshard(z, mesh, [Shard(0)] + [Replicate()] * 2, **LIMIT).full_tensor(), whole)


def test_orders_of_cutting() -> None:
    run_ranks(orders, 6)


def negative_dims() -> None:
    me = dist.get_rank()
    here = Mesh.of([[0, 1], [2, 3]], hosts=[[0, 0]] * 2)
    whole = value(2, (3, 9))
    src = Layout(here, [Shard(-1), Shard(1)], (1, 0))
    twin = Layout(here, [Shard(1), Shard(1)], (1, 0))
    y = weft.reshard(
        shard(whole, twin)[me], here, [Shard(-2), Replicate()], src=Source((3, 9), whole.dtype, src), **LIMIT
    )
    assert torch.equal(y, whole.chunk(2)[me // 2])


def test_dims_that_count_from_the_end() -> None:
    run_ranks(negative_dims, 4)


def strange() -> list[str]:
    """What torch means something else by than its name says, or cannot be read: refused on all ranks."""
    me, texts = dist.get_rank(), []
    mesh, square = DeviceMesh("cpu", [0, 1]), value(3, (4, 4))
    turned = DeviceMesh("cpu", [1, 0])
    table = distribute_tensor(square, mesh, [Shard(0)])
    masked = nn.functional.embedding(distribute_tensor(torch.arange(4), mesh, [Replicate()]), table)
    norms = torch.linalg.vector_norm(table)
    good = distribute_tensor(square, mesh, [Shard(0)])
    pair = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    copies = distribute_tensor(square, pair["tp"], [Shard(0)])
    flat = distribute_tensor(value(4, (6, 4)), mesh, [Shard(1)]).reshape(24)
    cases = {
        "masked": lambda: weft.reshard(masked, mesh, [Replicate()], **LIMIT),
        "norm": lambda: weft.reshard(norms, mesh, [Replicate()], **LIMIT),
        "turned source": lambda: weft.reshard(
            DTensor.from_local(square.chunk(2)[me], turned, [Shard(0)], run_check=False), mesh, [Replicate()], **LIMIT
        ),
        "turned destination": lambda: weft.reshard(good, turned, [Shard(0)], **LIMIT),
        "copies": lambda: weft.reshard(copies, mesh, [Replicate()], **LIMIT),
        "terms": lambda: weft.reshard(good, mesh, [Partial()], **LIMIT),
        "dim": lambda: weft.reshard(good, mesh, [Shard(2)], **LIMIT),
        "other out": lambda: weft.reshard(
            good, mesh, [Shard(0)], out=distribute_tensor(square, mesh, [Shard(1)]), **LIMIT
        ),
        "viewed": lambda: weft.reshard(flat, mesh, [Replicate()], **LIMIT).to_local(),
    }
    for case, call in cases.items():
        try:
            result = call()
            texts.append(f"{case}: no error")
            if case == "viewed":
                assert torch.equal(result, value(4, (6, 4)).reshape(24))
        except (ValueError, PeerMismatch) as error:
            texts.append(f"{case}: {type(error).__name__}: {error}")
        assert torch.equal(weft.reshard(good, mesh, [Replicate()], **LIMIT).to_local(), square), case
    return texts


EXPECTED = {
    "masked": ("ValueError: placement of axis 0 is",),
    "norm": ("ValueError: placement of axis 0 is",),
    "turned source": ("ValueError: axis 0 of the DeviceMesh [1, 0]",),
    "turned destination": ("ValueError: axis 0 of the DeviceMesh [1, 0]",),
    "copies": ("PeerMismatch: source of tensor 'tensor' is",),
    "terms": ("ValueError: destination of tensor 'tensor' is",),
    "dim": ("ValueError: axis 0 is placed as S(2), but the tensor has 2 dims", "ValueError: axis 0 is placed as Shard"),
    "other out": ("ValueError: destination 'tensor' is",),
    "viewed": ("no error", "ValueError: "),
}


def test_what_cannot_be_right_is_refused() -> None:
    for texts in run_ranks(strange, 2):
        for text, (case, messages) in zip(texts, EXPECTED.items(), strict=True):
            assert any(text.startswith(f"{case}: {message}") for message in messages), text


def still_written() -> None:
    """A shard that a functional collective still writes; a tensor without memory; one made in inference mode."""
    me = dist.get_rank()
    mesh, here = DeviceMesh("cpu", [0, 1]), Mesh.of([0, 1], hosts=[0, 0])
    whole = value(5, (6, 4))
    late = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    assert isinstance(late._local_tensor, AsyncCollectiveTensor)
    assert torch.equal(weft.reshard(late, mesh, [Shard(1)], **LIMIT).to_local(), whole.chunk(2, dim=1)[me])
    known = Source((6, 4), torch.float32, Layout(here, [Replicate()]))
    late = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    plain = weft.reshard(late._local_tensor, here, [Shard(1)], src=known, **LIMIT)
    assert torch.equal(plain, whole.chunk(2, dim=1)[me])
    nothing = weft.reshard(torch._efficientzerotensor(6, 4), here, [Shard(1)], src=known, **LIMIT)
    assert torch.equal(nothing, torch.zeros(6, 2))
    with torch.inference_mode():
        made, out = whole.clone(), torch.zeros(6, 2)
    result = weft.reshard(made, here, [Shard(1)], src=known, out=out, **LIMIT)
    assert result is out
    assert torch.equal(out, whole.chunk(2, dim=1)[me])


def test_tensors_that_are_not_ready() -> None:
    run_ranks(still_written, 2)


def transformed() -> None:
    """Inside torch.func there is nothing that could be sent; a compiled function calls out."""
    me = dist.get_rank()
    here = Mesh.of([0, 1], hosts=[0, 0])
    known = Source((4, 3), torch.float32, Layout(here, [Shard(0)]))
    whole = value(6, (4, 3))
    mine = whole.chunk(2)[me]

    def columns(x: torch.Tensor) -> torch.Tensor:
        return weft.reshard(x, here, [Shard(1)], src=known, **LIMIT)

    with pytest.raises(ValueError, match=r"wrapped by torch\.func"):
        torch.func.vmap(columns)(mine.expand(2, 2, 3))
    with pytest.raises(ValueError, match=r"wrapped by torch\.func"):
        torch.func.grad(lambda x: columns(x).sum())(mine)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="has a tangent"):
        columns(torch.autograd.forward_ad.make_dual(mine, mine))
    with pytest.raises(ValueError, match="is on the meta device"):
        columns(mine.to("meta"))
    with FakeTensorMode(), pytest.raises(ValueError, match="fake tensors"):
        columns(mine)
    with pytest.raises(ValueError, match=r"inside torch\.jit\.trace"):
        torch.jit.trace(columns, mine)
    with torch.device("meta"), FlopCounterMode(display=False), torch.autocast("cpu"):
        assert torch.equal(columns(mine), whole.chunk(2, dim=1)[me])
    leaf = mine.clone().requires_grad_()
    result = torch.compile(lambda x: columns(x * 2) + 1, backend="eager")(leaf)
    assert torch.equal(result, whole.chunk(2, dim=1)[me] * 2 + 1)
    result.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


def test_inside_transformations() -> None:
    run_ranks(transformed, 2)


def subgroups() -> None:
    """Only some ranks call, on a group of their own; others do the same beside them; shapes change each time."""
    me = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([1, 3], [0, 2])]
    ranks = [1, 3] if me % 2 else [0, 2]
    group = groups[0] if me % 2 else groups[1]
    place, here = ranks.index(me), Mesh.of(ranks, hosts=[0, 0])
    for rows in (5, 2, 9, 5):
        whole = value(rows + 100 * (me % 2), (rows, 4))
        known = Source((rows, 4), torch.float32, Layout(here, [Shard(0)]))
        mine = shard(whole, known.layout)[me].clone()
        y = weft.reshard(mine, here, [Shard(1)], src=known, group=group, **LIMIT)
        assert torch.equal(y, whole.chunk(2, dim=1)[place])
    with pytest.raises(ValueError, match="not in the process group"):
        weft.reshard(mine, here, [Shard(1)], src=known, group=groups[1] if me % 2 else groups[0], **LIMIT)


def test_groups_of_some_ranks() -> None:
    run_ranks(subgroups, 4)
