"""Two models in stages, to train, measure and test with: a GPT and a U-Transformer.

Their layers are cut into stages that cost about the same; the first weights do not depend on the cut.

The GPT may be tensor-parallel inside a stage:

    ids [B, S] -> embedding, blocks -> x [B, S, W] -> blocks -> ... -> norm, head -> logits [B, S, V]

With tensor parallelism over T ranks, activations are cut along the sequence between the layers and between the
stages, x [B, S/T, W], and every linear layer communicates while it computes.

The U-Transformer is a U-Net with attention, whose long skips cross stages:

    pixels [B, 3, H, W] -> down 0 -> down 1 -> ... -> middle -> ... -> up 1 -> up 0 -> [B, 1, H, W]
                             \\________\\_________ skips ________/________/

The skip of level l goes from the stage of `down l` to the stage of
`up l`, if that is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from weft.overlap import ColwiseOverlap, RowwiseOverlap
from weft.pipeline.cut import cut_layers
from weft.pipeline.run.microbatch import seed_of, seeded
from weft.pipeline.schedules.graph import Edge, StageGraph

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")


def made_with(seed: int, number: int, make: Callable[[], M]) -> M:
    """A layer whose first weights depend on its number in the model alone, not on the layers made before it."""
    with seeded(seed_of(seed, 0, number, 0)):
        return make()


def _of_size(sizes: Mapping[str, C], size: str) -> C:
    if size not in sizes:
        raise ValueError(f"size is {size!r}, expected one of {', '.join(sizes)}")
    return sizes[size]


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
        return _of_size(sizes, size)

    @property
    def parameters(self) -> int:
        """How many weights there are, biases and norms left out."""
        return 12 * self.layers * self.width**2 + (2 * self.vocabulary + self.context) * self.width


class GPTBlock(nn.Module):
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
        self.blocks = nn.ModuleDict({str(i): made_with(seed, i, lambda: GPTBlock(config)) for i in blocks})
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
    blocks = cut_layers(costs, stages)[stage]
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


@dataclass(frozen=True)
class UConfig:
    """The sizes of a U-Transformer; `UConfig.named` has some.

    width:     channels of level 0; each level has twice as many, on half the height and width
    levels:    of downs and of ups
    attention: from which level on there is attention
    """

    width: int = 16
    levels: int = 2
    attention: int = 1
    heads: int = 4
    pixels: int = 32

    @classmethod
    def named(cls, size: str) -> UConfig:
        """tiny and small train on a laptop; 2.1b has as many parameters as the paper's."""
        sizes = {
            "tiny": cls(),
            "small": cls(width=32, levels=3, pixels=64),
            "2.1b": cls(width=928, levels=3, attention=1, heads=16, pixels=128),
        }
        return _of_size(sizes, size)

    @property
    def layers(self) -> int:
        """Downs, the middle and ups."""
        return 2 * self.levels + 1


class Residual(nn.Module):
    """Two convolutions, added to the input."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, into), nn.GroupNorm(8, out)
        self.conv1, self.conv2 = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.match = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        y: Tensor = self.match(x) + self.conv2(F.silu(self.norm2(hidden)))
        return y


class PixelAttention(nn.Module):
    """Self-attention over all pixels, added to the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y: Tensor = x + self.out(mixed).transpose(1, 2).reshape(x.shape)
        return y


class Level(nn.Module):
    """A residual block, with attention where the level has it."""

    def __init__(self, config: UConfig, level: int, into: int) -> None:
        super().__init__()
        width = config.width << level
        self.residual = Residual(into, width)
        self.attention = PixelAttention(width, config.heads) if level >= config.attention else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.residual(x))
        return y


class ULayer(nn.Module):
    """One of the layers of the U, by its number: a down, the middle, or an up."""

    def __init__(self, config: UConfig, number: int) -> None:
        super().__init__()
        levels = config.levels
        self.is_down, self.is_up = number < levels, number > levels
        self.level = level = min(number, 2 * levels - number)
        width = config.width << level
        if self.is_down:
            self.first = nn.Conv2d(3, width, 3, padding=1) if number == 0 else nn.Identity()
            self.body = Level(config, level, width if number == 0 else width // 2)
            self.resize: nn.Module = nn.Conv2d(width, width, 2, stride=2)
        elif self.is_up:
            self.resize = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
            self.body = Level(config, level, 2 * width)
            self.last = nn.Conv2d(width, 1, 1) if level == 0 else nn.Identity()
        else:
            self.body = Level(config, level, width // 2)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x, and for a down the skip that it gives; an up is given one."""
        if self.is_down:
            skip = self.body(self.first(x))
            return self.resize(skip), skip
        if self.is_up:
            assert skip is not None
            return self.last(self.body(torch.cat([self.resize(x), skip], dim=1))), None
        return self.body(x), None


class UStage(nn.Module):
    """Consecutive layers of the U. Called with x, and with the skips that come from other stages by name."""

    def __init__(self, config: UConfig, numbers: range, leaving: list[str], *, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): made_with(seed, i, lambda i=i: ULayer(config, i)) for i in numbers})  # type: ignore[misc]
        self.leaving = leaving

    def forward(self, x: Tensor, **skips: Tensor) -> Tensor | Mapping[str, Tensor]:
        here: dict[str, Tensor] = dict(skips)
        for layer in self.layers.values():
            assert isinstance(layer, ULayer)
            x, skip = layer(x, here.get(f"skip{layer.level}") if layer.is_up else None)
            if skip is not None:
                here[f"skip{layer.level}"] = skip
        found = {"x": x, **here}
        return {name: found[name] for name in self.leaving} if self.leaving else x


def _cut(config: UConfig, stages: int) -> list[range]:
    """Layers by stage. Each level costs about the same, as the pixels shrink while the channels grow; ups have more."""
    return cut_layers([1.0] * config.levels + [1.0] + [1.6] * config.levels, stages)


def u_graph(config: UConfig, stages: int) -> StageGraph:
    """The chain, and a skip for every level whose down and up are in different stages.

    >>> print(u_graph(UConfig(levels=2), 4))
    4 stages: 0->1 x, 0->3 skip0, 1->2 skip1, 1->2 x, 2->3 x
    """
    place = {number: stage for stage, numbers in enumerate(_cut(config, stages)) for number in numbers}
    edges = [Edge(stage, stage + 1) for stage in range(stages - 1)]
    for level in range(config.levels):
        source, target = place[level], place[config.layers - 1 - level]
        if source != target:
            edges.append(Edge(source, target, f"skip{level}"))
    return StageGraph(stages, tuple(edges))


def u_stage(config: UConfig, stage: int, stages: int, *, seed: int = 0) -> UStage:
    """One stage of a U-Transformer; its weights do not depend on the number of stages."""
    leaving = sorted({edge.tensor for edge in u_graph(config, stages).out_of(stage)})
    return UStage(config, _cut(config, stages)[stage], leaving, seed=seed)


def loss_of_pixels(logits: Tensor, mask: Tensor) -> Tensor:
    """Binary cross-entropy of [B, 1, H, W] with a mask of the same shape."""
    return F.binary_cross_entropy_with_logits(logits, mask)
