"""Transformers as sizes: what a layer multiplies, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
