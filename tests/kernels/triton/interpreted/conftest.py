"""Runs the kernels in Triton's interpreter. Collected only in a process of its own: see test_interpreted.py.

The interpreter keeps bfloat16 as 16-bit integers, and does three things that a GPU does not: `tl.dot` multiplies those
integers; it is a BLAS call, whose bits depend on where in its block a row lies; and a conversion to bfloat16 cuts
instead of rounding. All are mended here, so that the kernels need no code for the interpreter's sake. It also prepares
the language anew for each call of a device function, most of the time that a kernel takes; here it does so once for
each launch.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from weft.kernels.triton import INTERPRETED

if not INTERPRETED:
    raise pytest.UsageError("set TRITON_INTERPRET=1, or run tests/kernels/triton/test_interpreted.py")

_convert = interpreter._convert_float


def _wide(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self, a, b, total, input_precision, max_num_imprecise_acc):
    """Exact products of 16-bit inputs, added from the first k to the last."""
    left, right, out = _wide(a), _wide(b), total.data.copy()
    for k in range(left.shape[1]):
        out += left[:, k, None] * right[k]
    return TensorHandle(out, total.dtype.scalar)


def _convert_float(data, source, target, rounding):
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << np.uint32(16)
    return _convert(data, source, target, rounding)


interpreter._convert_float = _convert_float
InterpreterBuilder.create_dot = _dot

_patch_lang = interpreter._patch_lang


class _Launch:
    """What prepares the language for a launch and takes that back at its end; nested calls find it prepared.

    A function sees the language through `tl`, or as triton's own do, through `core`: each is prepared once.
    """

    def __init__(self):
        self.scopes = {}

    def __call__(self, fn):
        seen = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if seen not in self.scopes:
            self.scopes[seen] = _patch_lang(fn)
        return self

    def restore(self):
        while self.scopes:
            self.scopes.popitem()[1].restore()


interpreter._patch_lang = _Launch()


@pytest.fixture(autouse=True)
def _one_thread_and_quiet():
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):  # masked lanes overflow, as they do on a GPU
        yield
