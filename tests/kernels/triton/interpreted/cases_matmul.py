"""The matmul with epilogues, tile orders, places and signals, against double precision and against itself."""

import pytest
import torch
from matmuls import HALF, TILING, K, M, N, run, tensors
from torch.nn import functional as F

from weft.kernels import Ready, Rows, TileOutput, TileSchedule, Tiling
from weft.kernels import triton as kernels
from weft.overlap.streams.collectives import owner_order

ACTIVATIONS = {
    None: lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (1, 1, 1), (1, 100, 40), (3, 17, 33), (33, 64, 32), (61, 65, 50),
]  # fmt: skip


def close(got, want, k):
    relative = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=4e-6 * max(k, 1) ** 0.5 + 2e-6, rtol=relative)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, dtype):
    x, w, b, r = tensors(*shape, dtype)
    close(run(x, w, bias=b, residual=r), x.double() @ w.double().t() + b.double() + r.double(), shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_input(activation, dtype):
    x, w, b, r = tensors(20, 40, 50, dtype)
    pre = torch.empty_like(r)
    got = run(x, w, bias=b, residual=r, pre=pre, activation=activation)
    z = x.double() @ w.double().t() + b.double()
    close(pre, z, 40)
    close(got, ACTIVATIONS[activation](z) + r.double(), 40)


def test_same_bits_whatever_the_order_groups_rows_and_programs():
    x, w, b, r = tensors(70, 50, 90)
    whole = run(x, w, bias=b, residual=r)
    generator = torch.Generator().manual_seed(5)
    for tile_m, tile_n, programs in [(24, 32, None), (32, 64, 2), (7, 96, 1), (2**62, 2**40, None)]:
        tiling = Tiling(70, 90, tile_m, tile_n)
        order = torch.randperm(tiling.count, generator=generator).to(torch.int32)
        groups = min(3, tiling.count)
        schedule = TileSchedule(tiling, order=order, group_of=[tile % groups for tile in range(tiling.count)])
        done = torch.zeros(groups, dtype=torch.int32)
        assert torch.equal(run(x, w, bias=b, residual=r, schedule=schedule, done=done, programs=programs), whole)
        assert torch.equal(done, schedule.group_sizes)
    assert torch.equal(run(x[:33], w, bias=b, residual=r[:33]), whole[:33])
    assert torch.equal(run(x, w, bias=b, residual=r, programs=2), whole)


def test_strided_rows_and_in_place_residual():
    x, w, b, r = tensors(37, 40, 50)
    want = run(x, w, bias=b, residual=r)
    wide_x, wide_out = torch.zeros(37, 60), torch.full((37, 90), 7.0)
    wide_x[:, 10:50], wide_out[:, 20:70] = x, r
    view = wide_out[:, 20:70]
    run(wide_x[:, 10:50], w, bias=b, residual=view, out=view)
    assert torch.equal(view, want)
    assert (wide_out[:, :20] == 7).all()
    assert (wide_out[:, 70:] == 7).all()


def test_rows_from_anywhere_and_tiles_to_anywhere():
    """x in two buffers with its rows shuffled; each tile end to end in one flat buffer; counters by address."""
    x, w, *_ = tensors(M, K, N)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    rows = Rows.stack([x[:30].clone(), torch.cat([x[30:], x[30:]], dim=1)[:, :K]]).gather(order)
    flat, places, at = torch.full((M * N,), float("nan")), [], 0
    for tile in range(TILING.count):
        m0, m1, n0, n1 = TILING.box(tile)
        places.append(flat[at : at + (m1 - m0) * (n1 - n0)].view(m1 - m0, n1 - n0))
        at += places[-1].numel()
    done = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    schedule = TileSchedule(TILING, group_of=[tile % 2 for tile in range(8)])
    addresses = torch.tensor([t.data_ptr() for t in done])
    run(rows, w, out=TileOutput(TILING, tuple(places)), schedule=schedule, done=addresses)
    want = run(x, w)[order]
    for tile, place in enumerate(places):
        m0, m1, n0, n1 = TILING.box(tile)
        assert torch.equal(place, want[m0:m1, n0:n1])
    assert [t.item() for t in done] == [4, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_into_the_owners_buffers(dtype):
    """Two ranks in turn write rows into their owners' buffers, then each owner sums in rank order."""
    ranks, bounds = 2, [0, 25, 48]
    tiling = Tiling(48, 64, 16, 32)  # the second row of tiles has two owners
    inputs = [tensors(48, 20, 64, dtype, seed=rank) for rank in range(ranks)]
    buffers = [torch.full((ranks, bounds[p + 1] - bounds[p], 64), float("nan"), dtype=dtype) for p in range(ranks)]
    arrived = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]
    products = []
    for rank, (x, w, *_) in enumerate(inputs):
        rows = kernels.OwnerRows.of(bounds, [b[rank].data_ptr() for b in buffers], 64, dtype, "cpu")
        order = owner_order(tiling, bounds, rank)
        assert tiling.box(order[0])[0] == (16 if rank == 0 else 0)
        done = torch.tensor([arrived[owner][rank:].data_ptr() for owner in range(ranks)])
        run(x, w, out=rows, schedule=TileSchedule(tiling, order=order), done=done)
        products.append(run(x, w))
    assert [t.tolist() for t in arrived] == [[4, 4], [4, 4]]
    for owner in range(ranks):
        out = torch.empty(buffers[owner].shape[1:], dtype=dtype)
        kernels.sum_in_order(buffers[owner], out=out, ready=Ready(arrived[owner], rows=1, value=4, timeout=1))
        part = slice(bounds[owner], bounds[owner + 1])
        assert torch.equal(out, (products[0][part].float() + products[1][part].float()).to(dtype))


def test_the_default_blocks():
    x, w, b, _ = tensors(70, 33, 65)
    close(run(x, w, bias=b, config=None), x.double() @ w.double().t() + b.double(), 33)


X, W = torch.ones(M, K), torch.ones(N, K)


def counters(n):
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(X.double(), W.double()), "float16, bfloat16 or float32"),
        (lambda: run(X.bfloat16(), W), "needs a weight packed from"),
        (lambda: kernels.linear(X, W.view(-1)[1:], N, out=X), "make it with PackedWeight.from_dense"),
        (lambda: run(X, W, bias=torch.ones(N + 1)), rf"bias must be .* \[{N}\]"),
        (lambda: run(X, W, residual=torch.ones(1, N)), "residual must be"),
        (lambda: run(X, W, out=torch.ones(M, N + 1)), "out must be"),
        (lambda: run(X, W, out=torch.ones(N, M).t()), "must be contiguous"),
        (lambda: run(X, W, activation="tanh"), "activation must be one of"),
        (lambda: run(X, W, schedule=TileSchedule(Tiling(M, N + 1, 24, 32))), "the schedule is for"),
        (lambda: run(X, W, done=counters(1)), "needs schedule="),
        (lambda: run(X, W, schedule=TileSchedule(TILING), done=torch.zeros(1)), "int32"),
        (lambda: run(X, W, schedule=TileSchedule(TILING), done=counters(0)), "at least 1"),
        (lambda: run(X, W, ready=Ready(counters(1), rows=HALF)), "at least 2"),
        (lambda: run(X, W, ready=Ready(counters(9), rows=0)), "at least 1"),
        (lambda: run(X, W, ready=Ready(counters(9), rows=M, timeout=float("inf"))), "timeout must be"),
        (lambda: run(X, W, ready=Ready(counters(9), rows=M), local_rows=(0, M + 1)), "local_rows must be"),
        (lambda: kernels.wait(counters(2), counters(1)), "values needs at least 2"),
        (lambda: kernels.wait(counters(2).to("meta"), counters(2)), "must be on cpu"),
        (
            lambda: kernels.OwnerRows.of([0, 4, 9], [0, 0], 8, torch.float32, "cpu"),
            "all owners but the last ones must own as many rows",
        ),
    ],
)  # fmt: skip
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
