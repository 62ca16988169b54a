"""Hugging Face models packed from outside: twins of the base model and of the model with a head."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft._torch import own_modules
from weft.packed.engine import AttentionDropout
from weft.packed.models.base import Family, PackedBase
from weft.packed.models.heads import PackedHead
from weft.packed.models.inputs import HeadKind
from weft.packed.models.twin import bind, twin_of

__all__ = ["bind", "pack_base", "pack_head"]


def pack_base(model: nn.Module, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a base model."""
    twin: Any = twin_of(model, PackedBase, {"_weft": (family, dropout), "weft_flattens": True})
    twin.weft_engine().model  # noqa: B018  # raises now if the model cannot be packed
    return twin  # type: ignore[no-any-return]


def pack_head(model: nn.Module, kind: HeadKind, base: str, family: Family, dropout: AttentionDropout) -> nn.Module:
    """The packed twin of a model whose attribute `base` is its base model."""
    packed = pack_base(getattr(model, base), family, dropout)
    twin = twin_of(model, PackedHead, {"_weft_head": kind, "_weft_base": base})
    own_modules(twin)[base] = packed
    return twin
