"""The four ops as users call them.

    P ranks; rank r holds what has an r. Shards follow torch.chunk: sizes may be uneven, and some empty.

    all_gather_matmul       x_r [m_r, K], w_r [N_r, K], b_r [N_r]       -> y_r [M, N_r]
        forward   y_r = X w_r^T + b_r           X = all_gather(x)  [M, K]
        dgrad     dx = reduce_scatter(dy_r w_r)                          a matmul_reduce_scatter
        wgrad     dw_r = dy_r^T X,  db_r = sum of rows of dy_r           while dx travels

    matmul_reduce_scatter   x_r [M, K_r], w_r [N, K_r], b [N]           -> y_r [m_r, N]
        forward   y = reduce_scatter(x_r w_r^T) + b
        dgrad     dx_r = DY w_r                 DY = all_gather(dy)      an all_gather_matmul
        wgrad     dw_r = DY^T x_r,  db = sum of rows of dy_r             the share of this rank's rows

    matmul_all_reduce       x_r [M, K_r], w_r [N, K_r], b [N]           -> y [M, N], the same on all ranks
        forward   y = all_reduce(x_r w_r^T) + b
        dgrad     dx_r = dy w_r                 dy is the same on all ranks, so nothing travels
        wgrad     dw_r = dy^T x_r,  db = sum of rows of dy

    matmul_all_to_all       x_r [M_r, K], w_r [N, K], b_r [N], destinations [M_r]   -> y_r [R_r, N]
        forward   row i of x_r w_r^T + b_r goes to rank destinations[i]; rows arrive by source rank, then in order
        dgrad     dx_r = DZ w_r                 DZ = the rows of dy, back where they came from  [M_r, N]
        wgrad     dw_r = DZ^T x_r,  db_r = sum of rows of DZ

Partial results are added in one order whatever the plan: ranks in order inside a host, then hosts in order. So all
plans give the same bits on a CPU. float32 and bfloat16, and float16 on a GPU. `docs/gpu.md` says what differs there.
Calls on a group are collective and come in the same order on all ranks. Each ends within the group's timeout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import dispatches_to_python
from weft.kernels import PackedWeight
from weft.kernels.dispatch import dtypes_on, is_supported
from weft.kernels.plain import is_plain
from weft.overlap import ops, ops_all_to_all
from weft.overlap.autocast import cast_inputs
from weft.overlap.calls import check_plan
from weft.overlap.plan import Op, OverlapPlan

Weight = Tensor | PackedWeight


@cast_inputs
def all_gather_matmul(
    x_shard: Tensor,
    w: Weight,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    m: int | None = None,
    plan: OverlapPlan | str | None = None,
) -> Tensor:
    """y = all_gather(x_shard) w^T + bias: x_shard [m_r, K], w [N, K], bias [N] -> [M, N].

    `m` is M, all rows together; without it every rank has as many as this one. Tiles of y start as their rows arrive.
    """
    _check_group(group)
    weight, packed, n, k, isa = _weight(w)
    _check("x_shard", x_shard, k, weight if packed is None else packed, bias, n)
    total = x_shard.shape[0] * group.size() if m is None else m
    _check_shard(x_shard.shape[0], total, group)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_shard, weight))
    plain = _is_plain(x_shard, weight, bias)
    op = ops.run_all_gather_matmul if plain else ops.all_gather_matmul
    dense, text = _untrained(weight) if plain else weight, _text(plan, Op.ALL_GATHER, x_shard)
    y: Tensor = op(x_shard, dense, packed, bias, total, n, isa, group.group_name, text, keep)[0]
    return y


@cast_inputs
def matmul_reduce_scatter(
    x: Tensor,
    w_shard: Weight,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None,
) -> Tensor:
    """y = reduce_scatter(x w_shard^T) + bias: x [M, K_r], w_shard [N, K_r], bias [N] -> [m_r, N].

    Blocks of the product are sent to the owners of their rows while the next ones are computed.
    """
    return _reduce(Op.REDUCE_SCATTER, x, w_shard, group, bias, plan)


@cast_inputs
def matmul_all_reduce(
    x: Tensor,
    w_shard: Weight,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None,
) -> Tensor:
    """y = all_reduce(x w_shard^T) + bias: x [M, K_r], w_shard [N, K_r], bias [N] -> [M, N], the same on all ranks.

    The gradient of y must be the same on all ranks, too, as it is in tensor parallelism.
    """
    return _reduce(Op.ALL_REDUCE, x, w_shard, group, bias, plan)


@cast_inputs
def matmul_all_to_all(
    x: Tensor,
    w: Weight,
    destinations: Tensor,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    rows: int | None = None,
    plan: OverlapPlan | str | None = None,
) -> Tensor:
    """Row i of x w^T + bias goes to rank destinations[i]: x [M, K], w [N, K], destinations int64 [M] -> [R, N].

    The rows that come to this rank are ordered by source rank, then as they are there. `rows` is R where it is known:
    a compiled graph then has no size that depends on data.
    """
    _check_group(group)
    weight, packed, n, k, isa = _weight(w)
    _check("x", x, k, weight if packed is None else packed, bias, n)
    if destinations.shape != x.shape[:1] or destinations.dtype != torch.int64:
        raise ValueError(
            f"destinations is {destinations.dtype} {list(destinations.shape)}, expected int64 [{x.shape[0]}]: "
            "a rank for each row of x"
        )
    if not torch.compiler.is_compiling() and destinations.numel():
        low, high = int(destinations.min()), int(destinations.max())
        if low < 0 or high >= group.size():
            raise ValueError(f"destinations are {low} to {high}, expected ranks of the group, 0 to {group.size() - 1}")
    promised = -1 if rows is None else rows
    plain = _is_plain(x, weight, bias, destinations)
    op = ops_all_to_all.run_matmul_all_to_all if plain else ops_all_to_all.matmul_all_to_all
    dense, text = _untrained(weight) if plain else weight, _text(plan, Op.ALL_TO_ALL, x)
    y: Tensor = op(x, dense, packed, bias, destinations, promised, n, isa, group.group_name, text)[0]
    return y


def _reduce(
    op: Op, x: Tensor, w: Weight, group: ProcessGroup, bias: Tensor | None, plan: OverlapPlan | str | None
) -> Tensor:
    _check_group(group)
    weight, packed, n, k, isa = _weight(w)
    _check("x", x, k, weight if packed is None else packed, bias, n)
    plain = _is_plain(x, weight, bias)
    run = ops.run_matmul_reduce if plain else ops.matmul_reduce
    dense, text = _untrained(weight) if plain else weight, _text(plan, op, x)
    y: Tensor = run(x, dense, packed, bias, op.value, n, isa, group.group_name, text)
    return y


def _is_plain(*tensors: Tensor | None) -> bool:
    plain = is_plain(*tensors)
    if not plain and not torch.compiler.is_compiling() and dispatches_to_python():
        from weft.overlap.flops import tell_counters  # of no use to anybody else

        tell_counters()
    return plain


def _check_group(group: object) -> None:
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}, expected a process group that this rank is in, such as "
            "torch.distributed.group.WORLD or mesh.get_group()"
        )


def _untrained(weight: Tensor | None) -> Tensor | None:
    """The weight as one that no gradient flows to in this call, so that its packed form is kept."""
    return None if weight is None else weight.detach()


def _text(plan: OverlapPlan | str | None, op: Op, x: Tensor) -> str:
    """A plan as text; what can be seen to be wrong with it is told before this rank waits for any other."""
    if plan is None:
        return ""
    text = str(plan)
    if not torch.compiler.is_compiling():
        check_plan(text, op, x.dtype)
    return text


def _weight(w: Weight) -> tuple[Tensor | None, Tensor | None, int, int, str]:
    """(dense, packed, N, K, instruction set): dense where there is one, packed where the caller did that."""
    if isinstance(w, PackedWeight):
        return w.checked_source(), w.data, w.n, w.k, w.isa
    if w.dim() != 2:
        raise ValueError(f"a weight has shape [N, K], got {list(w.shape)}")
    return w, None, w.shape[0], w.shape[1], ""


def _check(name: str, x: Tensor, k: int, weight: Tensor | None, bias: Tensor | None, n: int) -> None:
    assert weight is not None
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected [M, {k}] for a weight [{n}, {k}]; flatten it")
    if x.dtype != weight.dtype or not is_supported(x.device.type, x.dtype):
        types = dtypes_on(x.device.type) or f"a device with kernels, not {x.device.type}"
        raise ValueError(f"{name} is {x.dtype} and the weight {weight.dtype}, expected {types}, both alike")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, expected {x.dtype} [{n}] like the weight's rows")


def _check_shard(rows: int, total: int, group: ProcessGroup) -> None:
    size, rank = group.size(), group.rank()
    step = -(-total // size)
    expected = min(step, max(0, total - rank * step))
    if rows != expected:
        raise ValueError(
            f"x_shard has {rows} rows, expected {expected}: rank {rank}'s part of m={total} rows after torch.chunk "
            f"over {size} ranks; give m=, the number of all rows"
        )
