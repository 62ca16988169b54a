"""torch's CSV, against torch.distributed.pipelining's own loader, validator, simulator and generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from pipeline_values import SIZES, orders
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
    _validate_schedule,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.pipeline import SCHEDULES, Schedule, schedule
from weft.pipeline.schedules.schedule import from_torch_csv, to_torch_csv


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of that many ranks, of which only this one exists: enough to make torch's schedules."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def stages_of_rank_0(stages: int) -> list[PipelineStage]:
    module, world = torch.nn.Linear(2, 2), dist.get_world_size()
    return [PipelineStage(module, stage, stages, torch.device("cpu")) for stage in range(0, stages, world)]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def words(runtime: PipelineScheduleMulti) -> list[list[str]]:
    """torch's actions without its bubbles."""
    return [[str(a) for a in own if a is not None] for _, own in sorted(runtime.pipeline_order.items())]


def ours(made: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in made.ranks]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_torch_loads_and_lowers_what_we_write(name: str, microbatches: int, ranks: int, tmp_path: Path) -> None:
    turns = name in ("zb-v", "dualpipe-v", "interleaved-1f1b")
    stages = 2 * ranks if turns else ranks
    made = schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    file = tmp_path / "schedule.csv"
    file.write_text(to_torch_csv(made))
    runtime = _PipelineScheduleRuntime(stages_of_rank_0(stages), microbatches, loss_fn=loss)
    runtime._load_csv(str(file))
    assert words(runtime) == ours(made)
    assert runtime.stage_index_to_group_rank == {stage: made.rank_of(stage) for stage in range(stages)}
    computed = [
        [str(a) for a in own if a is not None and a.is_compute_op] for own in runtime.pipeline_order_with_comms.values()
    ]
    assert computed == ours(made)

    for form in ("compute_only", "compute_comms"):
        runtime._dump_csv(str(file), format=form)
        assert from_torch_csv(file.read_text(), name=name) == made


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6, 8, 10, 12])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_interleaved_is_what_torch_makes_where_its_rounds_are_full(microbatches: int, turns: int, ranks: int) -> None:
    stages = ranks * turns
    theirs = ScheduleInterleaved1F1B(stages_of_rank_0(stages), microbatches, loss_fn=loss)
    made = schedule("interleaved-1f1b", stages=stages, microbatches=microbatches, ranks=ranks)
    assert ours(made) == words(theirs)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6, 8, 10, 12])
def test_zero_bubble_is_what_torch_makes_with_one_stage_a_rank(microbatches: int, ranks: int) -> None:
    theirs = ScheduleInterleavedZeroBubble(stages_of_rank_0(ranks), microbatches, loss_fn=loss)
    assert ours(schedule("zero-bubble", stages=ranks, microbatches=microbatches)) == words(theirs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_finds_no_deadlock_either(name: str) -> None:
    for stages, microbatches in SIZES[::3]:
        made = schedule(name, stages=stages, microbatches=microbatches)
        actions = {rank: [_Action.from_str(str(a)) for a in own] for rank, own in enumerate(made.ranks)}
        _validate_schedule(actions, len(made.ranks), stages, microbatches)
        with_comms = _add_send_recv(actions, stage_to_rank=made.rank_of, num_stages=stages)
        ran = _simulate_comms_compute(with_comms, made.rank_of, stages)
        assert sum(a is not None and a.is_compute_op for own in ran.values() for a in own) == sum(map(len, made.ranks))


@given(orders())
@settings(max_examples=60, deadline=None)
def test_any_schedule_comes_back(made: Schedule) -> None:
    assert from_torch_csv(to_torch_csv(made), name=made.name) == made


def test_a_forward_and_a_backward_at_once_become_two() -> None:
    made = from_torch_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\r\n")
    assert ours(made) == [["0F0", "0F1", "0B0", "0B1"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "without actions"),
        ("0SEND_F0", "without actions"),
        ("0F0,0B0\n1F0,oops", "line 2: got the action 'oops'"),
        ("0F0,0B0\n1F0", "1B0 is missing"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_torch_csv(text)
