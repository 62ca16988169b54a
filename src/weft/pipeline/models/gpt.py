"""A GPT in stages, tensor-parallel inside.

    ids [B, S] -> embedding, blocks -> x [B, S, W] -> blocks -> ... -> norm, head -> logits [B, S, V]

With tensor parallelism over T ranks, activations are cut along the sequence between the layers and between the
stages, x [B, S/T, W], and every linear layer communicates while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from weft.overlap import ColwiseOverlap, RowwiseOverlap
from weft.pipeline.models.parts import cut, made_with


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; `GPTConfig.named` has some. The head has weights of its own, which the names do not count.

    >>> round(GPTConfig.named("2.6b").parameters / 1e9, 1)
    2.8
    """

    vocabulary: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 4
    context: int = 64
    dropout: float = 0.0

    @classmethod
    def named(cls, size: str) -> GPTConfig:
        """tiny and small train on a laptop; 1.3b and 2.6b are the sizes of the paper's GPT."""
        sizes = {
            "tiny": cls(),
            "small": cls(width=256, heads=8, layers=8, context=128),
            "1.3b": cls(vocabulary=51200, width=2048, heads=32, layers=24, context=1024),
            "2.6b": cls(vocabulary=51200, width=2560, heads=32, layers=32, context=1024),
        }
        if size not in sizes:
            raise ValueError(f"size is {size!r}, expected one of {', '.join(sizes)}")
        return sizes[size]

    @property
    def parameters(self) -> int:
        """How many weights there are, biases and norms left out."""
        return 12 * self.layers * self.width**2 + (2 * self.vocabulary + self.context) * self.width


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input; heads are counted by what q, k and v return."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        x = x + self.dropout(self._attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return y

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class GPTStage(nn.Module):
    """Some blocks; the first stage has the embeddings too, the last one the norm and the head.

    Blocks keep their numbers in the whole model, so that the stages' parameters have different names.
    """

    def __init__(self, config: GPTConfig, blocks: range, *, is_first: bool, is_last: bool, seed: int) -> None:
        super().__init__()
        layers, width = config.layers, config.width
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.tokens = made_with(seed, layers, lambda: nn.Embedding(config.vocabulary, width))
            self.positions = made_with(seed, layers + 1, lambda: nn.Embedding(config.context, width))
        self.blocks = nn.ModuleDict({str(i): made_with(seed, i, lambda: Block(config)) for i in blocks})
        if is_last:
            self.norm = nn.LayerNorm(width)
            self.head = made_with(seed, layers + 2, lambda: nn.Linear(width, config.vocabulary, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Token ids on the first stage, else activations; logits from the last stage, else activations."""
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def gpt_stage(config: GPTConfig, stage: int, stages: int, *, seed: int = 0) -> GPTStage:
    """One stage of a GPT; its weights do not depend on the number of stages.

    >>> stage = gpt_stage(GPTConfig(layers=4), 1, 2)
    >>> list(stage.blocks)
    ['2', '3']
    """
    # The head costs about as much as the part of a block that its width is of the vocabulary.
    costs = [1.0] * config.layers
    costs[-1] += config.vocabulary / (12 * config.width)
    blocks = cut(costs, stages)[stage]
    return GPTStage(config, blocks, is_first=stage == 0, is_last=stage == stages - 1, seed=seed)


def parallelize_gpt(stage: GPTStage, mesh: DeviceMesh) -> GPTStage:
    """Spreads a stage over a mesh of one axis; activations enter and leave it cut along the sequence: `Shard(1)`."""
    norm, into, out_of = SequenceParallel(use_local_output=True), ColwiseOverlap(), RowwiseOverlap()
    plan: dict[str, Any] = {}
    if stage.is_first:
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    for number in stage.blocks:
        plan |= {f"blocks.{number}.{name}": norm for name in ("norm1", "norm2")}
        plan |= {f"blocks.{number}.{name}": into for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{number}.{name}": out_of for name in ("out", "down")}
    if stage.is_last:
        plan["norm"] = SequenceParallel(use_local_output=True)
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(stage, mesh, plan)
    return stage


def loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of [B, S, V] with [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
