"""Sizes, shapes and places that come from other ranks are checked before memory is taken for them."""

from __future__ import annotations

import json
import random

import pytest
import torch

from weft.comm.tell import checked_length
from weft.comm.window import checked_offer
from weft.errors import PeerMismatch
from weft.overlap.executor.call import checked_counts
from weft.pipeline.transport.exchange import HEADER_LENGTH, Header

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 63, 255, 1 << 20, 1 << 31, 1 << 40, 1 << 62, -1, -(1 << 40), -(1 << 63), (1 << 63) - 1]


@pytest.mark.parametrize("length", [-1, 11, 1 << 62, -(1 << 63)])
def test_a_length_beyond_the_bound_is_refused(length: int) -> None:
    assert checked_length(10, 10, "a text", 1) == 10
    with pytest.raises(PeerMismatch, match=r"rank 1 announces .* expected 0 to 10"):
        checked_length(length, 10, "a text", 1)


def test_any_numbers_are_a_header_or_refused() -> None:
    dice, good = random.Random(3), 0
    for _ in range(20_000):
        numbers = [dice.choice(NUMBERS) for _ in range(HEADER_LENGTH)]
        if dice.random() < 0.3:  # close to a header, so that all checks are reached
            numbers[1:4] = [dice.randint(0, 1), dice.randint(-1, 12), dice.randint(0, 9)]
            numbers[4:] = [dice.choice([0, 1, 5, 1000, dice.choice(NUMBERS)]) for _ in numbers[4:]]
        try:
            header = Header.from_tensor(torch.tensor(numbers))
        except PeerMismatch:
            continue
        good += 1
        elements = 1
        for size in header.shape:
            assert size >= 0
            elements *= size
        assert elements * header.dtype.itemsize <= 1 << 42
    assert good > 100


def test_any_counts_are_numbers_of_rows_or_refused() -> None:
    dice = random.Random(4)
    for _ in range(2_000):
        rows = [[dice.choice(NUMBERS) for _ in range(3)] for _ in range(3)]
        fine = all(0 <= count <= 1 << 31 for row in rows for count in row)
        if fine:
            assert checked_counts(rows) == tuple(map(tuple, rows))
        else:
            with pytest.raises(PeerMismatch, match="rows for the ranks"):
                checked_counts(rows)


def _random_json(dice: random.Random, depth: int = 0) -> object:
    kinds = [None, True, -1, 3, 1 << 70, 1.5, "", "17", "../../etc", "1 7", "\u0661", "9" * 30, "00" * 16]
    if depth < 2 and dice.random() < 0.6:
        return [_random_json(dice, depth + 1) for _ in range(dice.choice([0, 1, 2, 3, 3, 3, 4]))]
    return dice.choice(kinds)


def test_any_words_in_the_store_are_a_window_or_refused() -> None:
    dice, good = random.Random(5), 0
    for _ in range(20_000):
        words = json.loads(json.dumps(_random_json(dice)))
        if dice.random() < 0.2:
            words = [dice.choice(["17", "-1", 17]), dice.choice([4, -4, "4"]), dice.choice(["00" * 16, 0])]
        try:
            pid, number, token = checked_offer(words)
        except OSError:
            continue
        good += 1
        assert type(pid) is int
        assert pid >= 0
        assert type(number) is int
        assert 0 <= number < 1 << 31
        assert isinstance(token, str)
    assert good > 10
