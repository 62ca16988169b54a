"""out = activation(x w^T + bias) + residual, tile by tile in a given order, with signals in and out.

    x [M, K]   w [N, K]   bias [N]   residual, pre, out [M, N]

Each program takes the tiles at, at + programs, ... of `order`. A tile may wait until its rows of x have arrived, goes
to `out` or to a place of its own, and adds one to the counter of its group when all of it is stored. K is summed in
steps of BLOCK_K from the first to the last, whatever the tiles, their order and M, so the bits don't depend on those.

The kernel comes first, then its launcher, with the arguments of `weft.kernels.cpu.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.tiles import Ready, Rows, TileOutput, TileSchedule, Tiling
from weft.kernels.triton import launch
from weft.kernels.triton.launch import DevicePlaces, DeviceSchedule, OwnerRows, RowSteps
from weft.kernels.triton.signals import Late, nanoseconds, signal, wait_for

ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "relu")


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        z = z * tl.sigmoid(2.0 * inner)  # (1 + tanh(u)) / 2 is sigmoid(2 u)
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "relu":
        z = tl.where(z > 0, z, tl.where(z != z, z, 0.0))
    return z


@triton.jit
def matmul_kernel(
    x, x_rows, w, bias, residual, pre, out, places, place_strides, out_rows, order, group_of, done, done_at, ready,
    ready_steps, late, M, N, K, stride_x, stride_w, stride_residual, stride_pre, stride_out, tile_m, tile_n, tiles,
    ready_rows, ready_value, local_start, local_stop, owner_rows, limit_ns,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`x_rows` and `out_rows`: rows of x and of out by address; `places`, `place_strides`: tiles of out.

    `done_at`: counters by address, of groups, or of the owners of `owner_rows` rows each where rows are by address.
    `ready_steps`: one counter for all rows, and what it must be for each. `ALIGNED`: what is stored by address starts
    at multiples of 16 bytes, so that a thread stores 16 at once.
    """
    tile_cols = tl.cdiv(N, tile_n)
    for at in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if order is None:  # noqa: SIM108 - what is None chooses the branch when this is compiled
            tile = _swizzled(at, tl.cdiv(M, tile_m), tile_cols)
        else:
            tile = tl.load(order + at)
        m0 = tile // tile_cols * tile_m
        n0 = tile % tile_cols * tile_n
        m1 = tl.minimum(m0 + tile_m, M)
        n1 = tl.minimum(n0 + tile_n, N)
        arrived = tile >= 0
        if ready is not None:
            for block in range(m0 // ready_rows, tl.cdiv(m1, ready_rows)):
                local = (block * ready_rows >= local_start) & (tl.minimum((block + 1) * ready_rows, M) <= local_stop)
                if not local:
                    if ready_steps is None:
                        there = wait_for(ready + block, ready_value, limit_ns, late, block, THREADS, INTERPRET)
                    else:
                        step = tl.load(ready_steps + block)
                        there = wait_for(ready, step, limit_ns, late, block, THREADS, INTERPRET)
                    arrived = arrived & there
        if arrived:
            wide = tl.cdiv(n1 - n0, BLOCK_N)
            for part in range(tl.cdiv(m1 - m0, BLOCK_M) * wide):
                row = m0 + part // wide * BLOCK_M
                col = n0 + part % wide * BLOCK_N
                z = _product(
                    x, x_rows, w, row, col, m1, n1, K, stride_x, stride_w, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                )
                if bias is not None:
                    cols = col + tl.arange(0, BLOCK_N)
                    z += tl.load(bias + cols, mask=cols < n1, other=0.0).to(tl.float32)[None, :]
                if pre is not None:
                    _store(_at(pre, row, col, stride_pre), stride_pre, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
                z = activate(z, ACTIVATION)
                if residual is not None:
                    z += _load(
                        _at(residual, row, col, stride_residual), stride_residual, m1 - row, n1 - col, BLOCK_M, BLOCK_N
                    )
                if out_rows is not None:
                    kind: tl.constexpr = w.dtype.element_ty
                    _store_rows(out_rows + row, col, z, m1 - row, n1 - col, kind, ALIGNED, BLOCK_M, BLOCK_N)
                elif places is None:
                    _store(_at(out, row, col, stride_out), stride_out, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
                else:
                    place = tl.load(places + tile).to(tl.pointer_type(w.dtype.element_ty))
                    stride = tl.load(place_strides + tile)
                    if ALIGNED:
                        place = tl.multiple_of(place, 16)
                        stride = tl.multiple_of(stride, 16 // (w.dtype.element_ty.primitive_bitwidth // 8))
                    _store(_at(place, row - m0, col - n0, stride), stride, z, m1 - row, n1 - col, BLOCK_M, BLOCK_N)
            if done is not None:
                signal(done + tl.load(group_of + tile))
            if done_at is not None:
                if out_rows is None:
                    signal(tl.load(done_at + tl.load(group_of + tile)).to(tl.pointer_type(tl.int32)))
                else:
                    for owner in range(m0 // owner_rows, tl.cdiv(m1, owner_rows)):
                        signal(tl.load(done_at + owner).to(tl.pointer_type(tl.int32)))


@triton.jit
def _swizzled(at, rows, cols, BAND: tl.constexpr = 8):
    """Tiles in bands of a few rows, column by column: neighbours in time share rows of x and of w in the cache."""
    band = at // (BAND * cols)
    height = tl.minimum(rows - band * BAND, BAND)
    inside = at % (BAND * cols)
    return (band * BAND + inside % height) * cols + inside // height


@triton.jit
def _at(matrix, row, col, stride):
    """Where a block starts; the offsets inside it then fit 32 bits, which halves the registers that they take."""
    return matrix + tl.cast(row, tl.int64) * stride + col


@triton.jit
def _load(start, stride, height, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    return tl.load(start + (rows[:, None] * stride + cols[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(start, stride, z, height, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    tl.store(start + (rows[:, None] * stride + cols[None, :]), z.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _store_rows(
    starts, col, z, height, width, kind: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    at = tl.load(starts + rows, mask=rows < height, other=0).to(tl.pointer_type(kind))[:, None]
    if ALIGNED:
        at = tl.multiple_of(at, [16, 16])
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    tl.store(at + (col + cols)[None, :], z.to(kind), mask=inside)


@triton.jit
def _product(
    x, x_rows, w, row, col, m1, n1, K, stride_x, stride_w, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] of x w^T in float32 from (row, col) on; rows from m1 and columns from n1 on are not read."""
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if x_rows is None:
        at_x = _at(x, row, 0, stride_x) + (rows[:, None] * stride_x + ks[None, :])
    else:
        starts = tl.load(x_rows + row + rows, mask=rows < m1 - row, other=0).to(tl.pointer_type(w.dtype.element_ty))
        at_x = starts[:, None] + ks[None, :]
    at_w = _at(w, col, 0, stride_w) + (cols[:, None] * stride_w + ks[None, :])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        some_x = tl.load(at_x + k, mask=(rows < m1 - row)[:, None] & (ks < K - k)[None, :], other=0.0)
        some_w = tl.load(at_w + k, mask=(cols < n1 - col)[:, None] & (ks < K - k)[None, :], other=0.0)
        total = tl.dot(some_x, tl.trans(some_w), total, input_precision=PRECISION)
    return total


LAYOUT = "rows"  # of a weight: the GPU reads its rows as they are
TORCH_MULTIPLIES = frozenset(launch.DTYPES)
TAKES_ADDRESSES = False


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> Tensor:
    """A new tensor on the device."""
    return torch.empty(shape, dtype=dtype, device="cpu" if launch.INTERPRETED else device)


def packed_elements(n: int, k: int, layout: str) -> int:
    """How many elements a packed weight [N, K] has; sizes may be symbolic."""
    return n * k


def pack(w: Tensor, isa_name: str = "", threads: int = 0) -> Tensor:
    """[N, K] of any strides -> flat: rows end to end, which is the same memory where they lie so already."""
    launch.dtype_of(w, "w")
    _check_layout(isa_name)
    return w.contiguous().view(-1)


def unpack(packed: Tensor, n: int, k: int, isa_name: str = "", threads: int = 0) -> Tensor:
    """The flat form -> a new [N, K]."""
    return packed.view(n, k).clone()


def _check_layout(layout: str) -> None:
    if layout not in ("", LAYOUT):
        raise ValueError(f"a weight for the GPU has the layout {LAYOUT!r}, got {layout!r}; pack it again on the GPU")


def linear(
    x: Tensor | Rows,
    packed: Tensor,
    n: int,
    *,
    out: Tensor | TileOutput | DevicePlaces | OwnerRows,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pre: Tensor | None = None,
    isa_name: str = "",
    threads: int = 0,
    schedule: TileSchedule | DeviceSchedule | None = None,
    done: Tensor | None = None,
    ready: Ready | RowSteps | None = None,
    local_rows: tuple[int, int] = (0, 0),
    late: Late | None = None,
    programs: int | None = None,
    config: launch.Config | None = None,
) -> None:
    """out[M, N] = activation(x[M, K] w[N, K]^T + bias[N]) + residual[M, N]; `pre` takes the activation's input.

    `done` is int32, a counter a group, or int64, the address of each group's counter, which may be a peer's; with
    `OwnerRows` that of each owner's, to which every tile with rows of the owner adds one. A tile waits for the
    counters of its rows in `ready`, other than those of rows inside `local_rows`. With `late`, nothing
    here waits for the device, and `late.check` tells later; without, a time-out is raised here. `programs` makes the
    kernel persistent: as many programs take turns with the tiles. `isa_name` and `threads` are for the CPU's.

    This has never run on a GPU: it was run in Triton's interpreter and compiled for the targets of `compile.ARCHS`.
    """
    _check_layout(isa_name)
    m, k, dtype = _check_inputs(x, packed, n, activation)
    device = packed.device
    for t, name, shape in ((residual, "residual", (m, n)), (pre, "pre", (m, n)), (bias, "bias", (n,))):
        if t is not None:
            launch.like(t, name, shape, dtype, device)
    chosen = config or launch.matmul_config(dtype, m, device)
    tables = None if schedule is None else DeviceSchedule.of(schedule, device)
    tiling = _tiling(m, n, tables, chosen)
    target, places, owned = _target(out, tiling, tables, m, n, dtype, device)
    if done is not None:
        _check_done(done, tables, owned, device)
    mine = late or Late.on(device)
    if ready is not None:
        _check_ready(ready, m, local_rows, device)
    if not tiling.count:
        return
    counts = done is not None and done.dtype == torch.int32
    matmul_kernel[(min(programs or tiling.count, tiling.count),)](
        x if isinstance(x, Tensor) else None, x.addresses.to(device) if isinstance(x, Rows) else None, packed, bias,
        residual, pre, target, None if places is None else places.addresses, None if places is None else places.strides,
        None if owned is None else owned.addresses,
        None if tables is None else tables.order, None if tables is None else tables.group_of,
        done if counts else None, None if counts else done, None if ready is None else ready.counters,
        ready.steps if isinstance(ready, RowSteps) else None, mine.flag,
        m, n, k, x.stride(0) if isinstance(x, Tensor) else 0, k, _stride(residual), _stride(pre), _stride(target),
        min(tiling.tile_m, m), min(tiling.tile_n, -(-n // 32) * 32), tiling.count, 1 if ready is None else ready.rows,
        ready.value if isinstance(ready, Ready) else 0, *local_rows, 1 if owned is None else owned.owner_rows,
        1 if ready is None else nanoseconds(ready.timeout), ACTIVATION=activation, PRECISION="ieee",
        ALIGNED=any(by_address is not None and by_address.aligned for by_address in (places, owned)),
        THREADS=32 * chosen.warps, INTERPRET=launch.INTERPRETED,
        **chosen.launch,
    )  # fmt: skip
    if ready is not None and late is None:
        mine.check(ready.what, seconds=ready.timeout, each=f" ({ready.rows} rows each)")


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _check_inputs(x: Tensor | Rows, packed: Tensor, n: int, activation: str | None) -> tuple[int, int, torch.dtype]:
    m, k = (x.m, x.k) if isinstance(x, Rows) else x.shape
    launch.on_device(packed, "the weight")
    dtype = launch.dtype_of(packed, "the weight")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    if x.dtype != dtype:
        raise ValueError(f"x is {x.dtype} and needs a weight packed from {x.dtype}, got {dtype}")
    if packed.shape != (n * k,) or not packed.is_contiguous():
        raise ValueError(
            f"a weight [{n}, {k}] for the GPU is a contiguous tensor of {n * k} elements, got {list(packed.shape)}; "
            f"make it with PackedWeight.from_dense"
        )
    if isinstance(x, Tensor):
        launch.like(x, "x", (m, k), dtype, packed.device)
    return m, k, dtype


def _tiling(m: int, n: int, tables: DeviceSchedule | None, config: launch.Config) -> Tiling:
    if tables is None:
        blocks = dict(config.blocks)
        return Tiling(m, n, blocks["BLOCK_M"], max(blocks["BLOCK_N"], 32))
    if (tables.tiling.m, tables.tiling.n) != (m, n):
        raise ValueError(
            f"the schedule is for an output [{tables.tiling.m}, {tables.tiling.n}], this one is [{m}, {n}]"
        )
    return tables.tiling


def _target(
    out: Tensor | TileOutput | DevicePlaces | OwnerRows, tiling: Tiling, tables: DeviceSchedule | None, m: int, n: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor | None, DevicePlaces | None, OwnerRows | None]:  # fmt: skip
    if isinstance(out, Tensor):
        launch.like(out, "out", (m, n), dtype, device)
        return out, None, None
    if isinstance(out, OwnerRows):
        if (out.m, out.n, out.dtype) != (m, n, dtype):
            raise ValueError(f"out must be {dtype} [{m}, {n}] like x w^T, got {out.dtype} [{out.m}, {out.n}]")
        return None, None, out
    if tables is None or tables.tiling != out.tiling:
        raise ValueError(f"places for {out.tiling} need a schedule with that tiling, got {tables and tables.tiling}")
    places = DevicePlaces.of(out, device)
    if tiling.count and places.dtype != dtype:
        raise ValueError(f"out must be {dtype} like x, got {places.dtype}")
    return None, places, None


def _check_done(done: Tensor, tables: DeviceSchedule | None, owned: OwnerRows | None, device: torch.device) -> None:
    if owned is not None:
        launch.counters(done, "done", owned.owners, device, torch.int64)
        return
    if tables is None:
        raise ValueError("done= counts the tiles of groups, so it needs schedule= to say which those are")
    dtype = torch.int64 if done.dtype == torch.int64 else torch.int32
    launch.counters(done, "done", tables.groups, device, dtype)


def _check_ready(ready: Ready | RowSteps, m: int, local_rows: tuple[int, int], device: torch.device) -> None:
    if ready.rows < 1:
        raise ValueError(f"ready.rows is the number of rows that a counter covers, at least 1; got {ready.rows}")
    if not 0 <= local_rows[0] <= local_rows[1] <= m:
        raise ValueError(f"local_rows must be a range inside the {m} rows of x, got {local_rows}")
    nanoseconds(ready.timeout)
    if isinstance(ready, RowSteps):
        launch.counters(ready.steps, "ready.steps", -(-m // ready.rows), device)
    launch.counters(ready.counters, "ready.counters", 1 if isinstance(ready, RowSteps) else -(-m // ready.rows), device)
