"""Memory of results: it is used again when nobody holds it, and not before."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from weft.overlap.executor.resources import OutputMemory

ROWS, COLS = 640, 1024


def made(memory: OutputMemory, rows: int = ROWS) -> torch.Tensor:
    return memory.empty(rows, COLS, dtype=torch.float32)


HOLDERS = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[3:5],
    "numpy": lambda t: t.numpy()[1:],
    "its storage": lambda t: t.untyped_storage(),
    "another type": lambda t: t.view(torch.int32),
    "detached": lambda t: t.requires_grad_().detach(),
    "dlpack": lambda t: np.from_dlpack(t),
    "a graph": lambda t: (t * torch.ones(1, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_is_not_given_away(holder: str) -> None:
    memory = OutputMemory()
    tensor = made(memory)
    at = tensor.data_ptr()
    held = HOLDERS[holder](tensor)
    del tensor
    other = made(memory)
    assert other.data_ptr() != at
    del held
    gc.collect()
    assert made(memory).data_ptr() == at


def test_what_is_kept_is_bounded_and_follows_the_sizes_in_use() -> None:
    memory = OutputMemory(most_bytes=12 << 20)
    many = [made(memory) for _ in range(9)]
    del many
    assert 0 < memory.free_bytes <= 12 << 20
    for rows in range(1000, 1400, 50):  # each of another size
        made(memory, rows)
        assert memory.free_bytes <= 12 << 20
    tensor = made(memory, 8000)  # more than is ever kept
    assert tensor.shape == (8000, COLS)
    del tensor
    assert memory.free_bytes <= 12 << 20


def test_small_ones_are_torchs_own() -> None:
    memory = OutputMemory()
    made(memory, 2)
    assert memory.free_bytes == 0
    assert made(memory, 0).shape == (0, COLS)


def test_memory_may_come_back_in_any_thread_and_after_its_owner() -> None:
    memory = OutputMemory()
    boxes = [[made(memory).fill_(i)] for i in range(8)]
    threads = [threading.Thread(target=box.clear) for box in boxes[:6]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [box[0] for box in boxes[6:]]
    del memory
    assert [float(tensor.mean()) for tensor in left] == [6.0, 7.0]


def test_a_forked_child_has_memory_of_its_own() -> None:
    memory = OutputMemory()
    tensor = made(memory).fill_(1.0)
    child = os.fork()
    if child == 0:
        tensor.numpy()[:] = 2.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(tensor, torch.ones(ROWS, COLS))
