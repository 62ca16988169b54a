"""The models of `weft bench pipeline`, one stage of them on each rank, with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from weft.bench.pipeline_cases import GPT, PipelineCase, U
from weft.bench.pipeline_emulated import EmulatedStage
from weft.lab import Rank
from weft.pipeline.models import gpt_stage, u_stage
from weft.pipeline.models.gpt import loss_of_tokens
from weft.pipeline.models.utransformer import loss_of_pixels
from weft.pipeline.stage import output_names

# Emulated: what a forward of a stage lasts, and what goes over an edge.
SECONDS = 0.03
TOKENS, WIDTH = 128, 1024
# Real: sequences, or pictures, of a micro-batch.
SEQUENCES = 4

Tensors = dict[tuple[int, str], Tensor]


@dataclass(frozen=True)
class Model:
    """What a rank needs of a model.

    stages: all of them, the same on every rank; rank r trains that of its host
    batch, targets: of a whole step
    tensors: what the stages make of one micro-batch, by stage and name
    """

    stages: list[nn.Module]
    batch: Tensor
    targets: Tensor
    loss_fn: Callable[[Any, Any], Tensor]
    tensors: Tensors

    @property
    def edge_bytes(self) -> int:
        """Of the largest tensor between stages."""
        return max(tensor.nbytes for tensor in self.tensors.values())


def build(case: PipelineCase) -> Model:
    """The model of a case, from a fixed seed."""
    torch.manual_seed(0)
    stages, batch, targets, loss_fn = _emulated(case) if case.emulated else _real(case)
    made: Tensors = {}
    with torch.no_grad():
        for index, stage in enumerate(stages):
            forward_one(case, stage, index, made, batch)
    return Model(stages, batch, targets, loss_fn, made)


def forward_one(case: PipelineCase, stage: nn.Module, index: int, made: Tensors, batch: Tensor) -> None:
    """One micro-batch through a stage: takes its inputs from `made`, and adds its outputs there."""
    inputs = {edge.tensor: made[edge.source, edge.tensor] for edge in case.graph.into(index)}
    if not inputs:
        result = stage(batch[: batch.shape[0] // case.microbatches])
    else:
        result = stage(*inputs.values()) if len(inputs) == 1 else stage(**inputs)
    names = output_names(case.graph, index)
    made |= {(index, name): result if isinstance(result, Tensor) else result[name] for name in names}


def _emulated(case: PipelineCase) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    stages: list[nn.Module] = [
        EmulatedStage(output_names(case.graph, index), width=WIDTH, seconds=SECONDS) for index in range(case.stages)
    ]
    batch = torch.randn(TOKENS * case.microbatches, WIDTH)
    return stages, batch, torch.zeros_like(batch), F.mse_loss


def _real(case: PipelineCase) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """A GPT on token ids, or a U-Transformer on pixels; what they learn does not matter here."""
    count = SEQUENCES * case.microbatches
    if case.model == "gpt":
        ids = torch.randint(GPT.vocabulary, (count, GPT.context))
        return [gpt_stage(GPT, i, case.stages) for i in range(case.stages)], ids, ids, loss_of_tokens
    pixels = torch.randn(count, 3, U.pixels, U.pixels)
    mask = (pixels[:, :1] > 0).float()
    return [u_stage(U, i, case.stages) for i in range(case.stages)], pixels, mask, loss_of_pixels


def torch_step(case: PipelineCase, model: Model, rank: Rank) -> Callable[[], Tensor]:
    """The same step by torch.distributed.pipelining: one pipeline through the n-th devices of all hosts, for each n."""
    lines = [[host * case.devices + device for host in range(case.stages)] for device in range(case.devices)]
    groups = [dist.new_group(line) for line in lines]
    stage = PipelineStage(
        model.stages[rank.host], rank.host, case.stages, torch.device("cpu"), group=groups[rank.device]
    )
    runner = Schedule1F1B(stage, case.microbatches, loss_fn=model.loss_fn)

    def step() -> Tensor:
        losses: list[Tensor] = []
        batch = (model.batch,) if rank.host == 0 else ()
        if rank.host == case.stages - 1:
            runner.step(*batch, target=model.targets, losses=losses, return_outputs=False)
        else:
            runner.step(*batch, return_outputs=False)
        return torch.stack(losses).detach() if losses else torch.empty(0)

    return step
