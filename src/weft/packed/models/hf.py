"""Hugging Face models packed from outside: a packed model is a shallow copy of the user's, with the same parameters
under the same names, the same class, and another `forward`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.packed.engine import AttentionDropout
from weft.packed.models.base import Family, PackedBase
from weft.packed.models.heads import PackedHead
from weft.packed.models.inputs import HeadKind


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were passed by **kwargs among them."""
    bound = dict(inspect.signature(forward).bind(None, *args, **kwargs).arguments)
    extra = bound.pop("kwargs", {})
    bound.pop("self", None)
    return {**bound, **extra}


def subclass(model: nn.Module, mixin: type, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of the model whose class has another forward; its signature and name stay."""
    original = type(model)
    body = {"forward": functools.wraps(original.forward)(forward), "__module__": original.__module__}
    twin = copy.copy(model)
    twin.__class__ = type(original.__name__, (mixin, original), body)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(model.__dict__[name])
    return twin


def pack_base(model: nn.Module, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a base model."""
    twin = subclass(model, PackedBase, _forward_of(model))
    twin.__dict__["_weft"] = (family, dropout)
    twin.weft_engine().model  # type: ignore[operator]  # noqa: B018  # raises now if the model cannot be packed
    return twin


def pack_head(model: nn.Module, kind: HeadKind, base: str, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a model whose attribute `base` is its base model."""
    twin = subclass(model, PackedHead, _forward_of(model))
    twin._modules[base] = pack_base(getattr(model, base), family, dropout)
    twin.__dict__["_weft_head"], twin.__dict__["_weft_base"] = kind, base
    return twin


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    original = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.weft_forward(original, bind(original, args, kwargs))

    return forward
