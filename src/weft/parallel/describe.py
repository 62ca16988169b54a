"""What a model is made of, and how each of its parameters is cut; placements follow from that.

    q, k, v, gate, up    Shard(0), whole heads needed        embedding, head    Shard(0), over the vocabulary
    out, down            Shard(1), their biases Replicate    norms, positions   Replicate

Weights that are stored transposed have the other dim. Everything that is not named here is replicated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from weft.packed import spec
from weft.packed.models.common import Unsupported, activation, layer_norm, linear
from weft.packed.spec import Attention, Norm, Projection, Transformer
from weft.parallel.cut import Heads, Run
from weft.parallel.realign import Cut


@dataclass(frozen=True, eq=False)
class Transform:
    """What BERT does to a token before it is compared with words: norm(act(dense(x)))."""

    dense: Projection
    activation: str
    norm: Norm


@dataclass(frozen=True, eq=False)
class VocabularyHead:
    """Logits of words, after `transform` where there is one."""

    projection: Projection
    transform: Transform | None = None


@dataclass(frozen=True, eq=False)
class Described:
    """A whole model; its tensors are those of the modules."""

    transformer: Transformer
    head: VocabularyHead | None = None


Cuts = dict[int, Cut | None]  # by id of the tensor; None is replicated


def causal_head(model: Any) -> VocabularyHead:
    """Of `LlamaForCausalLM` and `GPT2LMHeadModel`."""
    return VocabularyHead(linear(model.lm_head))


def bert_head(model: Any) -> VocabularyHead:
    """Of `BertForMaskedLM`."""
    predictions = model.cls.predictions
    transform = predictions.transform
    name = model.config.hidden_act
    done = Transform(linear(transform.dense), activation(name), layer_norm(transform.LayerNorm))
    return VocabularyHead(linear(predictions.decoder), done)


VOCABULARY_HEADS: dict[str, Callable[[Any], VocabularyHead]] = {
    "LlamaForCausalLM": causal_head,
    "GPT2LMHeadModel": causal_head,
    "BertForMaskedLM": bert_head,
}


def cuts(described: Described, size: int) -> Cuts:
    """How each tensor is cut for `size` ranks. Raises where a rank would have nothing to compute."""
    found: Cuts = {}
    model = described.transformer
    if not model.layers:
        raise Unsupported("the model has no layers, expected at least one: there is nothing to share among ranks")
    if model.embedding is not None:
        words = model.embedding.tables[0].shape[0]
        if Run.of(words, size - 1, size).count == 0:
            raise ValueError(f"{size} ranks cannot share a vocabulary of {words} words: a rank would have none")
        _add(found, model.embedding.tables[0], Cut.chunks(0, words, size))
        for table in model.embedding.tables[1:]:
            _add(found, table, None)
        _add_norm(found, model.embedding.norm)
    for layer in model.layers:
        _add_attention(found, layer.attention, size)
        _add_mlp(found, layer.mlp, size)
        _add_norm(found, layer.attention_norm)
        _add_norm(found, layer.mlp_norm)
    _add_norm(found, model.final_norm)
    if described.head is not None:
        _add_head(found, described.head, model.embedding, size)
    return found


def _add(found: Cuts, tensor: Tensor | None, cut: Cut | None) -> None:
    if tensor is None:
        return
    if found.setdefault(id(tensor), cut) != cut:
        raise Unsupported(f"a tensor of shape {list(tensor.shape)} has two roles that are cut in different ways")


def _add_norm(found: Cuts, norm: Norm | None) -> None:
    if norm is not None:
        _add(found, norm.weight, None)
        _add(found, norm.bias, None)


def _add_outputs(found: Cuts, projection: Projection, needed: list[tuple[tuple[Run, ...], ...]]) -> None:
    """A column-parallel projection; `needed` has the runs of every rank for each part."""
    dim = 1 if projection.transposed else 0
    for weight, bias, runs in zip(projection.weights, projection.biases, needed, strict=True):
        _add(found, weight, Cut(dim, weight.shape[dim], runs))
        if bias is not None:
            _add(found, bias, Cut(0, weight.shape[dim], runs))


def _add_inputs(found: Cuts, projection: Projection, needed: tuple[tuple[Run, ...], ...]) -> None:
    """A row-parallel projection; its bias is added to the sum of all ranks, so it is whole."""
    (weight,), (bias,) = projection.weights, projection.biases
    dim = 0 if projection.transposed else 1
    _add(found, weight, Cut(dim, weight.shape[dim], needed))
    _add(found, bias, None)


def _add_attention(found: Cuts, attention: Attention, size: int) -> None:
    d, qkv = attention.head_dim, attention.qkv
    heads = [Heads.of(attention, rank, size) for rank in range(size)]
    queries, keys = [h.queries.times(d) for h in heads], [h.keys.times(d) for h in heads]
    apart: list[tuple[tuple[Run, ...], ...]]
    if len(qkv.weights) == 3:
        apart = [tuple((run,) for run in runs) for runs in (queries, keys, keys)]
    else:  # q, k and v end to end in one tensor
        k_at, v_at = attention.heads * d, (attention.heads + attention.kv_heads) * d
        apart = [tuple((q, k.shifted(k_at), k.shifted(v_at)) for q, k in zip(queries, keys, strict=True))]
    _add_outputs(found, qkv, apart)
    _add_inputs(found, attention.out, tuple((run,) for run in queries))


def _add_mlp(found: Cuts, mlp: spec.Mlp, size: int) -> None:
    if mlp.gated and len(mlp.up.weights) == 1:
        raise Unsupported("an MLP with gate and up in one weight is not supported; expected two weights")
    width = mlp.up.weights[0].shape[1 if mlp.up.transposed else 0]
    if Run.of(width, size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share an MLP of width {width}: a rank would have nothing to compute")
    runs = Cut.chunks(0, width, size).needed
    _add_outputs(found, mlp.up, [runs] * len(mlp.up.weights))
    _add_inputs(found, mlp.down, runs)


def _add_head(found: Cuts, head: VocabularyHead, embedding: spec.Embedding | None, size: int) -> None:
    words = head.projection.weights[0].shape[0]
    if embedding is not None and embedding.tables[0].shape[0] != words:
        raise Unsupported(
            f"the embedding has {embedding.tables[0].shape[0]} words and the head {words}, expected as many of each"
        )
    if Run.of(words, size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share a vocabulary of {words} words: a rank would have none")
    _add_outputs(found, head.projection, [Cut.chunks(0, words, size).needed])
    if head.transform is not None:
        for tensor in spec.tensors(head.transform):
            _add(found, tensor, None)


def outline(value: object) -> str:
    """A digest of everything in a description but the values of its tensors: the same for the same computation."""
    return hashlib.blake2b(_outlined(value).encode(), digest_size=6).hexdigest()


def _outlined(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({','.join(_outlined(item) for item in value)})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}{_outlined(tuple(getattr(value, f.name) for f in fields(value)))}"
    return repr(value)


_ValueT = TypeVar("_ValueT")


def with_tensors(value: _ValueT, change: Callable[[Tensor], Tensor]) -> _ValueT:
    """A description with other tensors in the same places.

    >>> import torch
    >>> with_tensors(Norm(torch.ones(2), None, 1e-5), torch.Tensor.neg).weight
    tensor([-1., -1.])
    """
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(with_tensors(item, change) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: with_tensors(getattr(value, f.name), change) for f in fields(value)})
    return value
