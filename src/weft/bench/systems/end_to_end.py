"""What `weft bench end_to_end` measures: models as numbers, the rows, and the batches and prompts of all systems.

P ranks on h hosts share a model of L layers, width H; T tokens, sequences of n_s tokens; 4 bytes a number.

    flops of a forward     2 T (parameters of the matmuls) + sum_s 2 n_s^2 H    causal attention, both of its matmuls
    flops of a step        3 forwards: the backward has two matmuls for each of the forward
    bytes out of a card    (1 - 1/h) 4 T H for each gather and each scatter; a reduce-scatter sends sums of its host
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch
from weft.packed.inputs import IGNORED_LABEL

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


# ---- rows ------------------------------------------------------------------------------------------------------------

GROUPS = ((1, 2), (2, 1), (2, 2))  # hosts, devices of each
SHARES = (0.15, 0.3, 0.5)
HEADLINE_SHARE = 0.3
SIDE_ROUNDS = 3  # with more, all rows would take most of a day


class WorkKind(Enum):
    """What is timed."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Load:
    """How much each kind of row has to do.

    >>> load = Load()
    >>> sum(load.train_lengths), sum(load.prompt_lengths), sum(load.decode_lengths)
    (2048, 4352, 256)
    """

    train_tokens: int = 2048
    longest_text: int = 512
    prompts: int = 16
    shortest_prompt: int = 32
    longest_prompt: int = 512
    decode_prompt: int = 16
    new_tokens: int = 64

    @property
    def train_lengths(self) -> tuple[int, ...]:
        return mixed_lengths(self.train_tokens, longest=self.longest_text)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return spread_lengths(self.prompts, shortest=self.shortest_prompt, longest=self.longest_prompt)

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Of the prompts that decoding goes on from."""
        return (self.decode_prompt,) * self.prompts


@dataclass(frozen=True)
class Place:
    """A model on a group of ranks; `share` is the part of torch's training step that the links take, None for one host.

    >>> Place(LLAMA, 2, 1, 0.3).name
    'llama, 2x1, 30 %'
    """

    size: ModelSize
    hosts: int
    devices: int
    share: float | None

    @property
    def name(self) -> str:
        link = "" if self.share is None else f", {self.share:.0%}".replace("%", " %")
        return f"{self.size.name}, {self.hosts}x{self.devices}{link}"

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices

    @property
    def is_headline(self) -> bool:
        """Whether the summary counts it."""
        return self.size.family == "llama" and self.share in (None, HEADLINE_SHARE)


@dataclass(frozen=True)
class Scale:
    """All rows of one run: the places, what is timed at each, and the load.

    rounds:    of the rows that the summary counts; the others have at most SIDE_ROUNDS
    promises:  whether these rows also have weft with a promise switched off
    vllm:      whether vLLM takes part, where it is installed
    """

    places: Sequence[tuple[Place, tuple[WorkKind, ...]]]
    load: Load
    rounds: int
    promises: bool = True
    vllm: bool = True

    def rounds_of(self, place: Place) -> int:
        return self.rounds if place.is_headline else min(self.rounds, SIDE_ROUNDS)


EVERY = tuple(WorkKind)


def full() -> Scale:
    """Every group and share. Hugging Face has no tensor-parallel plan for GPT-2, and generates with Llama only."""
    return Scale([*_places(LLAMA, EVERY), *_places(GPT2, (WorkKind.TRAIN,))], Load(), rounds=7)


def quick() -> Scale:
    """The fewest rows that fill the summary."""
    places = [
        (Place(QUICK_LLAMA, 2, 1, HEADLINE_SHARE), (WorkKind.TRAIN,)),
        (Place(QUICK_LLAMA, 1, 2, None), (WorkKind.PREFILL, WorkKind.DECODE)),
    ]
    return Scale(places, Load(train_tokens=1024), rounds=3, promises=False)


def tiny() -> Scale:
    """A test: every path, and no figure worth reading."""
    load = Load(
        train_tokens=96, longest_text=40, prompts=4, shortest_prompt=4, longest_prompt=24, decode_prompt=5, new_tokens=4
    )
    places = [
        (Place(TINY_LLAMA, 2, 1, HEADLINE_SHARE), EVERY),
        (Place(TINY_LLAMA, 1, 2, None), (WorkKind.PREFILL, WorkKind.DECODE)),
        (Place(TINY_GPT2, 2, 1, HEADLINE_SHARE), (WorkKind.TRAIN,)),
    ]
    return Scale(places, load, rounds=1, vllm=False)


def _places(size: ModelSize, kinds: tuple[WorkKind, ...]) -> Iterator[tuple[Place, tuple[WorkKind, ...]]]:
    for hosts, devices in GROUPS:
        for share in SHARES if hosts > 1 else (None,):
            yield Place(size, hosts, devices, share), kinds


# ---- inputs ----------------------------------------------------------------------------------------------------------

PAD = 0


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The same sequences in both forms, with the label of each token: the next token, or IGNORED_LABEL.

    ids, labels:  int64 [B, S], padded on the right, where labels are IGNORED_LABEL
    packed:       a PackedBatch of T ids; `packed_labels` int64 [T]
    """

    lengths: tuple[int, ...]
    ids: Tensor
    labels: Tensor
    packed: PackedBatch
    packed_labels: Tensor

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def mixed_lengths(total: int, *, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths uniform on [longest / 5, longest] that add up to `total`; the last is as long as there is room.

    >>> mixed_lengths(2048, longest=512)
    (299, 490, 317, 122, 234, 363, 223)
    """
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, rng.randint(longest // 5, longest)))
    return tuple(lengths)


def spread_lengths(count: int, *, shortest: int, longest: int) -> tuple[int, ...]:
    """Evenly spread lengths, both ends among them, in mixed order.

    >>> spread_lengths(4, shortest=32, longest=512), sum(spread_lengths(16, shortest=32, longest=512))
    ((512, 192, 32, 352), 4352)
    """
    steps = [shortest + round(i * (longest - shortest) / max(count - 1, 1)) for i in range(count)]
    return tuple(random.Random(0).sample(steps, count))


def token_lists(lengths: Sequence[int], vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Random ids, never PAD."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(PAD + 1, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def train_batch(lengths: Sequence[int], vocabulary: int, *, multiple: int = 4) -> TrainBatch:
    """Random ids. The padded length is a multiple of `multiple`, so that ranks can share it in equal parts.

    >>> batch = train_batch((3, 2), 9)
    >>> batch.ids.shape, (batch.labels != IGNORED_LABEL).sum(1).tolist(), batch.packed.tokens
    (torch.Size([2, 4]), [2, 1], 5)
    """
    texts = [torch.tensor(ids) for ids in token_lists(lengths, vocabulary)]
    width = -(-max(lengths) // multiple) * multiple
    ids = torch.full((len(texts), width), PAD)
    labels = torch.full((len(texts), width), IGNORED_LABEL)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        labels[row, : len(text) - 1] = text[1:]
    next_tokens = torch.cat([labels[row, : len(text)] for row, text in enumerate(texts)])
    return TrainBatch(tuple(lengths), ids, labels, PackedBatch.from_list(texts), next_tokens)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, S] as `generate` wants them: the last column is each prompt's last token.

    >>> left_padded([[5, 6], [7]])[0].tolist()
    [[5, 6], [0, 7]]
    """
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask
