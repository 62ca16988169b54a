"""Runs the kernels in Triton's interpreter. Collected only in a process of its own: see test_interpreted.py."""

import numpy as np
import pytest
import torch

from weft.kernels.triton import INTERPRETED
from weft.kernels.triton.interpreter import mend

if not INTERPRETED:
    raise pytest.UsageError("set TRITON_INTERPRET=1, or run tests/kernels/triton/test_interpreted.py")

mend()


@pytest.fixture(autouse=True)
def _one_thread_and_quiet():
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):  # masked lanes overflow, as they do on a GPU
        yield
