"""A step that breaks anywhere ends with an error on every rank: nobody goes on with the results of half a step."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import Layer, loss_fn, make_batch, make_layers
from torch import Tensor, nn

from weft.errors import WeftError
from weft.pipeline import SCHEDULES, schedule
from weft.pipeline.run.api import Pipeline

TIMEOUT = 20.0
MICROBATCHES = 3


class Raising(nn.Module):
    """A layer that raises once, in one phase of its last micro-batch."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.layer, self.phase, self.seen = Layer(), phase, 0
        if phase == "weights":
            self.layer.up.weight.register_hook(self.count)
        if phase == "optimiser":  # as optimisers that step in the backward pass do
            self.layer.up.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, _: Tensor) -> None:
        self.seen += 1
        if self.seen == MICROBATCHES:
            raise ArithmeticError(f"had enough in {self.phase}")

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.phase == "forward":
            self.count(x)
        if self.phase == "backward":
            y.register_hook(self.count)
        return y


def break_steps(stages: int, name: str) -> list[tuple[str, int, str]]:
    """(phase, victim, what this rank saw) for every phase and every stage; one pipeline for each."""
    made = schedule(name, stages=stages, microbatches=MICROBATCHES)
    meshes, me = [made.rank_of(stage) for stage in range(stages)], dist.get_rank()
    seen = []
    for phase in ("forward", "backward", "weights", "optimiser", "loss"):
        for victim in range(stages) if phase != "loss" else [stages - 1]:
            layers = make_layers(stages)
            if meshes[victim] == me and phase != "loss":
                layers[victim] = Raising(phase)
            calls = 0

            def measure(output: Tensor, target: Tensor, phase: str = phase) -> Tensor:
                nonlocal calls
                calls += 1
                if phase == "loss" and calls == MICROBATCHES:
                    raise ArithmeticError("had enough in loss")
                return loss_fn(output, target)

            with Pipeline(layers, meshes, made, loss_fn=measure, timeout=TIMEOUT) as pipe:
                try:
                    losses = pipe.step(*make_batch(MICROBATCHES))
                    text = f"no error: {losses.tolist()}"
                except (WeftError, ArithmeticError) as error:
                    text = f"{type(error).__name__}: {error}" + "".join(getattr(error, "__notes__", []))
                    with pytest.raises(WeftError, match="cannot be used any more"):
                        pipe.step(*make_batch(MICROBATCHES))
            seen.append((phase, victim, text))
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_returns_from_a_broken_step(name: str) -> None:
    stages = 4 if name == "interleaved-1f1b" else 3
    made = schedule(name, stages=stages, microbatches=MICROBATCHES)
    for rank, seen in enumerate(run_ranks(break_steps, len(made.ranks), stages, name)):
        for phase, victim, text in seen:
            holder = made.rank_of(victim)
            case = (name, phase, victim, rank, text)
            assert text.startswith("ArithmeticError" if holder == rank else "StageFailed"), case
            assert f"had enough in {phase}" in text, case
            assert f"rank {holder}" in text, case
            assert f"(stage {victim}, " in text, case
