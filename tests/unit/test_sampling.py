"""How tokens are drawn: against the softmax that they are drawn from, whoever holds which columns."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from weft.transformer.sampling import Sampling, choose

LOGITS = torch.tensor([2.0, 0.5, 2.0, -1.0, 1.0, float("-inf"), 0.0])


def draw(sampling: Sampling, rows: int, cuts: list[int], seed: int = 0) -> torch.Tensor:
    """Tokens of `rows` equal rows, as ranks with columns from cut to cut draw them."""
    generators = [torch.Generator().manual_seed(seed + i) for i in range(rows)]
    bounds = [0, *cuts, LOGITS.numel()]
    parts = [LOGITS[a:b].expand(rows, -1).contiguous() for a, b in pairwise(bounds)]
    messages: list[torch.Tensor] = []

    def send(message: torch.Tensor) -> list[torch.Tensor]:
        messages.append(message)
        return [message]

    for part, first in zip(parts, bounds, strict=False):  # what each rank would send
        sent = [torch.Generator().manual_seed(0) for _ in range(rows)]
        choose(part, first, LOGITS.numel(), sampling, sent, send)
    return choose(parts[0], 0, LOGITS.numel(), sampling, generators, lambda mine: messages)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1.0), [0, 1, 2, 3, 4, 6]),
        (Sampling(0.5), [0, 1, 2, 3, 4, 6]),
        (Sampling(1.0, top_k=3), [0, 2, 4]),
        (Sampling(1.0, top_k=1), [0]),
        (Sampling(1.0, top_p=0.6), [0, 2]),
        (Sampling(1.0, top_k=4, top_p=0.99), [0, 1, 2, 4]),
        (Sampling(0.0), [0]),
    ],
)
def test_frequencies(sampling: Sampling, allowed: list[int]) -> None:
    rows = 4000
    drawn = draw(sampling, rows, [3, 4])
    kept = torch.full_like(LOGITS, float("-inf"))
    kept[allowed] = LOGITS[allowed]
    wanted = torch.softmax(kept / (sampling.temperature or 1.0), 0)
    found = torch.bincount(drawn, minlength=LOGITS.numel()) / rows
    assert set(drawn.tolist()) <= set(allowed)
    assert float((found - wanted).abs().max()) < 0.03
    for cuts in ([], [1], [2, 5], [6]):  # it does not matter who holds what
        assert torch.equal(draw(sampling, rows, cuts), drawn)


def test_among_equals_the_first_is_the_most_likely() -> None:
    flat = torch.zeros(2, 9)
    assert choose(flat, 0, 9, Sampling(), [], lambda mine: [mine]).tolist() == [0, 0]
    assert choose(flat, 0, 9, Sampling(1.0, top_k=1), [torch.Generator()] * 2, lambda mine: [mine]).tolist() == [0, 0]
