"""What the systems of `weft bench end_to_end` are given: one batch to train on in both forms, and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.packed.batch import PackedBatch

IGNORED = -100
PAD = 0


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """The same sequences in both forms, with the label of each token: the next token, or IGNORED.

    ids, labels:  int64 [B, S], padded on the right, where labels are IGNORED
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
    >>> batch.ids.shape, (batch.labels != IGNORED).sum(1).tolist(), batch.packed.tokens
    (torch.Size([2, 4]), [2, 1], 5)
    """
    texts = [torch.tensor(ids) for ids in token_lists(lengths, vocabulary)]
    width = -(-max(lengths) // multiple) * multiple
    ids = torch.full((len(texts), width), PAD)
    labels = torch.full((len(texts), width), IGNORED)
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
