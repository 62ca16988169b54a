"""Pipelines in a training loop: optimisers, accumulation, checkpoints, evaluation, traces, groups."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from pipeline_cases import LONG, Layer, gradients, is_same, loss_fn, make_batch, make_layers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from weft.pipeline import Costs, schedule
from weft.pipeline.models import GPTConfig, UConfig, gpt_stage, loss_of_pixels, loss_of_tokens, u_graph, u_stage
from weft.pipeline.run.api import Pipeline
from weft.reference import step_reference
from weft.timeline import record

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def accumulate() -> None:
    """Three steps before the optimiser's are one of all their micro-batches."""
    made = schedule("eager-1f1b+delay", stages=2, microbatches=2)
    layers, alone = make_layers(2), make_layers(2)
    place = dist.get_rank()
    optimiser, other = (torch.optim.SGD(each[place].parameters(), lr=0.1, momentum=0.9) for each in (layers, alone))
    with Pipeline(layers, [0, 1], made, loss_fn=loss_fn, timeout=LONG) as pipe:
        for update in range(3):
            for part in range(3):
                batch = make_batch(2, seed=3 * update + part)
                pipe.step(*batch, loss_scale=1 / 3)
                step_reference(alone, *batch, microbatches=2, loss_fn=loss_fn, loss_scale=1 / 3)
            assert is_same(gradients(layers[place]), gradients(alone[place]))
            for each in (optimiser, other):
                each.step()
                each.zero_grad()
            for layer in alone:  # those of the other rank stay as they are: bring them up to date
                source = alone.index(layer)
                for p in layer.parameters():
                    dist.broadcast(p.data, source)
                layer.zero_grad()


def test_gradients_accumulate_over_steps() -> None:
    run_ranks(accumulate, 2)


# Checkpoints --------------------------------------------------------------------------------------------------


def train(directory: str, first: int, last: int, save: bool) -> list[float]:
    """A GPT with dropout from step `first` to `last`; its losses."""
    config = GPTConfig(width=16, heads=2, layers=4, context=8, dropout=0.2)
    made = schedule("zero-bubble", stages=2, microbatches=3)
    module = gpt_stage(config, dist.get_rank(), 2)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    with Pipeline({dist.get_rank(): module}, [0, 1], made, loss_fn=loss_of_tokens, timeout=LONG, seed=5) as pipe:

        def state() -> dict[str, Any]:
            weights, moments = get_state_dict(module, optimiser, options=FLAT)
            return {"model": weights, "optimiser": moments, "pipeline": pipe.state_dict()}

        if first:
            found = state()
            dcp.load(found, checkpoint_id=directory)
            set_state_dict(
                module,
                optimiser,
                model_state_dict=found["model"],
                optim_state_dict=found["optimiser"],
                options=FLAT,
            )
            pipe.load_state_dict(found["pipeline"])
        for step in range(first, last):
            ids = torch.randint(256, (6, 9), generator=torch.Generator().manual_seed(step))
            optimiser.zero_grad()
            losses += pipe.step(ids[:, :-1], ids[:, 1:]).tolist()
            optimiser.step()
        if save:
            dcp.save(state(), checkpoint_id=directory)
    return losses


def train_and_resume(directory: str) -> tuple[list[float], list[float], list[float]]:
    whole = train(directory, 0, 4, save=False)
    return whole, train(directory, 0, 2, save=True), train(directory, 2, 4, save=False)


def test_a_checkpoint_resumes_to_the_same_losses(tmp_path) -> None:
    results = run_ranks(train_and_resume, 2, str(tmp_path / "checkpoint"))
    whole, first, second = results[1]
    assert whole == first + second
    assert len(set(whole)) == 12, "dropout differs from step to step"


# Models -------------------------------------------------------------------------------------------------------


def train_u(stages: int) -> None:
    config = UConfig(width=8, levels=2, heads=2, pixels=8)
    graph, rank = u_graph(config, stages), dist.get_rank()
    alone = [u_stage(config, i, stages) for i in range(stages)]
    module = u_stage(config, rank, stages)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mask = (x[:, :1] > 0).float()
    made = schedule("eager-1f1b", stages=stages, microbatches=4)
    options = {"edges": graph, "loss_fn": loss_of_pixels, "timeout": LONG}
    with Pipeline({rank: module}, list(range(stages)), made, **options) as pipe:
        losses = pipe.step(x, mask)
        expected = step_reference(alone, x, mask, microbatches=4, loss_fn=loss_of_pixels, graph=graph)
        assert not pipe.has_last_stage or torch.equal(losses, expected)
        assert is_same(gradients(module), gradients(alone[rank]))


def test_a_u_transformer_with_its_skips() -> None:
    run_ranks(train_u, 4, 4)


# Evaluation, traces, groups -----------------------------------------------------------------------------------


class Odd(nn.Module):
    """Returns a tensor that does not lie in one piece, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(dropout=0.5)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = self.layer(x if factor is None else x * factor[:, None])
        return y.transpose(1, 2).contiguous().transpose(1, 2)


def look() -> tuple[set[str], list[str], tuple[str, ...]]:
    made = schedule("1f1b", stages=2, microbatches=4)
    torch.manual_seed(0)
    layers = [Odd(), Odd()]
    x, target = make_batch(4)
    factor = torch.full((8, 1), 2.0)
    with Pipeline(layers, [0, 1], made, loss_fn=loss_fn, timeout=LONG, seed=1) as pipe:
        with torch.inference_mode():
            first = pipe.eval_step(x, target, factor=factor)
        assert all(module.training for layer in layers for module in layer.modules())
        with torch.no_grad():
            layers[0].eval()
            layers[1].eval()
            expected = layers[1](layers[0](x, factor), factor)
        if pipe.has_last_stage:
            assert torch.equal(torch.cat(first.outputs), expected)
            assert first.losses.shape == (4,)
        layers[0].train()
        layers[1].train()
        assert pipe.eval_step(x).losses.shape == (0,)
        alone = [Odd(), Odd()]
        for one, other in zip(alone, layers, strict=True):
            one.load_state_dict(other.state_dict())
        with record.trace() as trace:
            losses = pipe.step(x, target, factor=factor)
        expected = step_reference(alone, x, target, microbatches=4, loss_fn=loss_fn, seed=1, factor=factor)
        assert not pipe.has_last_stage or torch.equal(losses, expected)
        events = trace.timeline.events
        predicted = made.simulate(Costs.uniform(2, transfer=0.1)).timeline
        names = {e.name for e in predicted.events if e.lane.startswith(f"rank {dist.get_rank()}/")}
        assert {e.name for e in events if e.kind != "wait"} == names
        return {e.lane for e in events}, [e.name for e in events if e.kind == "compute"], made.ranks[dist.get_rank()]


def test_evaluation_and_a_trace_like_the_simulation() -> None:
    for lanes, computed, actions in run_ranks(look, 2):
        assert lanes == {"compute", "in", "out"}
        assert computed == [str(action) for action in actions]


def signals() -> None:
    """Nothing but signals travel: the step works, on zeros."""
    made = schedule("eager-1f1b", stages=2, microbatches=3)
    with Pipeline(make_layers(2), [0, 1], made, loss_fn=loss_fn, timeout=LONG, payload="signals") as pipe:
        for _ in range(2):
            losses = pipe.step(*make_batch(3))
        assert len(losses) == (3 if pipe.has_last_stage else 0)
        assert pipe.buffer_bytes == 0


def in_a_part_of_the_world() -> bool:
    """Ranks 1 and 2 have a pipeline; ranks 0 and 3 have none, and do not wait for it. Twice, one after the other."""
    me = dist.get_rank()
    group = dist.new_group([1, 2])
    if me in (0, 3):
        return True
    made = schedule("1f1b", stages=2, microbatches=2)
    for _ in range(2):
        layers, alone = make_layers(2), make_layers(2)
        with Pipeline(layers, [1, 2], made, loss_fn=loss_fn, timeout=LONG, group=group) as pipe:
            pipe.step(*make_batch(2))
            step_reference(alone, *make_batch(2), microbatches=2, loss_fn=loss_fn)
            (stage,) = pipe.stages
            assert is_same(gradients(layers[stage]), gradients(alone[stage]))
    return True


def in_groups_of_some(rounds: int) -> tuple[int, int]:
    """Pipelines of ranks 2 and 0 in that order, which are in different numbers of groups; what they leave behind."""
    me = dist.get_rank()
    dist.new_group([0, 1])
    group = dist.new_group([2, 0], sort_ranks=False)
    if me == 1:
        return 0, 0
    made = schedule("1f1b", stages=2, microbatches=2)
    before = None
    for _ in range(rounds):
        layers, alone = make_layers(2), make_layers(2)
        with Pipeline(layers, [2, 0], made, loss_fn=loss_fn, timeout=LONG, group=group) as pipe:
            pipe.step(*make_batch(2))
            step_reference(alone, *make_batch(2), microbatches=2, loss_fn=loss_fn)
            (stage,) = pipe.stages
            assert is_same(gradients(layers[stage]), gradients(alone[stage]))
        now = len(dist.distributed_c10d._world.pg_map), threading.active_count()
        before = before or now
    assert before is not None
    end = time.monotonic() + LONG
    while threading.active_count() > before[1] and time.monotonic() < end:  # those of the last one
        time.sleep(0.01)
    return now[0] - before[0], threading.active_count() - before[1]


def idle_rank() -> int:
    """A rank in no mesh takes part in making the pipeline, and has nothing to do."""
    made = schedule("1f1b", stages=2, microbatches=2)
    with Pipeline(make_layers(2), [2, 0], made, loss_fn=loss_fn, timeout=LONG) as pipe:
        return len(pipe.step(*make_batch(2)))


def test_signals_only() -> None:
    run_ranks(signals, 2)


def test_groups() -> None:
    assert run_ranks(in_a_part_of_the_world, 4) == [True] * 4
    assert run_ranks(idle_rank, 3) == [2, 0, 0]


def test_pipelines_of_some_ranks_leave_nothing_behind() -> None:
    for groups, threads in run_ranks(in_groups_of_some, 3, 6):
        assert groups == 0
        assert threads <= 0
