"""What ranks do in cases_streams.py: they are processes of their own, so these are functions of a module."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from launched import all_compiled

from weft import overlap, reference
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.kernels import PackedWeight, Ready, linear
from weft.kernels import triton as kernels
from weft.kernels.dispatch import TRITON, routed
from weft.kernels.triton.interpreter import mend
from weft.overlap import Op, OverlapPlan, Transport, streams
from weft.overlap.blocks import Axis
from weft.overlap.executor.context import context_of
from weft.overlap.streams import collectives
from weft.overlap.streams.state import state_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-2, torch.float16: 1e-2}


def by_streams(fn, *args):
    """fn(group, *args) with every kernel from Triton, interpreted, and with threads for streams."""
    torch.set_num_threads(1)
    mend()
    np.seterr(all="ignore")
    with routed("cpu", TRITON):
        return fn(dist.group.WORLD, *args)


@dataclass(frozen=True)
class Case:
    """One call of an op: its whole shape, and a plan of small tiles or None."""

    op: Op
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    transport: Transport = Transport.MESSAGES
    axis: Axis = Axis.ROWS
    groups: tuple[int, ...] = ()
    tile_m: int = 16
    planned: bool = True

    def plan(self, size):
        name = str(self.dtype).removeprefix("torch.")
        return OverlapPlan(
            self.op, self.m, self.n, self.k, name, (0,) * size, self.transport, self.axis, self.tile_m, 32, self.groups
        )


def random(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs_of(case, rank, size):
    """x, w and bias of this rank; x is a shard of the rows where those are gathered."""
    rows, n = case.m, case.n
    if not case.planned:  # ranks differ in what they may
        rows += 3 * rank * (case.op is Op.ALL_TO_ALL)
        n += rank * (case.op is Op.ALL_GATHER)
    if case.op is Op.ALL_GATHER:
        step = -(-case.m // size)
        rows = min(step, max(0, case.m - rank * step))
    x = random(rows, case.k, seed=rank, dtype=case.dtype)
    same = case.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE)
    return (
        x,
        random(n, case.k, seed=20 + rank, dtype=case.dtype),
        random(n, seed=40 + (0 if same else rank), dtype=case.dtype),
    )


def called(case, module, group, x, w, bias, plan=None):
    options = {"group": group, "bias": bias} | ({} if plan is None else {"plan": plan})
    if case.op is Op.ALL_GATHER:
        return module.all_gather_matmul(x, w, m=case.m, **options)
    if case.op is Op.ALL_TO_ALL:
        destinations = torch.arange(x.shape[0]) * 7 % group.size()
        if group.rank() == 0:
            destinations[:] = group.size() - 1  # some ranks get many rows, and nobody sends to rank 0 but others
        return module.matmul_all_to_all(x, w, destinations, **options)
    function = module.matmul_all_reduce if case.op is Op.ALL_REDUCE else module.matmul_reduce_scatter
    return function(x, w, **options)


def run(case, module, group, plan=None):
    """The output and the gradients of x, w and bias."""
    inputs = [t.requires_grad_() for t in inputs_of(case, group.rank(), group.size())]
    y = called(case, module, group, *inputs, plan)
    seed = 60 if case.op is Op.ALL_REDUCE else 60 + group.rank()
    return [y, *torch.autograd.grad(y, inputs, random(*y.shape, seed=seed, dtype=case.dtype))]


def agrees(group, cases):
    """Values and gradients as the plain twins give them; and the same bits as the sequential plan."""
    with all_compiled():
        return _agree(group, cases)


def _agree(group, cases):
    for case in cases:
        plan = case.plan(group.size()) if case.planned else None
        got, want = run(case, overlap, group, plan), run(case, reference, group)
        limit = TOLERANCE[case.dtype]
        for number, (g, w) in enumerate(zip(got, want, strict=True)):
            message = f"{case}, result {number}"
            torch.testing.assert_close(g, w, atol=limit, rtol=limit, msg=lambda text, at=message: f"{at}: {text}")
        # Sums are the process group's, and more than two ranks may be added in any order.
        exact = case.op in (Op.ALL_GATHER, Op.ALL_TO_ALL) or group.size() == 2
        if plan is not None and exact and case.transport is Transport.MESSAGES:
            inputs = inputs_of(case, group.rank(), group.size())
            assert torch.equal(called(case, overlap, group, *inputs, replace(plan, groups=())), got[0]), case
    streams.check(group)
    return len(cases)


def tables_are_kept(group):
    """How often an all-to-all makes its tables, in three calls of two sizes."""
    made, make = [], collectives._tables

    def noted(*args):
        made.append(args)
        return make(*args)

    collectives._tables = noted
    try:
        for m in (33, 70, 33):
            case = Case(Op.ALL_TO_ALL, m, 96, 8, axis=Axis.COLS, groups=(1, 1))
            called(case, overlap, group, *inputs_of(case, group.rank(), group.size()), case.plan(group.size()))
    finally:
        collectives._tables = make
    return len(made)


def sums_in_rank_order(group):
    """A reduce-scatter into the owners' memory adds parts up as written: rank 0's, then rank 1's, ..."""
    case = Case(Op.REDUCE_SCATTER, 48, 40, 24, torch.bfloat16, Transport.WINDOWS, groups=(1,))
    x, w, bias = inputs_of(case, group.rank(), group.size())
    got = overlap.matmul_reduce_scatter(x, w, group=group, bias=bias, plan=case.plan(group.size()))
    product = linear(x, PackedWeight.from_dense(w))
    parts = [torch.empty_like(product) for _ in range(group.size())]
    dist.all_gather(parts, product, group=group)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    rows = 48 // group.size()
    mine = slice(group.rank() * rows, (group.rank() + 1) * rows)
    return torch.equal(got, (total + bias.float())[mine].bfloat16())


def overlaps(group):
    """Tiles of the second group wait until the collective of the first is over: true only if that runs beside them."""
    case = Case(Op.ALL_REDUCE, 64, 32, 16, groups=(1, 1))
    arrived, rows = torch.tensor([1, 1, 0, 0], dtype=torch.int32), []
    collective, matmul = dist.all_reduce, kernels.linear

    def noted(data, **options):
        work = collective(data, **options)
        rows.append(data.numel() // 32)
        arrived[2:] = 1
        return work

    def held_back(*args, **options):
        return matmul(*args, **options, ready=Ready(arrived, 16, timeout=20))

    dist.all_reduce, kernels.linear = noted, held_back
    try:
        called(case, overlap, group, *inputs_of(case, group.rank(), group.size()), case.plan(group.size()))
    finally:
        dist.all_reduce, kernels.linear = collective, matmul
    return rows


def a_plan_is_agreed_on(group):
    """Ranks with different plans hear of it before a byte moves."""
    case = Case(Op.ALL_REDUCE, 32, 32, 16, groups=(1, 1) if group.rank() else (1,))
    try:
        called(case, overlap, group, *inputs_of(case, group.rank(), group.size()), case.plan(group.size()))
    except WeftError as error:
        return type(error).__name__, str(error)
    return None


def a_kernel_gives_up(group):
    """Rows that rank 0 is never told of: its tiles time out, and so does whatever it is asked next."""
    case = Case(Op.ALL_GATHER, 64, 32, 16, groups=(1,))
    state = state_of(context_of(group), torch.zeros(1))
    state.timeout = 0.02
    if group.rank() == 0:
        state.device.tell = lambda *args: None
    try:
        called(case, overlap, group, *inputs_of(case, group.rank(), group.size()), case.plan(group.size()))
    except PeerTimeout as error:
        first = str(error)
        try:
            called(case, overlap, group, *inputs_of(case, group.rank(), group.size()), case.plan(group.size()))
        except WeftError as again:
            return first, str(again)
    return None


def a_collective_fails(group):
    """A process group that fails ends the call at once, and the error says which group of tiles it was for."""
    case = Case(Op.ALL_REDUCE, 64, 32, 16, groups=(1, 1))
    original = dist.all_reduce

    def fails(*args, **options):
        raise RuntimeError("the wire is cut")

    x, w, bias = inputs_of(case, group.rank(), group.size())
    overlap.matmul_all_reduce(x, w, group=group, bias=bias, plan=case.plan(group.size()))
    dist.all_reduce = fails
    try:
        overlap.matmul_all_reduce(x, w, group=group, bias=bias, plan=case.plan(group.size()))
    except PeerLost as error:
        return str(error)
    finally:
        dist.all_reduce = original
    return None
