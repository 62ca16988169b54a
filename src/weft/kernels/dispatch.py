"""One table: (device type, dtype) -> the implementation of every operation on tiles and rows.

Everything above calls `kernels_for(tensor)` and nothing else, so no op asks on which device it is. An implementation
is loaded when it is first needed: a CPU-only machine needs no Triton.

And `is_plain`: whether a call may go past torch's dispatcher, which costs as much as a small matmul;
`without_autocast`: for code whose types have been chosen; `check_tensor` and `refuse_tangents`: for ops of several
ranks, which must refuse what they cannot do before any rank waits for another.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft._torch import constant_in_compile, has_memory, in_forward_ad, is_transformed

NATIVE, TRITON = "native", "triton"

# The table. Only `routed` changes it, for as long as its block lasts.
_TABLE: dict[tuple[str, torch.dtype], str] = {
    ("cpu", torch.float32): NATIVE,
    ("cpu", torch.bfloat16): NATIVE,
    ("cuda", torch.float32): TRITON,
    ("cuda", torch.bfloat16): TRITON,
    ("cuda", torch.float16): TRITON,
}

_MODULES = {
    NATIVE: ("weft.kernels.cpu", "weft.kernels.cpu_attention"),
    TRITON: ("weft.kernels.triton",),
}


@dataclass(frozen=True, eq=False)
class Kernels:
    """One implementation. The functions have the arguments of those of the same name in `cpu` and `cpu_attention`.

    `layout` names the form that `pack` gives a weight [N, K], of `packed_elements(n, k, layout)` elements.
    `torch_multiplies` are the types in which torch's own matmul of two plain matrices is as fast.
    `takes_addresses` says that `weft._core` computes on this memory, for callers that hand it addresses (`door`).
    """

    name: str
    layout: str
    torch_multiplies: frozenset[torch.dtype]
    takes_addresses: bool
    packed_elements: Callable[[int, int, str], int]
    empty: Callable[..., Tensor]
    pack: Callable[[Tensor, str, int], Tensor]
    unpack: Callable[[Tensor, int, int, str, int], Tensor]
    linear: Callable[..., None]
    norm: Callable[..., None]
    gather: Callable[..., None]
    rotary: Callable[..., None]
    gate: Callable[..., None]
    attention: Callable[..., None]
    attention_grad: Callable[..., None]


def kernels_for(tensor: Tensor) -> Kernels:
    """The implementation for the device and type of `tensor`.

    >>> kernels_for(torch.zeros(1)).name
    'native'
    """
    return _find(tensor.device.type, tensor.dtype)


@constant_in_compile  # an implementation cannot be loaded while a function is traced, so the tracer calls this
def layout_on(device: str, dtype: torch.dtype) -> str:
    """The layout of packed weights.

    >>> layout_on("cpu", torch.float32) == kernels_for(torch.zeros(1)).layout
    True
    """
    return _find(device, dtype).layout


def _find(device: str, dtype: torch.dtype) -> Kernels:
    name = _TABLE.get((device, dtype))
    if name is None:
        raise ValueError(_unsupported(device, dtype))
    return _load(name)


def is_supported(device: str, dtype: torch.dtype) -> bool:
    """Whether there is an implementation.

    >>> is_supported("cpu", torch.float16)
    False
    """
    return (device, dtype) in _TABLE


def dtypes_on(device: str) -> str:
    """The types that are supported on a device, for a message.

    >>> dtypes_on("cpu")
    'float32 or bfloat16'
    """
    return " or ".join(str(dtype).removeprefix("torch.") for other, dtype in _TABLE if other == device)


@contextmanager
def routed(device: str, implementation: str) -> Iterator[None]:
    """Computes all that is on `device` by another implementation until the block ends, in all threads.

    So the Triton kernels are run on tensors of the CPU where Triton interprets them:

        with routed("cpu", TRITON):
            y = weft.packed_attention(q, k, v, batch)
    """
    if implementation not in _MODULES:
        raise ValueError(f"got the implementation {implementation!r}, expected one of {', '.join(_MODULES)}")
    before = dict(_TABLE)
    types = [dtype for (_, dtype), name in before.items() if name == implementation]
    try:
        for dtype in types:
            _TABLE[device, dtype] = implementation
        yield
    finally:
        _TABLE.clear()
        _TABLE.update(before)


@cache
def _load(name: str) -> Kernels:
    if name == TRITON and importlib.util.find_spec("triton") is None:
        raise ValueError("tensors on a GPU are computed by Triton, which is not installed; pip install triton")
    modules = [importlib.import_module(module) for module in _MODULES[name]]
    found: dict[str, Any] = {"name": name}
    for field in fields(Kernels)[1:]:
        attribute = _ATTRIBUTES.get(field.name, field.name)
        found[field.name] = next(getattr(module, attribute) for module in modules if hasattr(module, attribute))
    return Kernels(**found)


_ATTRIBUTES = {"layout": "LAYOUT", "torch_multiplies": "TORCH_MULTIPLIES", "takes_addresses": "TAKES_ADDRESSES"}


def _unsupported(device: str, dtype: torch.dtype) -> str:
    devices = list(dict.fromkeys(device for device, _ in _TABLE))
    if device not in devices:
        return f"weft has kernels for {' and '.join(devices)}, got a tensor on {device}; move it with .cpu()"
    types = dtypes_on(device).replace(" or ", " and ")
    return f"weft computes in {types} on {device}, got {dtype}; convert with .float() or .bfloat16()"


_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to add.

    It has when someone compiles, traces, counts (a dispatch mode), transforms (vmap, jvp) or differentiates, for
    subclasses of Tensor, for lazily negated views, and for zeros that have no memory.

    >>> is_plain(torch.ones(2)), is_plain(torch.ones(2, requires_grad=True))
    (True, False)
    """
    if torch.compiler.is_compiling() or is_transformed():
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _TYPES or (grad and t.requires_grad) or t.is_neg():
            return False
        if t.layout is torch.strided and t.data_ptr() == 0 and not has_memory(t):
            return False
    return True


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block whose types have been chosen: torch's ops in it compute in the types of their inputs.

    Such is the body of a custom op, and a backward pass, which has the types of its forward pass.
    """
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


# What an op can take ----------------------------------------------------------------------------------------


def check_tensor(name: str, given: object, device: torch.device | None = None) -> None:
    """Raises unless it is a dense tensor with values, on `device` where one is named.

    >>> check_tensor("bias", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ValueError: bias is on the meta device, expected a dense torch tensor with values; give it memory and values first
    """
    is_dense = (
        isinstance(given, Tensor)
        and given.layout is torch.strided
        and not (given.is_nested or given.is_quantized or given.is_meta)
        and (type(given) in _TYPES or not hasattr(given, "to_local"))
    )
    if is_dense and (device is None or given.device == device):  # type: ignore[attr-defined]
        return
    what, remedy = _strange(given, device)
    where = "" if device is None else f" on {device}"
    raise ValueError(f"{name} is {what}, expected a dense torch tensor with values{where}; {remedy}")


def _strange(given: object, device: torch.device | None) -> tuple[str, str]:
    """What a tensor is that an op cannot take, and the remedy."""
    if given is None:
        return "None", "give one"
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}", "torch.as_tensor makes one of numbers"
    if hasattr(given, "to_local"):
        return f"a {type(given).__name__}", "give this rank's part of it, to_local()"
    if given.is_nested:
        return "a nested tensor", "give its rows as one matrix, values()"
    if given.layout is not torch.strided:
        return str(given.layout), "give to_dense()"
    if given.is_quantized:
        return "quantised", "give dequantize()"
    if given.is_meta:
        return "on the meta device", "give it memory and values first"
    return f"on {given.device}", f"move it with .to({str(device)!r})"


class _Gate(torch.autograd.Function):
    """Computes nothing, and raises when a tangent comes in.

    Ops made by torch.library drop tangents without a word. Only torch can say whether there is one: inside torch.func
    each level has its own, and a compiled function has none to look at. It asks a Function for its jvp in all of them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, names: str, *tensors: Tensor) -> Tensor:
        return tensors[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, ctx.names = inputs[0], inputs[1].split()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        return (None,) * (2 + len(ctx.names))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> None:
        given = [name for name, tangent in zip(ctx.names, tangents, strict=True) if tangent is not None]
        if given:
            raise NotImplementedError(
                f"{' and '.join(given)} of {ctx.op} has a tangent, expected none: it has no forward-mode derivative "
                "(torch.func.jvp, jacfwd, linearize, forward_ad); use backward(), or detach() what is constant"
            )


def refuse_tangents(op: str, **tensors: Tensor | None) -> None:
    """Raises where forward-mode differentiation goes through `op`."""
    if in_forward_ad():
        given = {name: t for name, t in tensors.items() if t is not None}
        _Gate.apply(op, " ".join(given), *given.values())  # type: ignore[no-untyped-call]
