"""Pipelines under autocast, other defaults, refused calls, several threads; and ranks that leave."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import LONG, WIDTH, Layer, gradients, is_same, loss_fn, make_batch, make_layers
from test_pipeline_stages import COUNT, make_pipe, parameters
from torch import Tensor, nn

from weft.errors import WeftError
from weft.pipeline.run.api import Pipeline
from weft.reference import step_reference

# Modes and calls ----------------------------------------------------------------------------------------------


def autocast_alone(modules: Sequence[nn.Module], x: Tensor, target: Tensor) -> Tensor:
    """A step in one process as torch has it: forward under autocast, backward outside."""
    losses = []
    for part, goal in zip(x.tensor_split(COUNT), target.tensor_split(COUNT), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            for module in modules:
                part = module(part)
            loss = loss_fn(part.float(), goal)
        (loss / COUNT).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def call_under_autocast(name: str, **options: Any) -> None:
    modules, alone = make_layers(2), make_layers(2)
    optimizers = [torch.optim.SGD(parameters(each), lr=0.5) for each in (modules, alone)]
    widened = lambda y, t: loss_fn(y.float(), t)  # noqa: E731
    with make_pipe(modules, name, loss_fn=widened, **options) as pipe, torch.autocast("cpu", torch.bfloat16):
        for step in range(3):  # all in one block, so that what autocast keeps of the weights could be stale
            batch = make_batch(COUNT, seed=step)
            pipe.eval_step(*batch)
            losses = pipe.step(*batch)
            with torch.autocast("cpu", enabled=False):
                expected = autocast_alone(alone, *batch)
            if pipe.has_last_stage:
                assert torch.allclose(losses, expected, rtol=1e-2), (losses, expected)
            for stage in pipe.stages:
                mine, theirs = gradients(modules[stage]), gradients(alone[stage])
                assert mine.keys() == theirs.keys()
                for key, grad in mine.items():
                    assert torch.allclose(grad, theirs[key], rtol=0.05, atol=2e-3), (name, step, key)
            for p, q in zip(modules[pipe_stage(pipe)].parameters(), alone[pipe_stage(pipe)].parameters(), strict=True):
                q.grad = p.grad.clone()  # so that differences do not add up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for layer in (0, 1):
                for p in alone[layer].parameters():
                    dist.broadcast(p.data, layer)


def pipe_stage(pipe: Pipeline) -> int:
    (stage,) = pipe.stages
    return stage


def call_in_modes() -> None:
    for name in ("1f1b", "zero-bubble"):
        call_under_autocast(name)
    call_under_autocast("1f1b", checkpoint=True)
    batch = make_batch(COUNT)
    modules, alone = make_layers(2), make_layers(2)
    with make_pipe(modules) as pipe:
        with torch.inference_mode(), pytest.raises(ValueError, match=r"step is called in torch\.inference_mode"):
            pipe.step(*batch)
        with torch.no_grad():  # a refused call, and then a good one
            pipe.step(*batch)
        step_reference(alone, *batch, microbatches=COUNT, loss_fn=loss_fn)
        place = pipe_stage(pipe)
        assert is_same(gradients(modules[place]), gradients(alone[place]))
        with torch.inference_mode():
            found = pipe.eval_step(*batch)
        assert found.losses.shape == ((COUNT,) if pipe.has_last_stage else (0,))
        uneven = {"batch": (torch.ones(5, 3, WIDTH), torch.ones(6, 3, WIDTH))}
        for bad in ({"batch": torch.ones(2, 3)}, {"batch": None}, uneven, {"targets": 3}, {"targets": torch.ones(2)}):
            with pytest.raises(ValueError, match="expected") if refused(bad, pipe) else nullcontext():
                if refused(bad, pipe):
                    pipe.step(**{"batch": batch[0], "targets": batch[1], **bad})
        pipe.step(*batch)
        step_reference(alone, *batch, microbatches=COUNT, loss_fn=loss_fn)
        assert is_same(gradients(modules[place]), gradients(alone[place]))


def on_another_default() -> None:
    """A default device of the user's, and a pipeline that is made and left under it."""
    modules, alone = make_layers(2), make_layers(2)
    batch = make_batch(COUNT)
    with torch.device("meta"), make_pipe(modules) as pipe:
        losses = pipe.step(*batch)
        with torch.device("cpu"):
            expected = step_reference(alone, *batch, microbatches=COUNT, loss_fn=loss_fn)
        assert not pipe.has_last_stage or torch.equal(losses, expected)
        assert is_same(gradients(modules[pipe_stage(pipe)]), gradients(alone[pipe_stage(pipe)]))


def refused(bad: dict[str, Any], pipe: Pipeline) -> bool:
    return ("targets" in bad) == pipe.has_last_stage


def test_modes_and_refused_calls() -> None:
    run_ranks(call_in_modes, 2)
    run_ranks(on_another_default, 2)


class Slow(nn.Module):
    """Waits in its forward pass until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.entered, self.go_on = Layer(), threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.go_on.wait(LONG)
        return self.layer(x)


def call_from_threads() -> None:
    slow = [Slow(), Slow()]
    with make_pipe(slow) as pipe:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(pipe.step(*make_batch(COUNT))))
        thread.start()
        slow[0].entered.wait(LONG) if dist.get_rank() == 0 else None
        for call in (pipe.step, pipe.eval_step, lambda *_: pipe.close()):
            if dist.get_rank() == 0:
                with pytest.raises(WeftError, match="the pipeline is in a step already"):
                    call(*make_batch(COUNT))
        for each in slow:
            each.go_on.set()
        thread.join(LONG)
        assert len(results) == 1
    # Two pipelines on one group, each on a thread of its own, with steps at the same time.
    made = [(make_layers(2, seed=i), make_layers(2, seed=i)) for i in range(2)]
    pipes = [make_pipe(mine, name) for (mine, _), name in zip(made, ("1f1b", "zero-bubble"), strict=True)]
    failed: list[BaseException] = []

    def train(index: int) -> None:
        try:
            for step in range(6):
                batch = make_batch(COUNT, seed=10 * index + step)
                pipes[index].step(*batch)
                step_reference(made[index][1], *batch, microbatches=COUNT, loss_fn=loss_fn)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not failed, failed
    for (mine, alone), pipe in zip(made, pipes, strict=True):
        place = pipe_stage(pipe)
        assert is_same(gradients(mine[place]), gradients(alone[place]))
        pipe.close()


def test_steps_from_several_threads() -> None:
    run_ranks(call_from_threads, 2)


# Who must hear of what ----------------------------------------------------------------------------------------


def leave() -> str:
    """Rank 0 leaves between two steps; rank 2 has no stage."""
    with pytest.raises((ArithmeticError, WeftError)) as caught:  # noqa: SIM117, PT012
        with make_pipe(make_layers(2)) as pipe:
            pipe.step(*make_batch(COUNT))
            if dist.get_rank() == 0:
                raise ArithmeticError("no more")
            while True:
                pipe.step(*make_batch(COUNT))
    return str(caught.value)


def test_a_rank_that_leaves_is_told_of() -> None:
    first, *others = run_ranks(leave, 3)
    assert first == "no more"
    for text in others:
        assert text == "rank 0 left the pipeline with ArithmeticError: no more"
