"""ZB-V and DualPipeV, against torch.distributed.pipelining's own, and where torch has none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, _PipelineScheduleRuntime
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.pipeline import Costs, schedule
from weft.pipeline.schedules.schedule import from_torch_csv


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def torch_words(runtime: _PipelineScheduleRuntime) -> list[list[str]]:
    """torch's actions without its bubbles."""
    return [[str(a) for a in own if a is not None] for _, own in sorted(runtime.pipeline_order.items())]


@pytest.mark.parametrize(("name", "theirs"), [("zb-v", ScheduleZBVZeroBubble), ("dualpipe-v", ScheduleDualPipeV)])
def test_v_schedules_are_what_torch_makes(name: str, theirs: type[_PipelineScheduleRuntime]) -> None:
    compared = 0
    for ranks in range(1, 7):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            for microbatches in range(2 * ranks if name == "dualpipe-v" else 1, 13):
                module, stages = torch.nn.Linear(2, 2), (0, 2 * ranks - 1)
                pair = [PipelineStage(module, stage, 2 * ranks, torch.device("cpu")) for stage in stages]
                runtime = theirs(pair, microbatches, loss_fn=loss)  # type: ignore[call-arg]
                text = "\n".join(",".join(own) for own in torch_words(runtime))
                made = schedule(name, stages=2 * ranks, microbatches=microbatches)
                assert made.ranks == from_torch_csv(text).ranks, (ranks, microbatches)
                assert runtime.stage_index_to_group_rank == {s: made.rank_of(s) for s in range(2 * ranks)}
                compared += 1
        finally:
            dist.destroy_process_group()
    assert compared == (72 if name == "zb-v" else 36)


def test_zb_v_has_no_bubble_where_all_parts_take_equally_long() -> None:
    found = schedule("zb-v", stages=8, microbatches=12).simulate(Costs.uniform(8, forward=1.0, backward=2.0))
    work = 2 * 3 * 12  # of each rank: two stages, F, I and W
    assert found.seconds == work + 3  # the last rank waits for three forwards; nobody waits later
    assert max(found.schedule.peak_by_rank) <= 8  # as 1F1B keeps on rank 0, in halves of its stages


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_sizes_that_torch_refuses(name: str) -> None:
    made = schedule(name, stages=5, microbatches=2)
    assert [made.stages_of(rank) for rank in range(3)] == [(0, 4), (1, 3), (2,)]
    with pytest.raises(ValueError, match=r"got ranks=5 for 5 stages of .*; expected 3, two a rank"):
        schedule(name, stages=5, microbatches=2, ranks=5)
