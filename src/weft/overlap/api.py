"""The ops as users call them, and the plans that they follow.

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

    replicated_matmul       x [M, K], the same on all ranks, w_r [N_r, K], b_r [N_r]   -> y_r [M, N_r]
        forward   y_r = x w_r^T + b_r           nothing to gather
        dgrad     dx = all_reduce(dy_r w_r)                              a matmul_all_reduce
        wgrad     dw_r = dy_r^T x,  db_r = sum of rows of dy_r           while dx travels

Partial results are added in one order whatever the plan: ranks in order inside a host, then hosts in order. So all
plans give the same bits on a CPU. float32 and bfloat16, and float16 on a GPU. `docs/gpu.md` says what differs there.
Calls on a group are collective and come in the same order on all ranks. Each ends within the group's timeout.

Where nobody compiles, differentiates or counts, a call goes straight to the group's executor; otherwise through the
custom ops of `ops`. Under `torch.autocast` x, weight and bias are cast to its type, as torch's own linear does (float64
is not), the result has that type, and gradients go back through the casts.

`matmul_reduce_scatter` and `matmul_all_reduce` also add a residual to their result and take a norm of that (`norm=`),
while the rows are in the cache, with the bits of the separate ops. With gradients these are separate.

`plan_overlap` gives the plan for a matmul, on a group that exists or on a cluster that is only declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import tell_flop_counters
from weft.comm.deadline import Deadline, timeout_of
from weft.comm.tags import Line, turn
from weft.kernels import PackedWeight
from weft.kernels.dispatch import NATIVE, check_tensor, is_plain, kernels_for, refuse_tangents
from weft.kernels.norm import LayerNorm, NormOutput, RMSNorm, add_and_norm
from weft.layout.mesh import DeclaredCluster
from weft.overlap import ops
from weft.overlap.blocks import chunk_bounds
from weft.overlap.executor import matmul_scatter
from weft.overlap.executor.call import executor_for, parse_plan
from weft.overlap.executor.context import Context, context_of
from weft.overlap.executor.sums import RowNorm
from weft.overlap.inputs import Weight, cast_inputs, check_norm, check_shard, checked
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.search import choose_plan
from weft.overlap.speeds import Curves


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
    dense, packed, n, isa = checked("x_shard", x_shard, "w", w, bias, group)
    total = x_shard.shape[0] * group.size() if m is None else m
    check_shard(x_shard.shape[0], total, group)
    text = _text(plan, Op.ALL_GATHER, x_shard)
    if _is_plain("all_gather_matmul", x_shard, dense, bias):
        context = context_of(group)
        weight, run = _packed(w, context), executor_for(context, x_shard).gather_matmul
        return run(context, x_shard, weight, m=total, bias=bias, plan=text, keep=False)[0]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_shard, dense))
    y: Tensor
    y, _ = ops.all_gather_matmul(x_shard, dense, packed, bias, total, n, isa, group.group_name, text, keep)
    return y


@overload
def matmul_reduce_scatter(
    x: Tensor, w_shard: Weight, *, group: ProcessGroup, bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None, residual: None = None, norm: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def matmul_reduce_scatter(
    x: Tensor, w_shard: Weight, *, group: ProcessGroup, bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None, residual: Tensor | None = None, norm: RMSNorm | LayerNorm,
) -> NormOutput: ...  # fmt: skip
@cast_inputs
def matmul_reduce_scatter(
    x: Tensor,
    w_shard: Weight,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None,
    residual: Tensor | None = None,
    norm: RMSNorm | LayerNorm | None = None,
) -> Tensor | NormOutput:
    """y = reduce_scatter(x w_shard^T) + bias: x [M, K_r], w_shard [N, K_r], bias [N] -> [m_r, N].

    Blocks of the product are sent to the owners of their rows while the next ones are computed.

    With `norm`, the named result: `total` [m_r, N] = y + residual, and `out` = norm(total). residual [m_r, N].

        normed = weft.matmul_reduce_scatter(x, w, group=group, residual=hidden, norm=weft.RMSNorm(weight, eps=1e-6))
        hidden, y = normed.total, normed.out
    """
    return _matmul_reduce(Op.REDUCE_SCATTER, x, w_shard, group, bias, plan, residual, norm)


@overload
def matmul_all_reduce(
    x: Tensor, w_shard: Weight, *, group: ProcessGroup, bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None, residual: None = None, norm: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def matmul_all_reduce(
    x: Tensor, w_shard: Weight, *, group: ProcessGroup, bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None, residual: Tensor | None = None, norm: RMSNorm | LayerNorm,
) -> NormOutput: ...  # fmt: skip
@cast_inputs
def matmul_all_reduce(
    x: Tensor,
    w_shard: Weight,
    *,
    group: ProcessGroup,
    bias: Tensor | None = None,
    plan: OverlapPlan | str | None = None,
    residual: Tensor | None = None,
    norm: RMSNorm | LayerNorm | None = None,
) -> Tensor | NormOutput:
    """y = all_reduce(x w_shard^T) + bias: x [M, K_r], w_shard [N, K_r], bias [N] -> [M, N], the same on all ranks.

    The gradient of y must be the same on all ranks, too, as it is in tensor parallelism. `norm` and `residual` [M, N]
    are as in `matmul_reduce_scatter`.
    """
    return _matmul_reduce(Op.ALL_REDUCE, x, w_shard, group, bias, plan, residual, norm)


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
    dense, packed, n, isa = checked("x", x, "w", w, bias, group)
    check_tensor("destinations", destinations, x.device)
    if destinations.shape != x.shape[:1] or destinations.dtype != torch.int64:
        raise ValueError(
            f"destinations is {destinations.dtype} {list(destinations.shape)}, expected int64 [{x.shape[0]}]: "
            "a rank for each row of x"
        )
    plain = _is_plain("matmul_all_to_all", x, dense, bias, destinations)
    if not torch.compiler.is_compiling() and destinations.numel():
        low, high = int(destinations.min()), int(destinations.max())
        if low < 0 or high >= group.size():
            raise ValueError(f"destinations are {low} to {high}, expected ranks of the group, 0 to {group.size() - 1}")
    promised, text = -1 if rows is None else rows, _text(plan, Op.ALL_TO_ALL, x)
    y: Tensor
    if plain:
        context = context_of(group)
        weight, run = _packed(w, context), executor_for(context, x).matmul_scatter_rows
        y, _ = run(context, x, weight, destinations, bias=bias, plan=text)
        ops.check_promise(promised, y, context.rank)
        return y
    y, _ = ops.matmul_all_to_all(x, dense, packed, bias, destinations, promised, n, isa, group.group_name, text)
    return y


@cast_inputs
def replicated_matmul(x: Tensor, w: Weight, *, group: ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """y_r = x w_r^T + bias_r: x [M, K], the same on all ranks, w_r [N_r, K], bias_r [N_r] -> [M, N_r].

    Nothing travels but the gradient of x, which is a sum over ranks.
    """
    dense, packed, n, isa = checked("x", x, "w", w, bias, group)
    _use_dispatcher("replicated_matmul", x, dense, bias)
    y: Tensor = ops.replicated_matmul(x, dense, packed, bias, n, isa, group.group_name)
    return y


def _matmul_reduce(
    op: Op, x: Tensor, w: Weight, group: ProcessGroup, bias: Tensor | None, plan: OverlapPlan | str | None,
    residual: Tensor | None, norm: RMSNorm | LayerNorm | None,
) -> Tensor | NormOutput:  # fmt: skip
    dense, packed, n, isa = checked("x", x, "w_shard", w, bias, group)
    text = _text(plan, op, x)
    after: list[Tensor] = []
    if norm is not None or residual is not None:
        m0, m1 = chunk_bounds(x.shape[0], group.size())[group.rank() :][:2]
        check_norm(norm, residual, x, n, x.shape[0] if op is Op.ALL_REDUCE else m1 - m0)
        assert norm is not None
        after = [t for t in (residual, norm.weight, norm.beta) if t is not None]
    y: Tensor
    if not _is_plain(op.value, x, dense, bias, *after):
        y = ops.matmul_reduce(x, dense, packed, bias, op.value, n, isa, group.group_name, text)
        return y if norm is None else add_and_norm(y, norm, residual)
    context = context_of(group)
    weight = _packed(w, context)
    if norm is not None and context.size > 1 and kernels_for(x).name == NATIVE:
        rows = RowNorm(norm, residual)
        y = matmul_scatter(context, op, x, weight, bias=bias, plan=text, after=rows)
        return NormOutput(rows.normed(y), y)
    y = executor_for(context, x).matmul_scatter(context, op, x, weight, bias=bias, plan=text)
    return y if norm is None else add_and_norm(y, norm, residual)


def _is_plain(op: str, x: Tensor, dense: Tensor | None, bias: Tensor | None, *others: Tensor) -> bool:
    plain = is_plain(x, dense, bias, *others)
    if not plain:
        _use_dispatcher(op, x, dense, bias)
    return plain


def _use_dispatcher(op: str, x: Tensor, dense: Tensor | None, bias: Tensor | None) -> None:
    """What comes before an op of `ops`: what it cannot do is refused, and who counts is told how."""
    refuse_tangents(op, x=x, weight=dense, bias=bias)
    tell_flop_counters(ops.FLOPS)


def _packed(w: Weight, context: Context) -> PackedWeight:
    """The weight as one that no gradient flows to in this call, so that its packed form is kept."""
    if isinstance(w, PackedWeight):
        return w if w.source is None else PackedWeight(w.data, w.n, w.k, w.isa)
    return context.weights.packed(w.detach())


def _text(plan: OverlapPlan | str | None, op: Op, x: Tensor) -> str:
    """A plan as text; what can be seen to be wrong with it is told before this rank waits for any other."""
    if plan is None:
        return ""
    text = str(plan)
    if not torch.compiler.is_compiling():
        parse_plan(text, op, x.dtype)
    return text


# Plans ------------------------------------------------------------------------------------------------------


def plan_overlap(
    op: Op | str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype | str = torch.float32,
    group: ProcessGroup | None = None,
    cluster: DeclaredCluster | None = None,
    devices: int = 1,
    flops: float | None = None,
) -> OverlapPlan:
    """The best plan for [m, k] x [n, k]^T on each rank: of a `group`, or of `devices` ranks a host of a `cluster`.

    m counts all rows (for all-to-all, those of one rank); n and k are what one rank computes with.

    With `group`, all ranks call it: they get the plan that a call of this shape follows, tuned or predicted from
    measured curves. With `cluster` nothing runs and no rank is contacted: the prediction is from the declared rates of
    the cards and `flops`, the flops a second of one rank's matmul.

    >>> two = DeclaredCluster.uniform(2, gbps=1.0)
    >>> plan = plan_overlap("matmul_reduce_scatter", 2048, 3072, 768, cluster=two, flops=8e10)
    >>> plan.sequential, plan.hosts
    (False, (0, 1))
    """
    name = str(dtype).removeprefix("torch.")
    if (group is None) == (cluster is None):
        raise ValueError(f"got group={group} and cluster={cluster}, expected one of them: who will compute?")
    if group is not None:
        return _of_group(Op(op), m, n, k, name, group)
    assert cluster is not None
    if devices < 1 or flops is None or not flops > 0:
        raise ValueError(
            f"got devices={devices} and flops={flops}, expected devices of each host, at least 1, and flops a second "
            "of one rank's matmul, such as flops=8e10; `weft bench gemm` measures it"
        )
    hosts = tuple(host for host in range(cluster.hosts) for _ in range(devices))
    return choose_plan(op, m, n, k, dtype=name, hosts=hosts, curves=Curves.of_cluster(cluster, flops=flops))


class Planning:
    """Planning on a group, beside the calls that other threads make: a context of its own, and messages of its own.

    The plans are those of the group's calls.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.planner = context_of(group).planner
        self.context = context_of(group, Line.PLANNING)
        self.wire = self.context.group

    @classmethod
    @contextmanager
    def on(cls, group: ProcessGroup, what: str) -> Iterator[Planning]:
        """Collective: all ranks are here with the same `what`. Threads of a rank plan one after the other."""
        with turn(group, "planning", Deadline.after(timeout_of(group))):
            planning = cls(group)
            planning.wire.agree("planning", what)
            yield planning


def _of_group(op: Op, m: int, n: int, k: int, dtype: str, group: ProcessGroup) -> OverlapPlan:
    blank = OverlapPlan(op, m, n, k, dtype, context_of(group).hosts)
    with Planning.on(group, f"plan_overlap {blank.shared_text()}") as planning:
        planner, wire = planning.planner, planning.wire
        # A call of another thread may just have made one, here and not yet elsewhere: rank 0's counts.
        known = planner.known(op, m, n, k, dtype)
        told = wire.tell("the plan that is known", str(known or ""))[0]
        if not told:
            return planner.make(op, m, n, k, dtype, group=wire)
        planner.use(OverlapPlan.parse(told))
        found = planner.known(op, m, n, k, dtype)
        assert found is not None
        return found


def curves_of(group: ProcessGroup) -> Curves:
    """The measured curves of a group, for `plan.simulate(curves)`. Collective; measured once.

    A trace judges calls by them: where every call is given its plan, nothing else measures them.
    """
    with Planning.on(group, "curves") as planning:
        return planning.planner.curves(planning.wire)
