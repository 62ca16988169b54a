"""Gradients clipped over all stages: the norm and the gradients of one process, bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import LONG, loss_fn, make_batch, make_layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weft
from weft.pipeline.run.api import Pipeline
from weft.reference import step_reference


def clip_everywhere() -> None:
    """Norms above and below the limit, of several types; two stages on each rank; a parameter without a gradient."""
    rank = dist.get_rank()
    for name, stages in (("1f1b", 3), ("zero-bubble", 3), ("interleaved-1f1b", 6)):
        made = weft.schedule(name, stages=stages, microbatches=4)
        mine = {s: m for s, m in enumerate(make_layers(stages)) if made.rank_of(s) == rank}
        alone = make_layers(stages)
        for module in (*mine.values(), *alone):
            module.idle = nn.Parameter(torch.ones(3))
        batch = make_batch(4)
        meshes = [made.rank_of(s) for s in range(stages)]
        with Pipeline(mine, meshes, made, loss_fn=loss_fn, timeout=LONG) as pipe:
            for max_norm, norm_type in ((0.05, 2.0), (50.0, 2.0), (0.01, float("inf")), (0.3, 1.0)):
                pipe.step(*batch)
                got = pipe.clip_grad_norm_(max_norm, norm_type=norm_type)
                if name == "interleaved-1f1b":
                    break  # another order of sums: compared below, not by bits
                step_reference(alone, *batch, microbatches=4, loss_fn=loss_fn)
                every = [p for module in alone for p in module.parameters()]
                want = nn.utils.clip_grad_norm_(every, max_norm, norm_type=norm_type)
                assert torch.equal(got, want), (name, got, want)
                for stage, module in mine.items():
                    for key, p in module.named_parameters():
                        other = alone[stage].get_parameter(key).grad
                        assert (p.grad is None) == (other is None), key
                        assert other is None or torch.equal(p.grad, other), (name, stage, key)
                for p in (*pipe.parameters(), *every):
                    p.grad = None
            if name == "interleaved-1f1b":
                step_reference(alone, *batch, microbatches=4, loss_fn=loss_fn)
                want = nn.utils.clip_grad_norm_([p for module in alone for p in module.parameters()], max_norm)
                torch.testing.assert_close(got, want)
            with pytest.raises(ValueError, match="max_norm is 0, expected a number above 0"):
                pipe.clip_grad_norm_(0)
            with pytest.raises(ValueError, match=r"different values.*rank 0: max_norm=1.0.*rank 1: max_norm=2.0"):
                pipe.clip_grad_norm_(1.0 + rank)
            assert pipe.clip_grad_norm_(1.0).shape == ()  # it goes on


def clip_shared() -> None:
    """Stages of two ranks each, whose weights are DTensors; and a shared parameter of one rank's stages."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    made = weft.schedule("1f1b", stages=2, microbatches=2)
    stage, alone = make_layers(2)[rank // 2], make_layers(2)
    with Pipeline({rank // 2: stage}, [[0, 1], [2, 3]], made, loss_fn=loss_fn, timeout=LONG) as pipe:
        pipe.step(*make_batch(2))
        for module in stage.modules():
            for key, p in list(module.named_parameters(recurse=False)):
                spread = nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Shard(0)]))
                spread.grad = distribute_tensor(p.grad, mesh["tp"], [Shard(0)])
                setattr(module, key, spread)
        got = pipe.clip_grad_norm_(0.01)
    step_reference(alone, *make_batch(2), microbatches=2, loss_fn=loss_fn)
    want = nn.utils.clip_grad_norm_([p for module in alone for p in module.parameters()], 0.01)
    torch.testing.assert_close(got, want)
    for key, p in stage.named_parameters():
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), alone[rank // 2].get_parameter(key).grad)


def test_the_norm_is_that_of_one_process() -> None:
    run_ranks(clip_everywhere, 3, timeout=120.0)


def test_weights_that_ranks_share() -> None:
    run_ranks(clip_shared, 4, timeout=120.0)
