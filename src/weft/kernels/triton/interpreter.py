"""Makes Triton's interpreter do what a GPU does, for tests and for `examples/gpu_check.py --interpret`.

The interpreter keeps bfloat16 as 16-bit integers, and does some things that a GPU does not:

- `tl.dot` multiplies those integers; it is a BLAS call, whose bits depend on where in its block a row lies; and a
  conversion to bfloat16 cuts instead of rounding.
- It copies every argument's memory onto itself at the end of a launch, which loses what another thread wrote meanwhile.
- It never lets go of Python's lock while a kernel waits, so that what it waits for hardly gets on. Here a load with
  acquire semantics takes a nap, as the compiled loop does.
- It parses the source of a kernel in whatever thread launches it first, several at once.
- One launch runs at a time: which program is running is one value for the whole process, and the language is changed
  back at the end of each launch. Here each thread has its own value, and the language stays prepared, which it would
  otherwise be anew for each call of a device function: most of the time that a kernel takes.

So the kernels themselves need no code for the interpreter's sake.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from weft.kernels.triton.launch import INTERPRETED
from weft.kernels.triton.signals import SPIN_NS

_NAP_SECONDS = SPIN_NS.value * 1e-9


@cache
def mend() -> None:
    """Changes Triton's interpreter in this process, once. An error where kernels are not interpreted."""
    if not INTERPRETED:
        raise ValueError("Triton compiles its kernels here; set TRITON_INTERPRET=1 before the process starts")
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    builder.grid_idx, builder.grid_dim = _OfThread("grid_idx"), _OfThread("grid_dim")
    builder.create_atomic_rmw = _napping(builder.create_atomic_rmw)
    module: Any = interpreter
    module._convert_float = _Convert(module._convert_float)
    module._patch_lang = _Prepared(module._patch_lang)
    rewriter: Any = interpreter.FunctionRewriter
    rewriter.rewrite_ast = _one_at_a_time(rewriter.rewrite_ast)
    executor: Any = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *_: None


def _one_at_a_time(method: Any) -> Any:
    """Python 3.11 counts the depth of a syntax tree for all threads together, and trips over two that parse at once."""
    lock = threading.RLock()

    def locked(self: Any) -> Any:
        with lock:
            return method(self)

    return locked


def _napping(atomic: Any) -> Any:
    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if sem == ir.MEM_SEMANTIC.ACQUIRE:
            time.sleep(_NAP_SECONDS)
        return atomic(self, operation, pointer, value, mask, sem, scope)

    return create_atomic_rmw


class _OfThread:
    """An attribute that each thread has for itself."""

    def __init__(self, name: str) -> None:
        self._name, self._values = name, threading.local()

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(self._values, self._name, None)

    def __set__(self, instance: object, value: object) -> None:
        setattr(self._values, self._name, value)


class _Prepared:
    """Prepares the language for a function, and leaves it so.

    A function sees the language through `tl`, or as triton's own do, through `core`: each is prepared once.
    """

    def __init__(self, prepare: Any) -> None:
        self._prepare, self._seen, self._lock = prepare, set[frozenset[int]](), threading.Lock()

    def __call__(self, fn: Any) -> _Prepared:
        seen = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        with self._lock:
            if seen not in self._seen:
                self._prepare(fn)
                self._seen.add(seen)
        return self

    def restore(self) -> None:
        """Nothing: another thread may be in the middle of a launch."""


class _Convert:
    """The interpreter's conversion of floats, with bfloat16 rounded to the nearest."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __call__(self, data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << np.uint32(16)
        return self._convert(data, source, target, rounding)


def _wide(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return handle.data.astype(np.float32)


def _dot(self: Any, a: Any, b: Any, total: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Exact products of 16-bit inputs, added from the first k to the last."""
    left, right, out = _wide(a), _wide(b), total.data.copy()
    for k in range(left.shape[1]):
        out += left[:, k, None] * right[k]
    handle: Any = interpreter.TensorHandle
    return handle(out, total.dtype.scalar)
