"""A U-Transformer in stages: a U-Net with attention, whose long skips cross stages.

    pixels [B, 3, H, W] -> down 0 -> down 1 -> ... -> middle -> ... -> up 1 -> up 0 -> [B, 1, H, W]
                             \\________\\_________ skips ________/________/

The layers in this order are cut into stages. The skip of level l goes from the stage of `down l` to the stage of
`up l`, if that is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.pipeline.graph import Edge, StageGraph
from weft.pipeline.models.parts import cut, made_with


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
        if size not in sizes:
            raise ValueError(f"size is {size!r}, expected one of {', '.join(sizes)}")
        return sizes[size]

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


class Attention(nn.Module):
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
        self.attention = Attention(width, config.heads) if level >= config.attention else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.residual(x))
        return y


class Layer(nn.Module):
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
        self.layers = nn.ModuleDict({str(i): made_with(seed, i, lambda i=i: Layer(config, i)) for i in numbers})  # type: ignore[misc]
        self.leaving = leaving

    def forward(self, x: Tensor, **skips: Tensor) -> Tensor | Mapping[str, Tensor]:
        here: dict[str, Tensor] = dict(skips)
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            x, skip = layer(x, here.get(f"skip{layer.level}") if layer.is_up else None)
            if skip is not None:
                here[f"skip{layer.level}"] = skip
        found = {"x": x, **here}
        return {name: found[name] for name in self.leaving} if self.leaving else x


def _cut(config: UConfig, stages: int) -> list[range]:
    """Layers by stage. Each level costs about the same, as the pixels shrink while the channels grow; ups have more."""
    return cut([1.0] * config.levels + [1.0] + [1.6] * config.levels, stages)


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
