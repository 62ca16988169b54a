"""Runs one case of the pipeline campaign on this rank, and compares with all stages in this process."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from pipeline_breaks import expect_failure, refuses
from pipeline_case import Case
from pipeline_model import batch_of, check, given, loss_of, make_stages, placements, shard_of
from torch import Tensor, nn

from weft.pipeline import StageFailed
from weft.pipeline.run.api import Pipeline
from weft.reference import forward_reference, step_reference
from weft.timeline import record

TIMEOUT = 60.0
TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 6e-2, "float16": 6e-2}


def run_case(case: Case) -> None:
    """Raises what is wrong. A rank without a stage may be behind, and hear of a failure steps before it."""
    has_stage = any(dist.get_rank() in mesh for mesh in case.meshes)
    with suppress(*([StageFailed] if case.raises and not has_stage else [])):
        _run_case(case)


def _run_case(case: Case) -> None:
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
                expect_failure(case, raises, pipe, batch, targets)
                break
            prepare(case, before, pipe, batch, targets, alone, outputs)
            guard = torch.no_grad() if before == "no_grad" else record.trace() if before == "trace" else nullcontext()
            with guard:
                losses = pipe.step(*given(case, batch, targets), loss_scale=case.scale)
            expected = step_reference(
                alone, batch, targets, microbatches=case.made.microbatches, loss_fn=loss_of, graph=case.graph,
                loss_scale=case.scale, seed=case.seed, step=step,
            )  # fmt: skip
            compare(case, own, mine, alone, losses, expected)
            if case.is_cut and case.between[step] != "accumulate":
                take_sums(own, mine, alone)
            change(case.between[step], [mine, alone], 100 * case.number + step)
    for stage in own:
        mine[stage].check_kept()
    assert all(torch.equal(now, was) for now, was in outputs), "an output that was kept was written to"


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
    check(found.shape == wanted.shape and bool(error <= bound), f"{what}: {found} and not {wanted}")


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


def change(how: str, sets: list[list[nn.Module]], seed: int) -> None:
    """The same to both sets of stages."""
    for stages in sets:
        torch.manual_seed(seed)
        parameters = [p for stage in stages for p in stage.parameters()]
        if how in ("sgd", "adamw fused", "adamw foreach"):
            options = {"foreach": how == "adamw foreach", "fused": how == "adamw fused", "lr": 0.05, "eps": 1e-3}
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
