"""What a case of the pipeline campaign computes: its stages, and the batches that they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pipeline_case import Case, Part
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from weft.layout import Layout, Mesh

WIDTH = 4


class Stage(nn.Module):
    """Mixes all that comes in, row by row; gives each of `names` something else."""

    def __init__(
        self, part: Part, inputs: int, names: Sequence[str], gradient: dict[str, bool], terms: int, *, exact: bool
    ) -> None:
        """`terms`: outputs are one of so many terms of a sum; `exact`: integers cannot differ by rounding."""
        super().__init__()
        self.exact = exact
        dtype = getattr(torch, part.dtype)
        self.part, self.names, self.gradient, self.terms, self.dtype = part, list(names), gradient, terms, dtype
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(inputs))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype) if part.norm else nn.Identity()
        self.drop = nn.Dropout(0.3 if part.dropout else 0.0)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype) + 0.5)
        if part.counts:
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=dtype))
        if part.frozen:
            self.requires_grad_(False)
        self.kept: list[tuple[Any, int, Tensor]] = []

    def forward(self, *args: Tensor, **tensors: Tensor) -> Any:
        given = (*args, *(tensors[name] for name in sorted(tensors)))
        if self.part.keeps:
            kept = [x.detach() for x in given if x.is_contiguous()]
            self.kept += [(x.untyped_storage(), x.storage_offset(), x.reshape(-1).clone()) for x in kept]
        parts = [mix(x.to(self.dtype)) for mix, x in zip(self.mix, given, strict=True)]
        y = self.drop(torch.tanh(self.norm(sum(parts[1:], parts[0])) * self.scale))
        if self.part.counts and self.training:
            self.seen.add_(y.detach().sum((0, 1)))
        if not self.names:
            return y
        found = {name: y if name == "x" else y * (i + 2) / self.scale for i, name in enumerate(self.names)}
        for name, x in found.items():
            if not self.gradient[name]:
                found[name] = (x.detach() * 8).to(torch.int64) if self.exact else x.detach()
            if self.terms > 1:
                found[name] = found[name] / self.terms
            if self.part.views:
                found[name] = found[name].mT.contiguous().mT
        return found

    def check_kept(self) -> None:
        """What was kept is still what it was."""
        for storage, offset, was in self.kept:
            now = torch.empty(0, dtype=was.dtype).set_(storage, offset, was.shape)
            assert torch.equal(now, was), "memory that a stage kept was written to"


def make_stages(case: Case, *, terms: bool) -> list[nn.Module]:
    """All stages; with `terms` those of a mesh give terms of a sum where their layout says so."""
    torch.manual_seed(case.number)
    made: list[nn.Module] = []
    for stage, part in enumerate(case.parts):
        names = sorted({edge.tensor for edge in case.graph.out_of(stage)})
        gradient = {edge.tensor: edge.gradient for edge in case.graph.out_of(stage)}
        count = len(case.meshes[stage]) if terms and part.layout == "p" else 1
        made.append(Stage(part, len(case.graph.into(stage)) or 1, names, gradient, count, exact=case.is_exact))
    return made


def placements(case: Case, stage: int, *, leaving: bool) -> list[Placement]:
    kinds = {"r": Replicate(), "s0": Shard(0), "s1": Shard(1), "p": Partial() if leaving else Replicate()}
    return [kinds[case.parts[stage].layout]]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A sum, so that those of shards add up."""
    return ((output - target.to(output.dtype)) ** 2).sum() / 8


def batch_of(case: Case, step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1000 * case.number + step)
    parts = [[torch.randn(*rows, WIDTH, generator=generator) for rows in case.rows] for _ in range(2)]
    return parts[0], parts[1]


def shard_of(case: Case, stage: int, whole: Sequence[Tensor]) -> list[Tensor]:
    """What this rank gives to a stage: its part, where the stage's tensors are cut."""
    if not case.parts[stage].layout.startswith("s"):
        return list(whole)
    mesh = Mesh.of(list(case.meshes[stage]), hosts=[0] * len(case.meshes[stage]))
    layout = Layout(mesh, tuple(placements(case, stage, leaving=False)))
    (dim,) = [int(case.parts[stage].layout[1])]
    place = case.meshes[stage].index(dist.get_rank())
    found = []
    for x in whole:
        sizes = [layout.local_shape(tuple(x.shape), rank)[dim] for rank in case.meshes[stage]]
        found.append(x.narrow(dim, sum(sizes[:place]), sizes[place]))
    return found


def given(case: Case, batch: list[Tensor], targets: list[Tensor]) -> tuple[Any, Any]:
    """What this rank gives to `step`: a tensor where micro-batches have one shape, else a list."""
    me, last = dist.get_rank(), case.made.stages - 1
    x: Any = shard_of(case, 0, batch) if me in case.meshes[0] else batch
    y: Any = shard_of(case, last, targets) if me in case.meshes[last] else targets
    same = case.as_tensor and all(len({t.shape for t in each}) == 1 and each[0].shape[0] > 0 for each in (x, y))
    return (torch.cat(x), torch.cat(y)) if same else (x, y)


def check(is_so: bool, text: str) -> None:
    """Raises the text, unless it is so."""
    if not is_so:
        raise AssertionError(text)
