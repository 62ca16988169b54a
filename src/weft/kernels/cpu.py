"""The native core on torch tensors: packed weights, `linear`, and the row operations (norms, sums of table rows, ...).

Each function checks what it gets, then hands addresses to C++ with the GIL released. The core never checks again, so
nothing may pass here that would make it read or write out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from weft import _core
from weft.errors import PeerTimeout
from weft.kernels.tiles import TILE_N_MULTIPLE, Ready, Rows, TileOutput, TileSchedule

ACTIVATIONS: dict[str | None, int] = {None: 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "relu": 4}
FASTEST = _core.available_isas()[0]
LAYOUT = FASTEST
TORCH_MULTIPLIES = frozenset((torch.float32,))  # needs no packing; its bfloat16 matmul is many times slower
TAKES_ADDRESSES = True
MAX_TABLES = 3
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MAX_THREADS = 1024
_HUGE_BYTES = 4 << 20
_NOWHERE = (0, 0)
_NO_SCHEDULE = _core.Schedule()


@cache
def isa(name: str = "") -> _core.Kernels:
    """The kernels of an instruction set by name; the fastest that this CPU runs by default."""
    return _core.kernels(name)


def thread_count(threads: int) -> int:
    """`threads`, or as many as torch uses when it is 0."""
    if not isinstance(threads, int) or not 0 <= threads <= _MAX_THREADS:
        raise ValueError(f"threads must be from 1 to {_MAX_THREADS}, or 0 for as many as torch uses; got {threads}")
    return threads or torch.get_num_threads()


def dtype_code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"weft computes in float32 and bfloat16, got {dtype}; convert with .float() or .bfloat16()")
    return _DTYPES[dtype]


def empty(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A new tensor; a large one on huge pages where the system has them."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.nbytes >= _HUGE_BYTES:
        _core.advise_huge(tensor.data_ptr(), tensor.nbytes)
    return tensor


def packed_elements(n: int, k: int, isa_name: str) -> int:
    """How many elements a packed weight [N, K] has; sizes may be symbolic."""
    panel = isa(isa_name).panel
    return -(-n // panel) * panel * k


def pack(w: Tensor, isa_name: str, threads: int) -> Tensor:
    """[N, K] of any strides -> the flat packed form."""
    kernels, code = isa(isa_name), dtype_code(w.dtype)
    n, k = w.shape
    packed = empty(_core.packed_elements(kernels, n, k), dtype=w.dtype)
    _core.pack(kernels, w.data_ptr(), w.stride(0), w.stride(1), code, n, k, thread_count(threads), packed.data_ptr())
    return packed


def unpack(packed: Tensor, n: int, k: int, isa_name: str, threads: int) -> Tensor:
    """The flat packed form -> contiguous [N, K]."""
    w = empty(n, k, dtype=packed.dtype)
    code = dtype_code(packed.dtype)
    _check_packed(packed, n, k, isa(isa_name))
    _core.unpack(isa(isa_name), packed.data_ptr(), code, n, k, thread_count(threads), w.data_ptr())
    return w


def linear(
    x: Tensor | Rows,
    packed: Tensor,
    n: int,
    *,
    out: Tensor | TileOutput,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    pre: Tensor | None = None,
    isa_name: str = "",
    threads: int = 0,
    schedule: TileSchedule | None = None,
    done: Tensor | None = None,
    ready: Ready | None = None,
) -> None:
    """out[M, N] = activation(x[M, K] w[N, K]^T + bias[N]) + residual[M, N]; `pre` takes the activation's input."""
    m, k = (x.m, x.k) if isinstance(x, Rows) else x.shape
    kernels, code = isa(isa_name), dtype_code(x.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    if packed.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and needs a weight packed from {x.dtype}, got {packed.dtype}")
    _check_packed(packed, n, k, kernels)
    x_rows = _NOWHERE if isinstance(x, Rows) else _rows(x, "x")
    if isinstance(out, TileOutput):
        _check_places(out, schedule, x.dtype)
        out_rows = _NOWHERE
    else:
        _check_like(out, "out", (m, n), x)
        out_rows = _rows(out, "out")
    residual_rows = pre_rows = _NOWHERE
    bias_at = 0
    if residual is not None:
        _check_like(residual, "residual", (m, n), x)
        residual_rows = _rows(residual, "residual")
    if pre is not None:
        _check_like(pre, "pre", (m, n), x)
        pre_rows = _rows(pre, "pre")
    if bias is not None:
        _check_like(bias, "bias", (n,), x)
        bias = bias.contiguous()
        bias_at = bias.data_ptr()
    native = _NO_SCHEDULE
    if schedule is not None or ready is not None or isinstance(x, Rows):
        native = _native_schedule(m, n, x, out, schedule, done, ready)
    late = _core.linear(
        kernels, *x_rows, packed.data_ptr(), code, m, n, k, bias_at, ACTIVATIONS[activation],
        *residual_rows, *pre_rows, *out_rows, thread_count(threads), native,
    )  # fmt: skip
    if late >= 0:
        assert ready is not None
        raise PeerTimeout(f"{ready.what}, block {late} ({ready.rows} rows each)", seconds=ready.timeout)


def _native_schedule(
    m: int, n: int, x: Tensor | Rows, out: Tensor | TileOutput,
    schedule: TileSchedule | None, done: Tensor | None, ready: Ready | None,
) -> _core.Schedule:  # fmt: skip
    tile_m = tile_n = order = groups = sizes = done_at = ready_at = 0
    if schedule is not None:
        tiling = schedule.tiling
        if (tiling.m, tiling.n) != (m, n):
            raise ValueError(f"the schedule is for an output [{tiling.m}, {tiling.n}], this one is [{m}, {n}]")
        tile_m, tile_n = (
            min(tiling.tile_m, max(m, 1)),
            min(tiling.tile_n, -(-max(n, 1) // TILE_N_MULTIPLE) * TILE_N_MULTIPLE),
        )
        order = schedule.order_table.data_ptr()
        if done is not None:
            groups, sizes = schedule.group_table.data_ptr(), schedule.group_sizes.data_ptr()
            done_at = _check_counters(done, "done", schedule.groups)
    rows, value, timeout = 1, 0, 0.0
    if ready is not None:
        rows, value, timeout = ready.rows, ready.value, ready.timeout
        if not (isinstance(rows, int) and isinstance(value, int) and abs(value) < 2**31):
            raise ValueError(f"ready.rows and ready.value are integers, the value of 32 bits; got {rows} and {value}")
        if rows < 1:
            raise ValueError(f"ready.rows is the number of rows that a counter covers, at least 1; got {rows}")
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"ready.timeout must be a finite number of seconds above 0, got {timeout}")
        ready_at = _check_counters(ready.counters, "ready.counters", -(-m // rows))
    x_rows = x.addresses.data_ptr() if isinstance(x, Rows) else 0
    places = (out.addresses.data_ptr(), out.strides.data_ptr()) if isinstance(out, TileOutput) else (0, 0)
    return _core.Schedule(
        tile_m, tile_n, order, groups, sizes, done_at, ready_at, rows, value, timeout, x_rows, *places
    )  # fmt: skip


def norm(
    x: Tensor, weight: Tensor | None, beta: Tensor | None, *, out: Tensor, eps: float, rms: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, total: Tensor | None = None,
    mean: Tensor | None = None, rstd: Tensor | None = None, isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """out = norm(x + bias + residual) * weight + beta over the last dim of x [M, N]; `total` takes the norm's input."""
    rows, width = x.shape
    for vector, name in ((weight, "weight"), (beta, "beta"), (bias, "bias")):
        if vector is not None:
            _check(vector, name, (width,), x.dtype)
    for matrix, name in ((residual, "residual"), (total, "total"), (out, "out")):
        if matrix is not None:
            _check(matrix, name, (rows, width), x.dtype)
    _core.norm(
        isa(isa_name), dtype_code(x.dtype), rms, _rows(x, "x"), _at(bias),
        _NOWHERE if residual is None else _rows(residual, "residual"), _at(weight), _at(beta), eps,
        _NOWHERE if total is None else _rows(total, "total"), _rows(out, "out"), _at(mean), _at(rstd),
        rows, width, 1, thread_count(threads),
    )  # fmt: skip


def gather(tables: Sequence[tuple[Tensor, Tensor]], *, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out[r] = the sum over (table, index) of table[index[r]]; a negative index adds nothing.

    Tables are [rows, N] of one type, indices int64 [M], out [M, N]. An index past its table is an error.
    """
    count, width = out.shape
    if not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError(f"gather adds up 1 to {MAX_TABLES} tables, got {len(tables)}")
    native = []
    for table, index in tables:
        _check(table, "table", (table.shape[0], width), out.dtype)
        _check(index, "index", (count,), torch.int64)
        if count and int(index.max()) >= table.shape[0]:
            raise ValueError(f"a table of {table.shape[0]} rows was asked for row {int(index.max())}")
        native.append((*_rows(table, "table"), index.data_ptr()))
    _core.gather(
        isa(isa_name), dtype_code(out.dtype), native, _rows(out, "out"), count, width, thread_count(threads)
    )  # fmt: skip


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, out: Tensor, heads: int, sign: float = 1.0,
    isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """Turns the first `heads` heads of x [T, H, D] into out [T, H, D]; cos and sin are [positions, D / 2]."""
    tokens, all_heads, width = x.shape
    if width % 2 or not 0 <= heads <= all_heads:
        raise ValueError(f"rotary needs an even head_dim and at most {all_heads} heads, got {width} and {heads}")
    for table, name in ((cos, "cos"), (sin, "sin")):
        _check(table, name, (cos.shape[0], width // 2), torch.float32)
    _check(positions, "positions", (tokens,), torch.int64)
    if tokens and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise ValueError(
            f"positions must be from 0 to {cos.shape[0] - 1}, got {int(positions.min())} to {int(positions.max())}"
        )
    for t, name in ((x, "x"), (out, "out")):
        if t.shape != x.shape or t.dtype != x.dtype or (tokens and t.stride()[1:] != (width, 1)):
            raise ValueError(f"the heads of {name} must be contiguous and alike, got {list(t.shape)} {t.stride()}")
    _core.rotary(
        isa(isa_name), dtype_code(x.dtype), (x.data_ptr(), x.stride(0)), (out.data_ptr(), out.stride(0)), heads, width,
        cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), sign, tokens, thread_count(threads),
    )  # fmt: skip


def gate(x: Tensor, *, activation: str, out: Tensor, isa_name: str = "", threads: int = 0) -> None:
    """out [M, N] = activation(x[:, :N]) * x[:, N:] for x [M, 2 N]."""
    rows, width = out.shape
    _check(x, "x", (rows, 2 * width), out.dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {[*ACTIVATIONS]}, got {activation!r}")
    _core.gate(
        isa(isa_name), dtype_code(x.dtype), _rows(x, "x"), _rows(out, "out"), ACTIVATIONS[activation], rows,
        width, thread_count(threads),
    )  # fmt: skip


def fma_loop(*, threads: int = 1, rounds: int = 1_000_000, isa_name: str = "") -> float:
    """Runs independent fused multiply-adds on each of `threads` threads and returns how many flops that was.

    Timed, it says what the machine gives at best right now.
    """
    return _core.fma_loop(isa(isa_name), thread_count(threads), rounds)


def check_overlaps(out: Tensor, **inputs: Tensor | None) -> None:
    """Refuses an `out` [M, N] that would be written while it is read; `residual` may be `out` itself."""
    if out.shape[0] > 1 and out.stride(1) == 1 and out.stride(0) < out.shape[1]:
        raise ValueError(
            f"rows of out overlap: {list(out.shape)} with strides {out.stride()}; give it memory of its own"
        )
    first, last = _bytes_of(out)
    for name, t in inputs.items():
        if t is None or (name == "residual" and t.data_ptr() == out.data_ptr() and t.stride() == out.stride()):
            continue
        start, end = _bytes_of(t)
        if start < last and first < end:
            raise ValueError(f"out shares memory with {name}, which is still being read; give it memory of its own")


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """The addresses [first, last) that a tensor of non-negative strides may touch."""
    if t.numel() == 0:
        return 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + span * t.element_size()


def _check_packed(packed: Tensor, n: int, k: int, kernels: _core.Kernels) -> None:
    elements = _core.packed_elements(kernels, n, k)
    if packed.shape != (elements,) or not packed.is_contiguous() or not packed.is_cpu:
        raise ValueError(
            f"a weight [{n}, {k}] packed for {kernels.name} is a contiguous CPU tensor of {elements} elements, "
            f"got shape {list(packed.shape)} on {packed.device}; make it with PackedWeight.from_dense"
        )


def _check_like(t: Tensor, name: str, shape: tuple[int, ...], x: Tensor | Rows) -> None:
    if t.shape != shape or t.dtype != x.dtype or not t.is_cpu:
        raise ValueError(
            f"{name} must have shape {list(shape)} and be {x.dtype} on the CPU like x, "
            f"got {list(t.shape)}, {t.dtype} on {t.device}"
        )


def _check_places(out: TileOutput, schedule: TileSchedule | None, dtype: torch.dtype) -> None:
    if schedule is None or schedule.tiling != out.tiling:
        tiling = None if schedule is None else schedule.tiling
        raise ValueError(f"places for {out.tiling} need a schedule with that tiling, got {tiling}")
    if out.places and out.places[0].dtype != dtype:
        raise ValueError(f"out must be {dtype} like x, got {out.places[0].dtype}")


def _check_counters(counters: Tensor, name: str, at_least: int) -> int:
    if counters.dtype != torch.int32 or counters.dim() != 1 or not counters.is_contiguous() or not counters.is_cpu:
        raise ValueError(
            f"{name} must be a flat contiguous int32 tensor on the CPU, "
            f"got shape {list(counters.shape)}, {counters.dtype} on {counters.device}"
        )
    if counters.data_ptr() % 4:
        raise ValueError(f"{name} must lie on a multiple of 4 bytes, got address {counters.data_ptr():#x}")
    if counters.numel() < at_least:
        raise ValueError(f"{name} needs at least {at_least} counters, got {counters.numel()}")
    return counters.data_ptr()


def _check(t: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if t.shape != shape or t.dtype != dtype or not t.is_cpu:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)} on the CPU, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    if t.dim() == 1 and not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}; call .contiguous()")


def _rows(t: Tensor, name: str) -> tuple[int, int]:
    """Address and row stride of a matrix whose rows are contiguous."""
    row, column = t.stride()
    if column != 1 and t.shape[1] > 1:
        raise ValueError(f"the rows of {name} must be contiguous, got strides {t.stride()}; call .contiguous()")
    return t.data_ptr(), row


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
