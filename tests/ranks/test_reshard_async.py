"""Reshards under way: sources that change or vanish, handles waited for in any order or never, errors in between."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import weft.reshard
from weft.comm import Group
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh
from weft.reshard import Executor, Source, TensorSpec, plan_tensors, reshard_state_dict

LIMIT = {"timeout": 30.0}
SHAPE = (300, 200)


def value(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sources() -> None:
    """The source is changed, or freed, as soon as the call is back: what arrives is what was given."""
    me = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1])
    for seed, spoil in enumerate(["local", "wrapper", "data", "freed", "shrunk", "resized"]):
        x = distribute_tensor(value(seed), mesh, [Shard(0)])
        handle = weft.reshard(x, mesh, [Shard(1)], async_op=True, **LIMIT)
        local = x.to_local()
        if spoil == "local":
            local.fill_(-1.0)
        elif spoil == "wrapper":
            x.mul_(0)
        elif spoil == "data":
            local.data.fill_(-2.0)
        elif spoil == "shrunk":
            local.untyped_storage().resize_(0)
        elif spoil == "resized":
            local.resize_(3)
        del x, local
        garbage = [torch.full((150, 200), -3.0) for _ in range(4)]
        y = handle.wait()
        assert torch.equal(y.to_local(), value(seed).chunk(2, dim=1)[me]), spoil
        assert handle.wait() is y
        assert len(garbage) == 4


def test_sources_may_change_at_once() -> None:
    run_ranks(sources, 2)


def orders() -> None:
    """Several under way on one host, waited for in another order on each rank; refused calls and errors in between."""
    me = dist.get_rank()
    mesh = DeviceMesh("cpu", [0, 1, 2])
    x = [distribute_tensor(value(seed), mesh, [Shard(0)]) for seed in range(6)]
    for round in range(3):
        handles = {}
        for seed in range(6):
            to = [Shard(1)] if seed % 2 else [Replicate()]
            handles[seed] = weft.reshard(x[seed], mesh, to, async_op=True, **LIMIT)
            with pytest.raises((ValueError, PeerMismatch), match="got 2 placements"):
                weft.reshard(x[seed], mesh, to * 2, **LIMIT)
        order = [(seed * (1, 5)[me % 2] + me + round) % 6 for seed in range(6)]
        for seed in sorted(handles) if round == 0 else order:
            y = handles[seed].wait().to_local()
            assert torch.equal(y, value(seed).chunk(3, dim=1)[me] if seed % 2 else value(seed)), (round, seed)


def test_any_order_and_refusals_in_between() -> None:
    run_ranks(orders, 3)


def dropped() -> None:
    """Nobody waits on rank 0; what it had to send arrives, what it was to receive is written and marked."""
    me = dist.get_rank()
    here = Mesh.of([0, 1], hosts=[0, 0])
    known = Source(SHAPE, torch.float32, Layout(here, [Shard(0)]))
    for seed in range(4):
        out = torch.zeros(300, 100)
        rows = value(seed).chunk(2)[me].clone()
        handle = weft.reshard(rows, here, [Shard(1)], src=known, out=out, async_op=True, **LIMIT)
        watch = weakref.ref(handle)
        if me == 0:
            del handle, rows
            gc.collect()
            assert watch() is None
        else:
            assert torch.equal(handle.wait(), value(seed)[:, 100:])
        dist.barrier()
        columns = weft.reshard(value(seed).chunk(2)[me], here, [Shard(1)], src=known, **LIMIT)
        assert torch.equal(columns, value(seed).chunk(2, dim=1)[me])
        if me == 0:
            for _ in range(500):  # the transfer of before has no handle to wait for
                if out._version:
                    break
                dist.distributed_c10d._get_default_store().check(["nothing"])
            assert torch.equal(out, value(seed)[:, :100])
            assert out._version > 0


def test_a_handle_may_be_dropped() -> None:
    run_ranks(dropped, 2)


def modes() -> None:
    """The result is of the mode in which it was asked for; its gradient flows wherever it is waited for."""
    me = dist.get_rank()
    here = Mesh.of([0, 1], hosts=[0, 0])
    known = Source((6, 4), torch.float32, Layout(here, [Shard(0)]))
    x = value(1, (6, 4)).chunk(2)[me].clone().requires_grad_()
    handle = weft.reshard(x, here, [Shard(1)], src=known, async_op=True, **LIMIT)
    with torch.inference_mode():
        y = handle.wait()
    weights = value(2, (6, 4)).chunk(2, dim=1)[me]
    (y * weights).sum().backward()
    assert torch.equal(x.grad, value(2, (6, 4)).chunk(2)[me])
    with torch.inference_mode():
        handle = weft.reshard(x, here, [Shard(1)], src=known, async_op=True, **LIMIT)
    y = handle.wait()
    assert y.is_inference()
    assert torch.equal(y, value(1, (6, 4)).chunk(2, dim=1)[me])
    assert "finished" in repr(handle)


def test_modes_of_a_handle() -> None:
    run_ranks(modes, 2)


def failing_body() -> None:
    """An error of the user's while a transfer is under way does not tear it: the peers get what they need."""
    group, me = Group(dist.group.WORLD, timeout=30.0), dist.get_rank()
    src, dst = Layout(Mesh.of([0], hosts=[0]), [Replicate()]), Layout(Mesh.of([1, 2], hosts=[1, 1]), [Replicate()])
    plan = plan_tensors([TensorSpec("x", SHAPE, torch.float32, src, dst, torch.float32)])
    out = torch.zeros(SHAPE)

    def body() -> None:
        with Executor(plan, group) as executor:
            executor.start({0: value(3)} if me == 0 else {}, {0: out} if me else {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert me == 0 or torch.equal(out, value(3))
    assert (out._version > 0) == (me > 0)
    state = {"x": value(4)} if me == 0 else None
    known = {"x": Source(SHAPE, torch.float32, src)}
    handle = reshard_state_dict(state, {"x": dst}, src=known, async_op=True, **LIMIT)
    assert me == 0 or torch.equal(handle.wait()["x"], value(4))
    assert me > 0 or handle.wait() == {}


def test_an_error_beside_a_transfer() -> None:
    run_ranks(failing_body, 3)


# Gradients --------------------------------------------------------------------------------------------------


def chains() -> None:
    """Rank 2 has nothing of the middle, rank 0 nothing of the end: all join in both backward passes."""
    me = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [0, 1], [1, 2])]
    local = value(5, (7, 4)).chunk(2)[me // 2].clone().requires_grad_() if me != 1 else None
    x = None if local is None else DTensor.from_local(local, meshes[0], [Shard(0)], shape=(7, 4), stride=(4, 1))
    y = weft.reshard(x, meshes[1], [Shard(1)], **LIMIT)
    z = weft.reshard(y * 2, meshes[2], [Replicate()], dtype=torch.float64, **LIMIT)
    end = (z.to_local() * value(6, (7, 4))) if me else z
    end.sum().backward()
    if local is not None:
        assert torch.allclose(local.grad, 2 * value(6, (7, 4)).chunk(2)[me // 2])


def test_gradients_of_a_chain() -> None:
    run_ranks(chains, 3)


def backward_in_another_order() -> list[str]:
    """Equal plans, so that only the number of the call tells them apart."""
    me, texts = dist.get_rank(), []
    here = Mesh.of([0, 1], hosts=[0, 0])
    known = Source((6, 4), torch.float32, Layout(here, [Shard(0)]))
    x = [value(seed, (6, 4)).chunk(2)[me].clone().requires_grad_() for seed in range(2)]
    y = [weft.reshard(each, here, [Shard(1)], src=known, **LIMIT) for each in x]
    for index in (0, 1) if me else (1, 0):
        try:
            (y[index] * (index + 1)).sum().backward()
            texts.append("no error")
        except PeerMismatch as error:
            texts.append(str(error))
    return texts


def test_ranks_that_go_back_in_different_orders_notice() -> None:
    for texts in run_ranks(backward_in_another_order, 2):
        assert all("gradient of reshard" in text and "rank 1" in text for text in texts), texts


def wrong_gradients() -> list[str]:
    me, texts = dist.get_rank(), []
    here = Mesh.of([0, 1], hosts=[0, 0])

    def ask(x: torch.Tensor, placement: object, **options: object) -> None:
        known = Source((2, 4), torch.float32, Layout(here, [placement]))  # type: ignore[list-item]
        weft.reshard(x, here, [Shard(1)], src=known, **options, **LIMIT)  # type: ignore[arg-type]

    def half() -> None:
        with torch.set_grad_enabled(me == 0):
            ask(value(1, (1, 4)).requires_grad_(), Shard(0))

    whole = value(me, (2, 4)).requires_grad_()
    cases = {
        "max": lambda: ask(whole, Partial("max")),
        "product": lambda: ask(whole, Partial("product")),
        "out": lambda: ask(whole, Partial(), out=torch.zeros(2, 2) if me else None),
        "no_grad": half,
    }
    for case, call in cases.items():
        try:
            call()
            texts.append(f"{case}: no error")
        except ValueError as error:
            texts.append(f"{case}: {error}")
        ask(whole, Partial())
        with torch.no_grad():
            ask(whole, Partial("max"))
    return texts


def test_gradients_that_would_be_wrong_are_refused() -> None:
    reasons = ["reduced by 'max'", "reduced by 'product'", "rank 1 gives out=", "rank 1 records nothing"]
    for texts in run_ranks(wrong_gradients, 2):
        for text, reason in zip(texts, reasons, strict=True):
            assert reason in text, text


def placements_of_gradients() -> None:
    """Leaves of every placement get the gradient that torch's own redistribute gives them; results are freed."""
    mesh = DeviceMesh("cpu", [0, 1])
    for src in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        for dst in ([Shard(0)], [Shard(1)], [Replicate()]):
            grads = []
            for move in (lambda t, to: weft.reshard(t, mesh, to, **LIMIT), lambda t, to: t.redistribute(mesh, to)):
                if src == [Partial()]:
                    leaf = DTensor.from_local(value(7, (5, 4)), mesh, src, run_check=False)
                else:
                    leaf = distribute_tensor(value(7, (5, 4)), mesh, src)
                leaf = leaf.detach().requires_grad_()
                result = move(leaf, dst)
                weights = distribute_tensor(value(8, (5, 4)), mesh, dst)
                (result * weights).sum().full_tensor().backward()
                grads.append(leaf.grad.full_tensor())
                freed = weakref.ref(result)
                del result
                assert freed() is None, "the graph holds its result"
            assert torch.equal(grads[0], grads[1]), (src, dst)


def test_gradients_are_torchs() -> None:
    run_ranks(placements_of_gradients, 2)
