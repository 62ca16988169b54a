"""What goes into the next batch."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.jobs.serve.queue import LOOK_AHEAD, QueuedText, TextQueue, Ticket


def queue_of(*tokens: int) -> tuple[TextQueue, list[QueuedText]]:
    future: Any = None
    texts = [QueuedText(Ticket(future, [None], 1), 0, i, n, float(i)) for i, n in enumerate(tokens)]
    queue = TextQueue()
    queue.add(texts)
    return queue, texts


def taken(queue: TextQueue, budget: int) -> list[list[int]]:
    """Batch by batch, the places of what was taken."""
    batches = []
    while queue:
        batches.append([text.content for text in queue.take(budget)])
    return batches


def test_first_come_first_served_up_to_the_budget() -> None:
    assert taken(queue_of(3, 3, 3, 3)[0], 7) == [[0, 1], [2, 3]]
    assert taken(queue_of(7, 7)[0], 7) == [[0], [1]]
    assert taken(queue_of()[0], 7) == []


def test_a_long_text_is_passed_over_once() -> None:
    assert taken(queue_of(2, 100, 2, 2)[0], 10) == [[0, 2, 3], [1]]
    assert taken(queue_of(100, 2, 2)[0], 10) == [[0], [1, 2]]  # longer than any batch: one of its own
    assert taken(queue_of(6, 6, 6, 1, 1)[0], 8) == [[0, 3, 4], [1], [2]]


def test_a_text_without_tokens_is_not_free() -> None:
    assert taken(queue_of(0, 0, 0)[0], 2) == [[0, 1], [2]]


def test_texts_whose_client_left_are_dropped() -> None:
    queue, texts = queue_of(2, 2, 2, 2)
    texts[0].ticket.is_gone = texts[2].ticket.is_gone = True
    assert taken(queue, 100) == [[1, 3]]
    queue, texts = queue_of(2)
    texts[0].ticket.is_gone = True
    assert queue.take(10) == []
    assert not queue


def test_looking_ahead_ends() -> None:
    queue, _ = queue_of(1, *[9] * (2 * LOOK_AHEAD), 1)
    assert [text.content for text in queue.take(8)] == [0]
    assert len(queue) == 2 * LOOK_AHEAD + 1


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 40))
def test_every_text_is_taken_once_and_none_waits_longer_than_in_line(tokens: list[int], budget: int) -> None:
    batches = taken(queue_of(*tokens)[0], budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(tokens)))
    when = {i: number for number, batch in enumerate(batches) for i in batch}
    in_line, left = {}, 0
    number = -1
    for i, n in enumerate(tokens):  # without passing anything over
        if max(n, 1) > left:
            number, left = number + 1, budget
        in_line[i], left = number, left - max(n, 1)
    for i in when:
        assert when[i] <= in_line[i]
    for batch in batches:
        assert batch == sorted(batch)
        assert sum(max(tokens[i], 1) for i in batch) <= budget or len(batch) == 1
