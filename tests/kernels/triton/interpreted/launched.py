"""Which kernels the interpreter was asked to run, against those that are compiled for GPUs."""

from contextlib import contextmanager

import torch
from triton.runtime import interpreter

from weft.kernels.triton.compile import TYPES, variants

KINDS = {**TYPES, torch.int32: "i32", torch.int64: "i64"}
# Parts of a kernel that are left out where they are not given: less of it is compiled, and nothing else.
OPTIONAL = {
    "matmul_kernel": {"bias", "residual", "pre"},
    "attention_kernel": {"lse"},
    "norm_kernel": {"bias", "residual", "weight", "beta", "total", "mean", "rstd"},
    "sum_kernel": {"bias"},
}


def is_listed(kernel, given, blocks):
    """Whether a variant has all that is given, in the same types, beside what may be left out; and its block sizes."""
    for variant in variants():
        if variant.function.fn.__name__ != kernel:
            continue
        missing = variant.pointers.keys() - given.keys()
        same = all(variant.pointers.get(name) == kind for name, kind in given.items())
        sizes = kernel != "matmul_kernel" or dict(variant.config.blocks) == blocks
        if same and sizes and missing <= OPTIONAL.get(kernel, set()):
            return True
    return False


@contextmanager
def all_compiled():
    """At the end: every launch in here was of a kernel that `weft kernels compile` compiles."""
    seen, call = set(), interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        given = {name: KINDS[t.dtype] for name, t in named.items() if isinstance(t, torch.Tensor)}
        blocks = {name: size for name, size in named.items() if name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
        seen.add((self.fn.__name__, tuple(given.items()), tuple(blocks.items())))
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = call
    unlisted = [one for one in seen if not is_listed(one[0], dict(one[1]), dict(one[2]))]
    assert not unlisted, unlisted
