"""The launcher of the matmul with signals: the arguments of `weft.kernels.cpu.linear`, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.tiles import Ready, Rows, TileOutput, TileSchedule, Tiling
from weft.kernels.triton import checks, configs
from weft.kernels.triton.activations import ACTIVATIONS
from weft.kernels.triton.late import Late, nanoseconds
from weft.kernels.triton.matmul import matmul_kernel
from weft.kernels.triton.tables import DevicePlaces, DeviceSchedule

LAYOUT = "rows"  # of a weight: the GPU reads its rows as they are
TORCH_MULTIPLIES = frozenset(checks.DTYPES)
TAKES_ADDRESSES = False


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> Tensor:
    """A new tensor on the device."""
    return torch.empty(shape, dtype=dtype, device="cpu" if checks.INTERPRETED else device)


def packed_elements(n: int, k: int, layout: str) -> int:
    """How many elements a packed weight [N, K] has; sizes may be symbolic."""
    return n * k


def pack(w: Tensor, isa_name: str = "", threads: int = 0) -> Tensor:
    """[N, K] of any strides -> flat: rows end to end, which is the same memory where they lie so already."""
    checks.dtype_of(w, "w")
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
    out: Tensor | TileOutput | DevicePlaces,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pre: Tensor | None = None,
    isa_name: str = "",
    threads: int = 0,
    schedule: TileSchedule | DeviceSchedule | None = None,
    done: Tensor | None = None,
    ready: Ready | None = None,
    local_rows: tuple[int, int] = (0, 0),
    late: Late | None = None,
    programs: int | None = None,
    config: configs.Config | None = None,
) -> None:
    """out[M, N] = activation(x[M, K] w[N, K]^T + bias[N]) + residual[M, N]; `pre` takes the activation's input.

    `done` is int32, a counter a group, or int64, the address of each group's counter, which may be a peer's. A tile
    waits for the counters of its rows in `ready`, other than those of rows inside `local_rows`. With `late`, nothing
    here waits for the device, and `late.check` tells later; without, a time-out is raised here. `programs` makes the
    kernel persistent: as many programs take turns with the tiles. `isa_name` and `threads` are for the CPU's.

    This has never run on a GPU: it was run in Triton's interpreter and compiled for sm80, sm90 and sm100.
    """
    _check_layout(isa_name)
    m, k, dtype = _check_inputs(x, packed, n, activation)
    device = packed.device
    for t, name, shape in ((residual, "residual", (m, n)), (pre, "pre", (m, n)), (bias, "bias", (n,))):
        if t is not None:
            checks.like(t, name, shape, dtype, device)
    chosen = config or configs.MATMUL[dtype][0]
    tables = None if schedule is None else DeviceSchedule.of(schedule, device)
    tiling = _tiling(m, n, tables, chosen)
    target, places = _target(out, tiling, tables, m, n, dtype, device)
    if done is not None:
        _check_done(done, tables, device)
    mine = late or Late.on(device)
    if ready is not None:
        _check_ready(ready, m, local_rows, device)
    if not tiling.count:
        return
    counts = done is not None and done.dtype == torch.int32
    matmul_kernel[(min(programs or tiling.count, tiling.count),)](
        x if isinstance(x, Tensor) else None, x.addresses.to(device) if isinstance(x, Rows) else None, packed, bias,
        residual, pre, target, None if places is None else places.addresses, None if places is None else places.strides,
        None if tables is None else tables.order, None if tables is None else tables.group_of,
        done if counts else None, None if counts else done, None if ready is None else ready.counters, mine.flag,
        m, n, k, x.stride(0) if isinstance(x, Tensor) else 0, k, _stride(residual), _stride(pre), _stride(target),
        min(tiling.tile_m, m), min(tiling.tile_n, -(-n // 32) * 32), tiling.count, 1 if ready is None else ready.rows,
        0 if ready is None else ready.value, *local_rows, 1 if ready is None else nanoseconds(ready.timeout),
        ACTIVATION=activation, PRECISION="ieee", THREADS=32 * chosen.warps, INTERPRET=checks.INTERPRETED,
        **chosen.launch,
    )  # fmt: skip
    if ready is not None and late is None:
        mine.check(ready.what, seconds=ready.timeout, each=f" ({ready.rows} rows each)")


def _stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def _check_inputs(x: Tensor | Rows, packed: Tensor, n: int, activation: str | None) -> tuple[int, int, torch.dtype]:
    m, k = (x.m, x.k) if isinstance(x, Rows) else x.shape
    checks.on_device(packed, "the weight")
    dtype = checks.dtype_of(packed, "the weight")
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
        checks.like(x, "x", (m, k), dtype, packed.device)
    return m, k, dtype


def _tiling(m: int, n: int, tables: DeviceSchedule | None, config: configs.Config) -> Tiling:
    if tables is None:
        blocks = dict(config.blocks)
        return Tiling(m, n, blocks["BLOCK_M"], max(blocks["BLOCK_N"], 32))
    if (tables.tiling.m, tables.tiling.n) != (m, n):
        raise ValueError(
            f"the schedule is for an output [{tables.tiling.m}, {tables.tiling.n}], this one is [{m}, {n}]"
        )
    return tables.tiling


def _target(
    out: Tensor | TileOutput | DevicePlaces, tiling: Tiling, tables: DeviceSchedule | None, m: int, n: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[Tensor | None, DevicePlaces | None]:  # fmt: skip
    if isinstance(out, Tensor):
        checks.like(out, "out", (m, n), dtype, device)
        return out, None
    if tables is None or tables.tiling != out.tiling:
        raise ValueError(f"places for {out.tiling} need a schedule with that tiling, got {tables and tables.tiling}")
    places = DevicePlaces.of(out, device)
    if tiling.count and places.dtype != dtype:
        raise ValueError(f"out must be {dtype} like x, got {places.dtype}")
    return None, places


def _check_done(done: Tensor, tables: DeviceSchedule | None, device: torch.device) -> None:
    if tables is None:
        raise ValueError("done= counts the tiles of groups, so it needs schedule= to say which those are")
    dtype = torch.int64 if done.dtype == torch.int64 else torch.int32
    checks.counters(done, "done", tables.groups, device, dtype)


def _check_ready(ready: Ready, m: int, local_rows: tuple[int, int], device: torch.device) -> None:
    if ready.rows < 1:
        raise ValueError(f"ready.rows is the number of rows that a counter covers, at least 1; got {ready.rows}")
    if not 0 <= local_rows[0] <= local_rows[1] <= m:
        raise ValueError(f"local_rows must be a range inside the {m} rows of x, got {local_rows}")
    nanoseconds(ready.timeout)
    checks.counters(ready.counters, "ready.counters", -(-m // ready.rows), device)
