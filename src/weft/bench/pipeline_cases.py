"""The rows of `weft bench pipeline`: which model, on how many stages, over links of which speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.pipeline import StageGraph, chain
from weft.pipeline.models import GPTConfig, UConfig, u_graph

GPT = GPTConfig(width=256, heads=8, layers=4, context=128)
U = UConfig(width=32, levels=2, pixels=32)
SHARES = (0.25, 0.5, 1.0)
MODELS = ("gpt", "u-transformer")


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
