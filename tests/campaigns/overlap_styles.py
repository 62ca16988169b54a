"""Steps of the overlap campaign with layers: `ColwiseOverlap` and `RowwiseOverlap` on parameters that are DTensors."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from overlap_programs import close
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from weft.overlap import ColwiseOverlap, RowwiseOverlap

_OPTIMIZERS = ((torch.optim.SGD, {}), (torch.optim.SGD, {"foreach": True}), (torch.optim.AdamW, {"foreach": True}),
               (torch.optim.AdamW, {"foreach": False}), (torch.optim.AdamW, {"fused": True}))  # fmt: skip
LAYERS = ("columns of a sequence", "columns", "rows to a sequence", "rows")


class LayerCase:
    """A sharded layer, stepped by an optimiser between its calls; `failures` says what was wrong on this rank."""

    def __init__(self, dice: random.Random, group: dist.ProcessGroup) -> None:
        self.dice, self.rank, self.world = dice, group.rank(), group.size()
        self.failures: list[str] = []
        self.kind = dice.choice(LAYERS)
        ins, outs = self.world * dice.randint(1, 12), self.world * dice.randint(1, 20)
        self.rows = self.world * dice.randint(1, 20)
        seed = dice.getrandbits(40)
        torch.manual_seed(seed)
        self.layer = nn.Sequential(nn.Linear(ins, outs, bias=dice.random() < 0.5))
        sequence = "sequence" in self.kind
        where = Shard(0) if sequence else Replicate()
        colwise = self.kind.startswith("columns")
        style = ColwiseOverlap(input_layouts=where) if colwise else RowwiseOverlap(output_layouts=where)
        parallelize_module(self.layer, DeviceMesh("cpu", list(range(self.world))), {"0": style})
        kind, options = dice.choice(_OPTIMIZERS)
        self.optimizer = kind(self.layer.parameters(), lr=0.1, **options)
        self.story = f"{self.kind}, {ins} to {outs}, {self.rows} rows, {kind.__name__} {options}"

    def run(self) -> None:
        for step in range(self.dice.randint(2, 3)):
            x = torch.randn(self.rows, self.layer[0].weight.shape[1],
                            generator=torch.Generator().manual_seed(self.dice.getrandbits(40)))  # fmt: skip
            with torch.set_grad_enabled(self.dice.random() < 0.7):
                y = self.layer(self._part_of_input(x))
            want = self._part_of_output(x.double() @ self._full("weight").double().t() + self._bias())
            if not close(y.detach(), want):
                self.failures.append(f"step {step} of {self.story}: off by {float((y - want).abs().max())}")
            if y.requires_grad:
                y.square().sum().backward()
            else:
                for p in self.layer.parameters():
                    p.grad = torch.ones_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _full(self, name: str) -> Tensor:
        return getattr(self.layer[0], name).detach().full_tensor()

    def _bias(self) -> Tensor:
        return torch.zeros(()) if self.layer[0].bias is None else self._full("bias").double()

    def _part_of_input(self, x: Tensor) -> Tensor:
        if self.kind == "columns":
            return x
        dim = 0 if self.kind == "columns of a sequence" else 1
        return x.chunk(self.world, dim=dim)[self.rank].contiguous()

    def _part_of_output(self, y: Tensor) -> Tensor:
        if self.kind == "rows":
            return y
        return y.chunk(self.world, dim=0 if self.kind == "rows to a sequence" else 1)[self.rank]
