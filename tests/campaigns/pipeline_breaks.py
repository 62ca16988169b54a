"""Stages that raise and calls that are refused, in the pipeline campaign."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from pipeline_case import Case, Raise
from pipeline_model import Stage, check, given
from torch import Tensor, nn

from weft.errors import WeftError
from weft.pipeline import StageFailed
from weft.pipeline.run.api import Pipeline


def refuses(call: Any, words: str, kind: type[Exception] = ValueError) -> None:
    try:
        call()
    except kind as error:
        check(words in str(error), f"refused with other words: {error}")
    else:
        raise AssertionError(f"not refused, expected: {words}")


class Enough(ArithmeticError):
    pass


def expect_failure(case: Case, raises: Raise, pipe: Pipeline, batch: list[Tensor], targets: list[Tensor]) -> None:
    me, victim = dist.get_rank(), case.meshes[raises.stage][0]
    if me == victim:
        break_stage(pipe, raises)
    try:
        found = pipe.step(*given(case, batch, targets), loss_scale=case.scale)
    except Enough as error:
        check(me == victim, "an error of another rank as if it were this one's")
        check(f"stage {raises.stage}, " in "".join(error.__notes__), f"the notes are {error.__notes__}")
    except WeftError as error:
        check(me != victim and isinstance(error, StageFailed), f"{type(error).__name__}: {error}")
        for words in (f"rank {victim} failed at ", f"(stage {raises.stage}, ", "Enough: at random"):
            check(words in str(error), f"{words!r} is missing: {error}")
    else:
        spare = not any(me in mesh for mesh in case.meshes)
        check(spare, f"a step in which stage {raises.stage} raised returned {found}")
        return
    refuses(lambda: pipe.step(*given(case, batch, targets)), "cannot be used any more", WeftError)


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

    def watch(_module: nn.Module, _args: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(counted)

    assert isinstance(module, Stage)
    if raises.phase == "forward":
        module.register_forward_pre_hook(lambda *_: counted())
    elif raises.phase == "backward":
        module.mix[0].register_forward_hook(watch)
    elif raises.phase == "weights":
        module.mix[0].weight.register_hook(counted)
    else:
        module.mix[0].weight.register_post_accumulate_grad_hook(counted)
