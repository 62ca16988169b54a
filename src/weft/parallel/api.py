"""`parallelize(model, mesh)`: which models the ranks of a mesh axis can share, and by what; one rank needs no mesh."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatch
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from weft.comm.deadline import timeout_of
from weft.errors import Unsupported
from weft.models.families import FAMILIES, family_of
from weft.models.family import Family, called_in
from weft.models.modules import check_hooks
from weft.models.spec import ModelSpec
from weft.models.twin import become, check_forward
from weft.overlap.executor.context import context_of
from weft.packed.api import pack
from weft.packed.engine import AttentionDropout
from weft.packed.registry import register_attention
from weft.parallel.cut import cuts
from weft.parallel.engine import Ranks
from weft.parallel.huggingface import ParallelBase, ParallelHead, ParallelVocabulary
from weft.parallel.surface import distribute

_FAMILIES = tuple(family for family in FAMILIES if family.on_ranks)

ModelT = TypeVar("ModelT", bound=nn.Module)


def supported() -> list[str]:
    """The names of the classes that `parallelize` takes without a plan."""
    return [name for family in _FAMILIES for name in family.classes]


def parallelize(
    model: ModelT, mesh: DeviceMesh | None = None, *, plan: dict[str, ParallelStyle] | None = None, overlap: str = "on"
) -> ModelT:
    """Shares a model among the ranks of a mesh with one axis, in place: same call, parameters become DTensors.

    Takes 17 families of Hugging Face's models (docs/models.md), with the usual heads. All ranks pass the same inputs,
    padded ids and mask or a `PackedBatch`, and get the same outputs; padding is never computed. With labels, `logits`
    are a DTensor that is sharded over the vocabulary. A model on the meta device stays there, in shards. As many ranks
    can share a model as it has query heads; key/value heads are repeated where they are fewer.

    Without a mesh there is one rank, and no process group is needed: the result is the packed twin that `weft.pack`
    returns, with the same call and plain parameters, which it shares with the model.

    `plan`, from names of modules (patterns are allowed) to styles such as `ColwiseOverlap`, is for any other module,
    as in torch's `parallelize_module`. `overlap="off"` computes first and communicates then, to see what overlap
    brings; results have the same bits.

    Collective over the mesh. Rank 0's weights count.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    >>> alone = parallelize(BertModel(BertConfig(vocab_size=99, **size)).eval())
    >>> alone(torch.tensor([[5, 6, 7]])).last_hidden_state.shape
    torch.Size([1, 3, 16])

    On the ranks of a mesh:

        mesh = init_device_mesh("cpu", (4,))
        model = weft.parallelize(LlamaForCausalLM(config), mesh)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    """
    if mesh is not None:
        _check_mesh(mesh)
    if overlap not in ("on", "off"):
        raise ValueError(f"overlap is {overlap!r}, expected 'on' or 'off'")
    if plan is not None:
        if mesh is None:
            raise ValueError("a plan of styles was given without a mesh, expected one: styles are for several ranks")
        return _by_plan(model, mesh, plan, overlap)
    family, name = family_of(model, _FAMILIES), type(model).__name__
    if family is None:
        raise Unsupported(
            f"cannot parallelize a {type(model).__module__}.{name} without a plan; supported are "
            f"{', '.join(supported())}; for other modules give plan={{name: ColwiseOverlap(), ...}}"
        )
    if mesh is None:
        return pack(model)
    register_attention()
    _share(model, family, mesh, overlap)
    return model


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}, expected a DeviceMesh, such as init_device_mesh gives, or none at all "
            "for one rank"
        )
    if mesh.ndim != 1:
        axes = "" if mesh.mesh_dim_names is None else f", as in mesh[{mesh.mesh_dim_names[-1]!r}]"
        raise ValueError(f"parallelize needs a mesh of one axis, got {mesh.ndim}; take one of them{axes}")


def _share(model: nn.Module, family: Family, mesh: DeviceMesh, overlap: str) -> None:
    head = family.heads.get(type(model).__name__)
    inner = None if head is None else family.base_of(model)
    base = model if inner is None else model.get_submodule(inner)
    # Everything that can be wrong with the model is found here, before anything is changed or sent.
    vocabulary = None if head is None else head.vocabulary
    spec = ModelSpec(family.read(base), None if vocabulary is None else vocabulary(model))
    found = cuts(spec, mesh.size())
    for each in (model, base):
        check_forward(each)
    called = {model, *called_in(base)}
    if vocabulary is None:
        called |= set(model.modules()) - set(base.modules())  # a small head runs by its own code
    else:
        called -= {base}  # only its layers are computed
    check_hooks(model, called=called)
    distribute(model, mesh, found)
    ranks = Ranks(mesh, _group(mesh, overlap))
    # Nobody fills a cache of another model's form.
    shared = (replace(family, has_cache=False), AttentionDropout.MODEL)
    become(base, ParallelBase, {"_weft": shared, "_weft_ranks": ranks, "weft_splits": family.has_cache})
    attributes = {"_weft_ranks": ranks, "_weft_base": inner}
    if head is not None and vocabulary is None:
        become(model, ParallelHead, {**attributes, "_weft_head": head.kind})
    elif head is not None:
        become(model, ParallelVocabulary, {
            **attributes, "_weft_head": head.kind, "_weft_vocabulary": vocabulary, "_weft_loss": head.loss,
        })  # fmt: skip


def _group(mesh: DeviceMesh, overlap: str) -> ProcessGroup:
    """The group that calls run on: with overlap the mesh's own; without, one whose every plan is sequential."""
    group = mesh.get_group()
    if overlap == "on" or group.size() == 1:
        return group
    ranks = dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=timeout_of(group))
    apart: ProcessGroup | None = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert apart is not None
    context_of(apart).planner.overlaps = False
    return apart


def _by_plan(model: ModelT, mesh: DeviceMesh, plan: dict[str, ParallelStyle], overlap: str) -> ModelT:
    if overlap == "off":
        raise ValueError("overlap='off' is for models without a plan; in a plan take torch's ColwiseParallel styles")
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ValueError(
                f"plan[{pattern!r}] is a {type(style).__name__}, expected a style such as ColwiseOverlap()"
            )
        if not any(fnmatch(name, pattern) for name in names):
            close = ", ".join(sorted(n for n in names if n.rsplit(".", 1)[-1] == pattern.rsplit(".", 1)[-1])[:3])
            raise ValueError(
                f"plan[{pattern!r}] names no module of {type(model).__name__}"
                + (f"; did you mean {close}?" if close else "; the names are those of named_modules()")
            )
    parallelize_module(model, mesh, plan)
    return model
