"""What a `RankProgram` may hand to the native core: the model is checked once, and each call when it comes in.

Behind this door addresses go to the core unchecked. Sizes follow from the model, so these must fit each other; what a
caller brings must have the model's type and width, and no number in it may point past a table, a sequence or a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.kernels.door import address, index_at, offsets_at, rows_at
from weft.packed import spec
from weft.packed.call import Inputs
from weft.packed.held import Dense, PackedLayer
from weft.parallel.inference.cache import RankCache
from weft.parallel.inference.memory import Job

if TYPE_CHECKING:
    from weft.parallel.inference.program import RankProgram


def check_program(program: RankProgram) -> None:
    """Raises unless all tensors of the model fit each other. They are the caller's, so this is no `assert`."""
    model, dtype = program.transformer, program.dtype
    width = model.width
    if model.embedding is not None:
        rows = [program.model.words.end - program.model.words.first, *(t.shape[0] for t in model.embedding.tables[1:])]
        for table, count, name in zip(model.embedding.tables, rows, model.embedding.names, strict=True):
            rows_at(table, dtype=dtype, shape=(count, width), what=f"the table of {name}")
        _check_norm(model.embedding.norm, width, dtype)
    for layer in program.layers:
        _check_layer(layer, width, dtype)
    _check_norm(model.final_norm, width, dtype)
    if program.head is not None:
        _check_dense(program.head, program.head.n, width, dtype, "the head")


def _check_layer(layer: PackedLayer, width: int, dtype: torch.dtype) -> None:
    a, mlp = layer.described.attention, layer.described.mlp
    if a.kv_heads < 1 or a.heads % a.kv_heads or a.head_dim < 1:
        raise ValueError(f"got {a.heads} query heads, {a.kv_heads} key/value heads of {a.head_dim} columns")
    if a.rotary is not None and 2 * a.rotary.inverse_frequencies.numel() != a.head_dim:
        raise ValueError(
            f"{a.rotary.inverse_frequencies.numel()} rotary frequencies for heads of {a.head_dim} columns, expected "
            f"one for each pair of columns"
        )
    _check_dense(layer.qkv, (a.heads + 2 * a.kv_heads) * a.head_dim, width, dtype, "q, k and v")
    _check_dense(layer.out, width, a.heads * a.head_dim, dtype, "the attention's output")
    _check_dense(layer.up, layer.down.k * (2 if mlp.gated else 1), width, dtype, "the MLP's input")
    _check_dense(layer.down, width, layer.down.k, dtype, "the MLP's output")
    _check_norm(layer.described.attention_norm, width, dtype)
    _check_norm(layer.described.mlp_norm, width, dtype)


def _check_dense(dense: Dense, n: int, k: int, dtype: torch.dtype, what: str) -> None:
    if (dense.n, dense.k) != (n, k):
        raise ValueError(f"the weight of {what} is [{dense.n}, {dense.k}], expected [{n}, {k}] from the other weights")
    if dense.bias is not None:
        address(dense.bias, dtype=dtype, shape=(n,), what=f"the bias of {what}")


def _check_norm(norm: spec.Norm | None, width: int, dtype: torch.dtype) -> None:
    for tensor in () if norm is None else (norm.weight, norm.bias):
        if tensor is not None:
            address(tensor, dtype=dtype, shape=(width,), what="the weight or bias of a norm")


def job_of(
    program: RankProgram, inputs: Inputs, cache: RankCache | None, slots: Tensor | None, rows: Tensor | None
) -> Job:
    """One call, checked."""
    _check_inputs(program, inputs)
    tokens, count = inputs.tokens, inputs.cu_seqlens.numel() - 1
    if rows is not None:
        index_at(rows, count=rows.numel(), below=tokens, what="the rows asked for")
    if cache is None:
        return Job(inputs, None, torch.arange(count), torch.zeros(count, dtype=torch.int64), rows)
    if any(layer.attention.right != 0 for layer in program.transformer.layers):
        raise ValueError("a cache needs causal attention; this model looks ahead: run it without a cache")
    _check_cache(program, cache)
    slots = torch.arange(count) if slots is None else slots
    if slots.shape != (count,) or len(set(slots.tolist())) != count:
        raise ValueError(f"slots are {slots.tolist()}, expected {count} different ones, one for each sequence")
    index_at(slots, count=count, below=cache.slots, what="slots of the cache")
    job = Job(inputs, cache, slots, cache.lengths[slots], rows)
    index_at(job.past, count=count, below=cache.capacity + 1, what="lengths of the cache")
    if count:
        cache.reserve(int((job.past + job.lengths).max()))
    return job


def _check_inputs(program: RankProgram, inputs: Inputs) -> None:
    model, tokens = program.transformer, inputs.tokens
    offsets_at(inputs.cu_seqlens, total=tokens)
    check_vectors(inputs, model.width, program.dtype)
    tables = () if model.embedding is None else model.embedding.tables
    if inputs.vectors is None and not tables:
        raise ValueError("the model has no embedding: give it vectors [tokens, width]")
    if len(inputs.indices) != len(tables):
        raise ValueError(f"got indices for {len(inputs.indices)} tables, expected {len(tables)}")
    if model.embedding is not None:
        bounds = [program.model.words.total, *(t.shape[0] for t in tables[1:])]
        skipped = 0 if inputs.vectors is None else 1
        names = model.embedding.names
        for i in range(skipped, len(tables)):
            index_at(inputs.indices[i], count=tokens, below=bounds[i], what=names[i])
    if any(layer.attention.rotary is not None for layer in model.layers):
        if inputs.positions is None:
            raise ValueError("a model with rotary embeddings needs the position of each token")
        index_at(inputs.positions, count=tokens, below=inputs.farthest + 1, what="positions")


def check_vectors(inputs: Inputs, width: int, dtype: torch.dtype) -> None:
    """Raises unless vectors that stand for words have the model's type and width."""
    if inputs.vectors is None:
        return
    if inputs.vectors.dtype != dtype:
        raise ValueError(
            f"inputs_embeds are {inputs.vectors.dtype}, the model computes in {dtype}; convert them with .to({dtype})"
        )
    rows_at(inputs.vectors, dtype=dtype, shape=(inputs.tokens, width), what="inputs_embeds")


def _check_cache(program: RankProgram, cache: RankCache) -> None:
    a = program.transformer.layers[0].attention
    held = (len(cache.keys), cache.kv_heads, cache.head_dim, cache.dtype)
    needed = (len(program.layers), a.kv_heads, a.head_dim, program.dtype)
    if held != needed:
        raise ValueError(
            f"the cache holds {held[0]} layers of {held[1]} key/value heads with {held[2]} columns of {held[3]}, "
            f"this rank computes {needed[0]} of {needed[1]} with {needed[2]} of {needed[3]}; make a new cache after "
            f"the model has changed"
        )
