"""Tensors of every type, stride and mode for the tests of resharding, and what a move of them must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from weft.layout import Layout
from weft.reference import reshard_reference, shard
from weft.reshard import TensorSpec

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)
STRIDES = ("plain", "transposed", "stepped", "one", "offset", "expanded", "conj", "neg", "last")
MODES = ("grad", "no_grad", "inference")


def mode_of(name: str) -> AbstractContextManager[object]:
    """The context of a mode of torch."""
    return {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[name]()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as bytes: equal in every bit, NaN and all."""
    plain = _empty(tuple(tensor.shape), tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether type, shape and all bits are the same."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Elements that differ wherever the type has room for it; small whole numbers in types that compute."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randint(-9, 9, (*shape, 2), generator=generator).double()
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point or dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        low = 0 if dtype == torch.uint8 else -9
        whole = torch.randint(low, 9, shape, generator=generator)
        try:
            return whole.double().to(dtype)
        except (RuntimeError, TypeError):
            pass
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def with_strides(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same elements in another memory: strided, offset, or read with a sign turned."""
    shape = tuple(tensor.shape)
    if kind == "transposed" and tensor.dim() >= 2:
        found = _empty((*shape[:-2], shape[-1], shape[-2]), tensor.dtype).transpose(-1, -2)
    elif kind == "stepped" and tensor.dim():
        found = _empty((*shape[:-1], 2 * shape[-1] + 1), tensor.dtype)[..., 1::2]
    elif kind == "last" and tensor.dim():
        found = _empty((*shape, 3), tensor.dtype)[..., 2]
    elif kind == "one":
        found = _empty((math.prod(shape), 5), tensor.dtype)[:, 3].view(shape) if tensor.numel() == 1 else tensor.clone()
    elif kind == "offset":
        found = _empty((tensor.numel() + 7,), tensor.dtype)[7:].view(shape)
    elif kind == "conj" and tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.resolve_conj().conj().clone().conj()
    elif kind == "neg" and tensor.dtype in (torch.float32, torch.float64):
        other = torch.complex(torch.zeros_like(tensor), -tensor)
        return other.conj().imag  # read with its sign turned, and strided
    else:
        return tensor.clone()
    return found.copy_(tensor)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return torch.full((size,), 99, dtype=torch.uint8).view(dtype).view(shape)


def shards_of(spec: TensorSpec, seed: int, make: Callable[..., torch.Tensor] = values) -> dict[int, torch.Tensor]:
    """The source's shards of all ranks; each term is another tensor."""
    found: dict[int, torch.Tensor] = {}
    cells = spec.src.holders(len(spec.shape))
    for term in range(cells.shape[1]):
        parts = shard(make(spec.shape, spec.dtype, 1000 * seed + term), spec.src)
        found |= {int(rank): parts[int(rank)].clone() for rank in cells[:, term].reshape(-1)}
    return found


def random_shards(spec: TensorSpec, seed: int) -> dict[int, torch.Tensor]:
    """`shards_of` with fractions where the type has them, so that the order of a sum is seen in its bits."""
    return shards_of(spec, seed, _fractions)


def _fractions(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    if not dtype.is_floating_point and not dtype.is_complex:
        return values(shape, dtype, seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(spec: TensorSpec, seed: int) -> dict[int, torch.Tensor]:
    """The destination's shards of all ranks."""
    return reshard_reference(spec, shards_of(spec, seed))


def shard_like(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """A rank's shard of a whole tensor."""
    return shard(whole, layout)[rank].clone()


@contextmanager
def torch_warnings_off() -> Iterator[None]:
    """Without torch's notes on experimental types."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
