"""The models of `weft bench end_to_end` as numbers: parameters, the work of a call, the bytes that must travel.

P ranks on h hosts share a model of L layers, width H; T tokens, sequences of n_s tokens; 4 bytes a number.

    flops of a forward     2 T (parameters of the matmuls) + sum_s 2 n_s^2 H    causal attention, both of its matmuls
    flops of a step        3 forwards: the backward has two matmuls for each of the forward
    bytes out of a card    (1 - 1/h) 4 T H for each gather and each scatter; a reduce-scatter sends sums of its host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

FLOAT = 4  # bytes
LAYER_EXCHANGES = 4  # of a layer's forward: a gather and a scatter in the attention, and in the MLP
END_EXCHANGES = 2  # of a whole forward: a scatter after the embedding, a gather before the head


@dataclass(frozen=True)
class ModelSize:
    """A transformer; `family` says how its parts look: "llama" (gated MLP, rotary, fewer KV heads) or "gpt2".

    >>> LLAMA.head_dim, round(LLAMA.parameters / 1e6), round(GPT2.parameters / 1e6)
    (64, 156, 124)
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    positions: int = 1024

    @property
    def name(self) -> str:
        """The family, and what is not as it should be."""
        whole = FULL[self.family]
        if self == whole:
            return self.family
        if replace(self, layers=whole.layers, vocabulary=whole.vocabulary) == whole:
            return f"{self.family} ({self.layers} of {whole.layers} layers, vocabulary {self.vocabulary:,})"
        return f"{self.family} ({self.layers} layers, width {self.width})"

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def layer_parameters(self) -> int:
        """Of the matmuls of one layer."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_dim
        return attention + (3 if self.family == "llama" else 2) * self.width * self.mlp

    @property
    def head_parameters(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All matrices; GPT-2's head is its embedding, and it has a table of positions."""
        ends = (
            2 * self.head_parameters if self.family == "llama" else self.head_parameters + self.positions * self.width
        )
        return self.layers * self.layer_parameters + ends

    def forward_flops(self, lengths: Sequence[int], *, head_rows: int) -> float:
        """Of sequences of these lengths, with logits for `head_rows` of their tokens."""
        matmuls = 2.0 * sum(lengths) * self.layers * self.layer_parameters + 2.0 * head_rows * self.head_parameters
        return matmuls + self.layers * sum(2.0 * n * n * self.width for n in lengths)

    def prefill_flops(self, lengths: Sequence[int]) -> float:
        """Of prompts up to the first new token of each: the last layer must give keys and values of all tokens, and the
        rest for the last token of each prompt only.
        """
        prompts, tokens = len(lengths), sum(lengths)
        others = replace(self, layers=self.layers - 1).forward_flops(lengths, head_rows=prompts)
        keys = 2 * self.width * self.kv_heads * self.head_dim
        last = 2.0 * tokens * keys + 2.0 * prompts * (self.layer_parameters - keys) + 4.0 * tokens * self.width
        return others + last

    def train_flops(self, lengths: Sequence[int]) -> float:
        """Of a step."""
        return 3 * self.forward_flops(lengths, head_rows=sum(lengths))

    def exchange_bytes(self, tokens: int, hosts: int) -> float:
        """Out of each card, for one gather or scatter of the states of `tokens`.

        >>> LLAMA.exchange_bytes(2048, hosts=2) / 2**20
        4.0
        """
        return (1 - 1 / hosts) * FLOAT * tokens * self.width

    def train_bytes(self, tokens: int, hosts: int) -> float:
        """Out of each card in a step; what a forward gathers its backward scatters, and the other way round."""
        return 2 * self.forward_bytes(tokens, hosts)

    def forward_bytes(self, tokens: int, hosts: int) -> float:
        """Out of each card in a forward; an all-reduce is a scatter and a gather."""
        return (LAYER_EXCHANGES * self.layers + END_EXCHANGES) * self.exchange_bytes(tokens, hosts)

    @property
    def decode_weight_bytes(self) -> float:
        """Read for every step of decoding, by all ranks together; of the embedding only a few rows."""
        return FLOAT * float(self.layers * self.layer_parameters + self.head_parameters)


LLAMA = ModelSize("llama", layers=8, width=1024, heads=16, kv_heads=4, mlp=2816, vocabulary=32_000, positions=2048)
GPT2 = ModelSize("gpt2", layers=12, width=768, heads=12, kv_heads=12, mlp=3072, vocabulary=50_257)
FULL = {"llama": LLAMA, "gpt2": GPT2}
# A quarter of the layers and of the vocabulary: layers and head keep their shares of the time.
QUICK_LLAMA = replace(LLAMA, layers=2, vocabulary=8_000)
DEMO_LLAMA = ModelSize("llama", layers=2, width=512, heads=8, kv_heads=4, mlp=1408, vocabulary=4_000)
TINY_LLAMA = ModelSize("llama", layers=2, width=64, heads=4, kv_heads=4, mlp=176, vocabulary=512)
TINY_GPT2 = ModelSize("gpt2", layers=2, width=64, heads=4, kv_heads=4, mlp=256, vocabulary=512)
