"""Runs one case of the pipeline campaign on this rank, and compares with all stages in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from pipeline_case import Case, Part, Raise
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from weft import tracing
from weft.errors import PeerMismatch, WeftError
from weft.layout import Layout, Mesh
from weft.pipeline.api import Pipeline
from weft.pipeline.failure import StageFailed
from weft.pipeline.reference import forward_reference, step_reference

WIDTH = 4
TIMEOUT = 60.0
TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 6e-2}


class Stage(nn.Module):
    """Mixes all that comes in, row by row; gives each of `names` something else."""

    def __init__(
        self, part: Part, inputs: int, names: Sequence[str], gradient: dict[str, bool], terms: int, *, exact: bool
    ) -> None:
        """`terms`: outputs are one of so many terms of a sum; `exact`: integers that differ by rounding do not occur."""
        super().__init__()
        self.exact = exact
        dtype = getattr(torch, part.dtype)
        self.part, self.names, self.gradient, self.terms, self.dtype = part, list(names), gradient, terms, dtype
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(inputs))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype) if part.norm else nn.Identity()
        self.drop = nn.Dropout(0.3 if part.dropout else 0.0)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype) + 0.5)
        if part.counts:
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=dtype))
        if part.frozen:
            self.requires_grad_(False)
        self.kept: list[tuple[Any, int, Tensor]] = []

    def forward(self, *args: Tensor, **tensors: Tensor) -> Any:
        given = (*args, *(tensors[name] for name in sorted(tensors)))
        if self.part.keeps:
            kept = [x.detach() for x in given if x.is_contiguous()]
            self.kept += [(x.untyped_storage(), x.storage_offset(), x.reshape(-1).clone()) for x in kept]
        parts = [mix(x.to(self.dtype)) for mix, x in zip(self.mix, given, strict=True)]
        y = self.drop(torch.tanh(self.norm(sum(parts[1:], parts[0])) * self.scale))
        if self.part.counts and self.training:
            self.seen.add_(y.detach().sum((0, 1)))
        if not self.names:
            return y
        found = {name: y if name == "x" else y * (i + 2) / self.scale for i, name in enumerate(self.names)}
        for name, x in found.items():
            if not self.gradient[name]:
                found[name] = (x.detach() * 8).to(torch.int64) if self.exact else x.detach()
            if self.terms > 1:
                found[name] = found[name] / self.terms
            if self.part.views:
                found[name] = found[name].mT.contiguous().mT
        return found

    def check_kept(self) -> None:
        """What was kept is still what it was."""
        for storage, offset, was in self.kept:
            now = torch.empty(0, dtype=was.dtype).set_(storage, offset, was.shape)
            assert torch.equal(now, was), "memory that a stage kept was written to"


def make_stages(case: Case, *, terms: bool) -> list[nn.Module]:
    """All stages; with `terms` those of a mesh give terms of a sum where their layout says so."""
    torch.manual_seed(case.number)
    made: list[nn.Module] = []
    for stage, part in enumerate(case.parts):
        names = sorted({edge.tensor for edge in case.graph.out_of(stage)})
        gradient = {edge.tensor: edge.gradient for edge in case.graph.out_of(stage)}
        count = len(case.meshes[stage]) if terms and part.layout == "p" else 1
        made.append(Stage(part, len(case.graph.into(stage)) or 1, names, gradient, count, exact=case.is_exact))
    return made


def placements(case: Case, stage: int, *, leaving: bool) -> list[Placement]:
    kinds = {"r": Replicate(), "s0": Shard(0), "s1": Shard(1), "p": Partial() if leaving else Replicate()}
    return [kinds[case.parts[stage].layout]]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A sum, so that those of shards add up."""
    return ((output - target.to(output.dtype)) ** 2).sum() / 8


def batch_of(case: Case, step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * case.number + step)
    parts = [[torch.randn(*rows, WIDTH, generator=generator) for rows in case.rows] for _ in range(2)]
    return parts[0], parts[1]


def shard_of(case: Case, stage: int, whole: Sequence[Tensor]) -> list[Tensor]:
    """What this rank gives to a stage: its part, where the stage's tensors are cut."""
    if not case.parts[stage].layout.startswith("s"):
        return list(whole)
    mesh = Mesh.of(list(case.meshes[stage]), hosts=[0] * len(case.meshes[stage]))
    layout = Layout(mesh, tuple(placements(case, stage, leaving=False)))
    (dim,) = [int(case.parts[stage].layout[1])]
    place = case.meshes[stage].index(dist.get_rank())
    found = []
    for x in whole:
        sizes = [layout.local_shape(tuple(x.shape), rank)[dim] for rank in case.meshes[stage]]
        found.append(x.narrow(dim, sum(sizes[:place]), sizes[place]))
    return found


def run_case(case: Case, seed: int) -> None:
    """Raises what is wrong."""
    me = dist.get_rank()
    mine, alone = make_stages(case, terms=True), make_stages(case, terms=False)
    own = [stage for stage in range(case.made.stages) if me in case.meshes[stage]]
    options: dict[str, Any] = {
        "edges": case.graph,
        "input_layouts": {s: placements(case, s, leaving=False) for s in {e.target for e in case.graph.edges}},
        "output_layouts": {s: placements(case, s, leaving=True) for s in {e.source for e in case.graph.edges}},
        "loss_fn": loss_of, "timeout": TIMEOUT, "seed": case.seed, "checkpoint": case.checkpoint,
        "transfers": case.transfers, "strategy": case.strategy,
    }  # fmt: skip
    outputs: list[tuple[Tensor, Tensor]] = []
    with Pipeline(mine, [list(mesh) for mesh in case.meshes], case.made, **options) as pipe:
        for step, before in enumerate(case.before):
            batch, targets = batch_of(case, step)
            raises = case.raises if step == len(case.before) - 1 else None
            if raises is not None:
                expect_failure(case, raises, pipe, mine, batch, targets)
                break
            prepare(case, before, pipe, batch, targets, alone, outputs)
            guard = torch.no_grad() if before == "no_grad" else tracing.trace() if before == "trace" else nullcontext()
            with guard:
                losses = pipe.step(*given(case, batch, targets), loss_scale=case.scale)
            expected = step_reference(
                alone, batch, targets, microbatches=case.made.microbatches, loss_fn=loss_of, graph=case.graph,
                loss_scale=case.scale, seed=case.seed, step=step,
            )  # fmt: skip
            compare(case, own, mine, alone, losses, expected)
            if case.is_cut:
                take_sums(own, mine, alone)
            change(case.between[step], [mine, alone], 100 * case.number + step)
    for stage in own:
        mine[stage].check_kept()
    assert all(torch.equal(now, was) for now, was in outputs), "an output that was kept was written to"


def given(case: Case, batch: list[Tensor], targets: list[Tensor]) -> tuple[Any, Any]:
    """What this rank gives to `step`: a tensor where micro-batches have one shape, else a list."""
    me, last = dist.get_rank(), case.made.stages - 1
    x: Any = shard_of(case, 0, batch) if me in case.meshes[0] else batch
    y: Any = shard_of(case, last, targets) if me in case.meshes[last] else targets
    same = case.as_tensor and all(len({t.shape for t in each}) == 1 and each[0].shape[0] > 0 for each in (x, y))
    return (torch.cat(x), torch.cat(y)) if same else (x, y)


# What is compared ---------------------------------------------------------------------------------------------


def compare(
    case: Case,
    own: list[int],
    mine: list[nn.Module],
    alone: list[nn.Module],
    losses: Tensor,
    expected: Tensor,
) -> None:
    last = case.made.stages - 1
    if case.is_cut:
        *grads, losses = gather(case, own, mine, losses)
        near("losses", losses, expected.double(), case)
        for stage, (found, wanted) in enumerate(zip(grads, map(flat, alone), strict=True)):
            near(f"gradients of stage {stage}", found, wanted, case)
    elif last in own:
        near("losses", losses, expected, case)
    else:
        assert losses.numel() == 0, "losses on a rank without the last stage"
    for stage in own:
        for (name, p), q in zip(mine[stage].named_parameters(), alone[stage].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"gradient of {stage}.{name}: {p.grad} and {q.grad}"
            if p.grad is not None and q.grad is not None and not case.is_cut:
                near(f"gradient of {stage}.{name}", p.grad, q.grad, case)
        for (name, b), c in zip(mine[stage].named_buffers(), alone[stage].buffers(), strict=True):
            near(f"buffer {stage}.{name}", b, c, case)


def take_sums(own: list[int], mine: list[nn.Module], alone: list[nn.Module]) -> None:
    """What ranks of a mesh would sum before an optimiser's step: equal, and not only near, from then on."""
    for stage in own:
        for p, q in zip(mine[stage].parameters(), alone[stage].parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()


def near(what: str, found: Tensor, wanted: Tensor, case: Case) -> None:
    if case.is_exact:
        assert torch.equal(found, wanted), f"{what}: {found} and not {wanted}"
        return
    loosest = max(TOLERANCE[part.dtype] for part in case.parts)
    bound = loosest * (1 + wanted.double().abs().max()) if wanted.numel() else torch.tensor(1.0)
    error = (found.double() - wanted.double()).abs().max() if wanted.numel() else torch.tensor(0.0)
    assert found.shape == wanted.shape and error <= bound, f"{what}: {found} and not {wanted}"


def flat(module: nn.Module) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([grad.double().reshape(-1) for grad in grads])


def gather(case: Case, own: list[int], mine: list[nn.Module], losses: Tensor) -> list[Tensor]:
    """Each stage's gradients, and the losses: sums over its mesh, of terms where tensors are cut."""
    rows = []
    for stage, module in enumerate(mine):
        share = 1.0 if case.parts[stage].layout != "r" else 1 / len(case.meshes[stage])
        rows.append(flat(module) * share if stage in own else torch.zeros_like(flat(module)))
    last = case.made.stages - 1
    share = 1.0 if case.parts[last].layout.startswith("s") else 1 / len(case.meshes[last])
    empty = torch.zeros(case.made.microbatches, dtype=torch.float64)
    rows.append(losses.double() * share if last in own else empty)
    total = torch.cat(rows)
    dist.all_reduce(total)
    return list(total.split([len(row) for row in rows]))


# What is done between -----------------------------------------------------------------------------------------


def prepare(
    case: Case,
    what: str,
    pipe: Pipeline,
    batch: list[Tensor],
    targets: list[Tensor],
    alone: list[nn.Module],
    outputs: list[tuple[Tensor, Tensor]],
) -> None:
    me = dist.get_rank()
    if what == "eval":
        found = pipe.eval_step(*given(case, batch, targets))
        outputs += [(y, y.clone()) for y in found.outputs]
        last = case.made.stages - 1
        if me in case.meshes[last] and case.seed is None:
            modes = [module.training for module in alone]
            for i, x in enumerate(batch):
                with torch.no_grad():
                    evaluated = [module.eval() for module in alone]
                    wanted = forward_reference(
                        evaluated, (x,), graph=case.graph, seeds=[None] * len(alone), keywords={}
                    )
                near("output", found.outputs[i], shard_of(case, last, [wanted])[0], case)
            for module, mode in zip(alone, modes, strict=True):
                module.train(mode)
    if what == "refused batch" and me in case.meshes[0]:
        refuses(lambda: pipe.step([*batch, batch[0]], targets), "batch is a list of")
    if what == "inference mode":
        with torch.inference_mode():
            refuses(lambda: pipe.step(batch, targets), "inference_mode")
    if what == "bad pipeline":
        worse = [[0]] * (case.made.stages + 1)
        refuses(lambda: Pipeline([], worse, case.made, timeout=TIMEOUT), "expected one for each of the")


def refuses(call: Any, words: str) -> None:
    try:
        call()
    except (ValueError, PeerMismatch) as error:
        assert words in str(error), f"refused with other words: {error}"
    else:
        raise AssertionError(f"not refused, expected: {words}")


def change(how: str, sets: list[list[nn.Module]], seed: int) -> None:
    """The same to both sets of stages."""
    for stages in sets:
        torch.manual_seed(seed)
        parameters = [p for stage in stages for p in stage.parameters()]
        if how in ("sgd", "adamw fused", "adamw foreach"):
            options = {"foreach": how == "adamw foreach", "fused": how == "adamw fused", "lr": 0.05}
            kind = torch.optim.SGD if how == "sgd" else torch.optim.AdamW
            one = kind([p for p in parameters if p.requires_grad], **({"lr": 0.05} if how == "sgd" else options))
            one.step()
        for stage in stages:
            state = {name: value.clone() for name, value in stage.state_dict().items()}
            if how == "load":
                stage.load_state_dict({n: v * 0.9 if v.is_floating_point() else v for n, v in state.items()})
            for p in stage.parameters():
                if how == "data":
                    p.data.mul_(0.8)
                if how == "swap":
                    p.data = p.data.clone() * 1.1
        if how != "accumulate":
            for p in parameters:
                p.grad = None


# A stage that raises ------------------------------------------------------------------------------------------


class Enough(ArithmeticError):
    pass


def expect_failure(
    case: Case, raises: Raise, pipe: Pipeline, mine: list[nn.Module], batch: list[Tensor], targets: list[Tensor]
) -> None:
    me, victim = dist.get_rank(), case.meshes[raises.stage][0]
    if me == victim:
        break_stage(pipe, raises)
    try:
        found = pipe.step(*given(case, batch, targets), loss_scale=case.scale)
    except Enough as error:
        assert me == victim, "an error of another rank as if it were this one's"
        assert f"stage {raises.stage}, " in "".join(error.__notes__), error.__notes__
    except WeftError as error:
        assert me != victim and isinstance(error, StageFailed), f"{type(error).__name__}: {error}"
        for words in (f"rank {victim} failed at ", f"(stage {raises.stage}, ", "Enough: at random"):
            assert words in str(error), f"{words!r} is missing: {error}"
    else:
        spare = not any(me in mesh for mesh in case.meshes)
        assert spare, f"a step in which stage {raises.stage} raised returned {found}"
        return
    refuses_later = None
    try:
        pipe.step(*given(case, batch, targets))
    except WeftError as error:
        refuses_later = str(error)
    assert refuses_later and "cannot be used any more" in refuses_later, refuses_later


def break_stage(pipe: Pipeline, raises: Raise) -> None:
    stage = pipe.stages[raises.stage]
    module, count = stage.module, -1

    def fall() -> None:
        raise Enough("at random")

    if raises.phase == "loss":
        inner = stage._loss_fn
        seen = iter(range(1 << 30))

        def measure(output: Tensor, target: Tensor) -> Tensor:
            if next(seen) == raises.microbatch:
                fall()
            assert inner is not None
            return inner(output, target)

        stage._loss_fn = measure
        return

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count >= raises.microbatch:
            fall()

    assert isinstance(module, Stage)
    if raises.phase == "forward":
        module.register_forward_pre_hook(lambda *_: counted())
    elif raises.phase == "backward":
        module.mix[0].register_forward_hook(
            lambda _module, _args, y: y.requires_grad and y.register_hook(counted) and None
        )
    elif raises.phase == "weights":
        module.mix[0].weight.register_hook(counted)
    else:
        module.mix[0].weight.register_post_accumulate_grad_hook(counted)
