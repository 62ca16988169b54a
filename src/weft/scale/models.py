"""What is computed, as sizes: transformers (what a layer multiplies, how many there are) and how long texts are.

Lengths are quantiles, as a share of the longest text, from which padding is reckoned. A batch that is padded computes
every text as long as its longest; one that is packed computes the tokens that are there. What counts is the mean, the
mean of the squares (for attention), and the same of a batch's longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True)
class Model:
    """A stack of equal layers.

    hidden, heads, kv_heads, head_width: of attention, where `kv_heads` are shared by several heads or not
    ffn:     the width between the MLP's matmuls;  gated: whether two matmuls of that width are multiplied
    causal:  whether a token sees only those before it
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = False
    causal: bool = True

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def up(self) -> int:
        """Columns of the MLP's first matmul."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's four matmuls."""
        return self.hidden * (self.qkv + self.hidden + self.up + self.ffn)

    @property
    def parameters(self) -> int:
        """All weights; embedding and logits share theirs.

        >>> round(find_model("gpt3-175b").parameters / 1e9), round(find_model("llama2-70b").parameters / 1e9)
        (175, 69)
        """
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def attention_flops(self, pairs: float) -> float:
        """Forward flops of one layer's attention over so many pairs of a query and a key, in all heads."""
        return 4.0 * pairs * self.hidden

    def forward_flops(self, tokens: float, pairs: float, *, logits: float) -> float:
        """Forward flops of the model on so many tokens, of which `logits` get a prediction."""
        matmuls = 2.0 * (tokens * self.layers * self.layer_parameters + logits * self.vocabulary * self.hidden)
        return matmuls + self.layers * self.attention_flops(pairs)


_ALL = (
    Model("gpt3-175b", 96, 12288, 96, 96, 49152, 50257),
    Model("gpt3-13b", 40, 5120, 40, 40, 20480, 50257),
    Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000, gated=True),
    Model("llama2-70b", 80, 8192, 64, 8, 28672, 32000, gated=True),
    Model("llama3-405b", 126, 16384, 128, 8, 53248, 128256, gated=True),
    Model("bert-large", 24, 1024, 16, 16, 4096, 30522, causal=False),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})


def find_model(name: str) -> Model:
    """The model of that name."""
    if name.lower() not in MODELS:
        raise ValueError(f"got the model {name!r}; expected one of: {', '.join(MODELS)}")
    return MODELS[name.lower()]


_SAMPLES = 20_000  # points of the quantile function that are averaged


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the length, each (share of the texts, share of the longest), with straight lines between them."""

    name: str
    quantiles: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares, lengths = zip(*self.quantiles, strict=True)
        if shares[0] != 0 or shares[-1] != 1 or list(lengths) != sorted(lengths) or not 0 < lengths[-1] <= 1:
            raise ValueError(
                f"quantiles are {self.quantiles}, expected growing pairs from share 0 to 1, lengths up to 1"
            )

    def moment(self, power: int, *, batch: int = 1) -> float:
        """The mean of the length, or of its square, of the longest of `batch` texts.

        >>> uniform = LENGTHS["uniform"]
        >>> round(uniform.moment(1), 3), round(uniform.moment(1, batch=32), 3)
        (0.6, 0.976)
        """
        return _moment(self.quantiles, power, batch)


@lru_cache(maxsize=256)
def _moment(quantiles: tuple[tuple[float, float], ...], power: int, batch: int) -> float:
    middles = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    shares, lengths = zip(*quantiles, strict=True)
    # The longest of b is below the quantile u ** (1/b) as often as one is below the quantile u.
    return float(np.mean(np.interp(middles ** (1.0 / batch), shares, lengths) ** power))


def _of(name: str, longest: float, shortest: float, p10: float, p50: float, p90: float, p99: float) -> Lengths:
    points = ((0.0, shortest), (0.1, p10), (0.5, p50), (0.9, p90), (0.99, p99), (1.0, longest))
    return Lengths(name, tuple((share, length / longest) for share, length in points))


_ALL_LENGTHS = (
    Lengths("full", ((0.0, 1.0), (1.0, 1.0))),
    Lengths("uniform", ((0.0, 0.2), (1.0, 1.0))),  # ByteTransformer's
    # Percentiles 10, 50, 90, 99 and the longest of public data; the shortest is not published, and taken as 1. Straight
    # lines between them are too high where tails are thin: the mean comes out 13 % too long for azure-code and 22 % for
    # azure-chat, so that packing saves a little more than is predicted.
    _of("squad", 384, 1, 107, 159, 260, 384),
    _of("wikipedia", 512, 1, 48, 204, 512, 512),
    _of("azure-code", 7437, 1, 147, 1469, 5187, 7436),
    _of("azure-chat", 14050, 1, 207, 1020, 2734, 4142),
)
LENGTHS: Mapping[str, Lengths] = MappingProxyType({each.name: each for each in _ALL_LENGTHS})


def find_lengths(name: str) -> Lengths:
    """The distribution of that name."""
    if name.lower() not in LENGTHS:
        raise ValueError(f"got the lengths {name!r}; expected one of: {', '.join(LENGTHS)}")
    return LENGTHS[name.lower()]
