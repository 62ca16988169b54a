"""What `weft bench pipeline` runs: its rows, its models with one stage on each host, and torch's own pipeline.

An emulated stage takes a given time and hardly any CPU, for pipelines with more ranks than this machine has cores. It
does a small real matmul and sleeps for the rest; tensors have their real sizes and really travel. Both gradients of the
backward pass sleep on their own, so that a schedule which splits them finds them split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from weft.lab import Rank
from weft.pipeline import StageGraph, chain
from weft.pipeline.models import GPTConfig, UConfig, gpt_stage, loss_of_pixels, loss_of_tokens, u_graph, u_stage
from weft.pipeline.run.stage import output_names

GPT = GPTConfig(width=256, heads=8, layers=4, context=128)
U = UConfig(width=32, levels=2, pixels=32)
SHARES = (0.25, 0.5, 1.0)
MODELS = ("gpt", "u-transformer")
# Emulated: what a forward of a stage lasts, and what goes over an edge.
SECONDS = 0.03
TOKENS, WIDTH = 128, 1024
# Real: sequences, or pictures, of a micro-batch.
SEQUENCES = 4
_ROWS = 8  # of the small matmul
Tensors = dict[tuple[int, str], Tensor]


@dataclass(frozen=True)
class PipelineCase:
    """A model in `stages` stages, one host each; a transfer lasts `share` times a forward of one stage.

    devices:  ranks of each host; edge tensors are replicated over them, as between tensor-parallel stages
    emulated: a stage sleeps for its time beside a small real matmul, since the machine has fewer cores than ranks

    >>> PipelineCase("gpt", stages=4, devices=2, share=0.5, microbatches=8, emulated=True).name
    'gpt, 4 stages x 2, share 0.5, emulated'
    """

    model: str
    stages: int
    devices: int
    share: float
    microbatches: int
    emulated: bool

    @property
    def name(self) -> str:
        """For the table."""
        how = "emulated" if self.emulated else "real"
        return f"{self.model}, {self.stages} stages x {self.devices}, share {self.share:g}, {how}"

    @property
    def has_skips(self) -> bool:
        """Whether tensors pass stages by; torch's own pipelines have no such thing."""
        return len(self.graph.edges) >= self.stages

    @property
    def graph(self) -> StageGraph:
        """A chain, or the U's with its long skips, which emulated stages have as well."""
        return u_graph(U, self.stages) if self.model == "u-transformer" else chain(self.stages)


def cases() -> Iterator[PipelineCase]:
    """Every model, number of stages and share emulated on two devices a stage, and real on one."""
    for model in MODELS:
        for stages in (2, 4):
            for share in SHARES:
                yield PipelineCase(model, stages, 2, share, 16, emulated=True)
                yield PipelineCase(model, stages, 1, share, 16, emulated=False)


def quick_cases() -> list[PipelineCase]:
    """The fewest rows that give every figure."""
    emulated = [PipelineCase(model, 4, 2, 0.5, 8, emulated=True) for model in MODELS]
    return [*emulated, PipelineCase("gpt", 2, 1, 0.5, 8, emulated=False)]


@dataclass(frozen=True)
class StagedModel:
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


def build(case: PipelineCase) -> StagedModel:
    """The model of a case, from a fixed seed."""
    torch.manual_seed(0)
    stages, batch, targets, loss_fn = _emulated(case) if case.emulated else _real(case)
    made: Tensors = {}
    with torch.no_grad():
        for index, stage in enumerate(stages):
            forward_one(case, stage, index, made, batch)
    return StagedModel(stages, batch, targets, loss_fn, made)


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


def torch_step(case: PipelineCase, model: StagedModel, rank: Rank) -> Callable[[], Tensor]:
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


class EmulatedStage(nn.Module):
    """[tokens, width] tensors -> one such tensor, or a dict with one for each name where `outputs` are several.

    A forward lasts `seconds`, the gradient of the input and that of the weights `seconds` each.

    >>> stage = EmulatedStage(("x",), width=4, seconds=0.0)
    >>> stage(torch.ones(16, 4)).shape
    torch.Size([16, 4])
    """

    def __init__(self, outputs: tuple[str, ...], *, width: int, seconds: float) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.outputs, self.seconds = outputs, seconds

    def forward(self, *tensors: Tensor, **named: Tensor) -> Any:
        first, *others = (*tensors, *named.values())
        weight = _spend(self.mix.weight, self.seconds)
        mixed = F.linear(first[:_ROWS], weight, self.mix.bias)
        y = torch.cat([mixed, first[_ROWS:]])
        for other in others:
            y = y + other
        time.sleep(self.seconds)
        y = _spend(y, self.seconds)
        return dict.fromkeys(self.outputs, y) if len(self.outputs) > 1 else y


class _Spend(torch.autograd.Function):
    """Its gradient takes some time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def _spend(x: Tensor, seconds: float) -> Tensor:
    y: Tensor = _Spend.apply(x, seconds)  # type: ignore[no-untyped-call]
    return y
