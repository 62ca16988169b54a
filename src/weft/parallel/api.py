"""`parallelize(model, mesh)`: which models the ranks of a mesh axis can share, and by what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from weft._torch import without_compile
from weft.comm.deadline import timeout_of
from weft.overlap.executor.context import context_of
from weft.packed.engine import AttentionDropout
from weft.packed.models import FAMILIES
from weft.packed.models.base import Family
from weft.packed.models.common import Unsupported
from weft.packed.models.hf import bind
from weft.parallel.describe import VOCABULARY_HEADS, Described, cuts
from weft.parallel.distribute import distribute
from weft.parallel.engine import Ranks
from weft.parallel.hf import ParallelBase, ParallelHead, ParallelVocabulary
from weft.parallel.structure import Structure
from weft.parallel.surface import check_caller

_BASES = ("LlamaModel", "GPT2Model", "BertModel")
_FAMILIES = tuple(family for family in FAMILIES if family.base in _BASES)

ModelT = TypeVar("ModelT", bound=nn.Module)


def supported() -> list[str]:
    """The names of the classes that `parallelize` takes without a plan."""
    return [name for family in _FAMILIES for name in (family.base, *family.heads)]


def parallelize(
    model: ModelT, mesh: DeviceMesh, *, plan: dict[str, ParallelStyle] | None = None, overlap: str = "on"
) -> ModelT:
    """Shares a model among the ranks of a mesh with one axis, in place: same call, parameters become DTensors.

    Takes Hugging Face's Llama, GPT-2 and BERT, with the usual heads. All ranks pass the same inputs, padded ids and
    mask or a `PackedBatch`, and get the same outputs; padding is never computed. With labels, `logits` are a DTensor
    that is sharded over the vocabulary. A model on the meta device stays there, in shards.

    `plan`, from names of modules (patterns are allowed) to styles such as `ColwiseOverlap`, is for any other module,
    as in torch's `parallelize_module`. `overlap="off"` computes first and communicates then, to see what overlap
    brings; results have the same bits.

    Collective over the mesh. Rank 0's weights count.

        mesh = init_device_mesh("cpu", (4,))
        model = weft.parallelize(LlamaForCausalLM(config), mesh)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, expected a DeviceMesh, such as init_device_mesh gives")
    if mesh.ndim != 1:
        axes = "" if mesh.mesh_dim_names is None else f", as in mesh[{mesh.mesh_dim_names[-1]!r}]"
        raise ValueError(f"parallelize needs a mesh of one axis, got {mesh.ndim}; take one of them{axes}")
    if overlap not in ("on", "off"):
        raise ValueError(f"overlap is {overlap!r}, expected 'on' or 'off'")
    if plan is not None:
        return _by_plan(model, mesh, plan, overlap)
    family, head = _family_of(model)
    base = model if head is None else _base_of(model, family)
    # Everything that can be wrong with the model is found here, before anything is changed or sent.
    vocabulary = VOCABULARY_HEADS.get(type(model).__name__)
    found = cuts(Described(family.describe(base), vocabulary(model) if vocabulary else None), mesh.size())
    _check_hooks(model, base, vocabulary is not None)
    distribute(model, mesh, found)
    ranks = Ranks(mesh, _group(mesh, overlap))
    # Nobody fills a cache of another model's form.
    attributes = {"_weft": (replace(family, has_cache=False), AttentionDropout.MODEL), "_weft_ranks": ranks}
    _become(base, ParallelBase, attributes)
    if head is not None:
        names = {name: child for name, child in model.named_children() if child is base}
        attributes = {"_weft_head": family.heads[head], "_weft_base": next(iter(names)), "_weft_ranks": ranks}
        _become(model, ParallelVocabulary if vocabulary else ParallelHead, attributes)
    return model


def _family_of(model: nn.Module) -> tuple[Family, str | None]:
    """The family of a model, and the name of its class where it has a head."""
    name = type(model).__name__
    if type(model).__module__.startswith("transformers.models."):
        for family in _FAMILIES:
            if name == family.base:
                return family, None
            if name in family.heads:
                return family, name
    raise Unsupported(
        f"cannot parallelize a {type(model).__module__}.{name} without a plan; supported are {', '.join(supported())}; "
        f"for other modules give plan={{name: ColwiseOverlap(), ...}}"
    )


def _base_of(model: nn.Module, family: Family) -> nn.Module:
    for child in model.children():
        if type(child).__name__ == family.base:
            return child
    raise Unsupported(f"{type(model).__name__} has no {family.base}; was it changed?")


def _check_hooks(model: nn.Module, base: nn.Module, has_vocabulary: bool) -> None:
    """Raises where a hook hangs on a module that will not be called any more."""
    pooler = getattr(base, "pooler", None)
    called = {model} if has_vocabulary else set(model.modules()) - set(base.modules()) | {base}
    Structure(model, called | (set() if pooler is None else set(pooler.modules()))).check_hooks()


def _become(model: nn.Module, mixin: type, attributes: dict[str, Any]) -> None:
    """Gives the model another `forward`; its class keeps its name, so that configs and checkpoints find it."""
    original = type(model)
    function: Callable[..., Any] = original.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_weft_ranks" not in self.__dict__:  # a plain model that was made by the class of a parallel one
            return function(self, *args, **kwargs)
        check_caller()
        return self.weft_forward(function, bind(function, args, kwargs))

    # torch.compile runs it as it is: its kernels are compiled, and ranks must meet in the same order.
    whole = without_compile(forward, "a model that weft.parallelize has shared runs on kernels of its own")
    body = {"forward": functools.wraps(function)(whole), "__module__": original.__module__}
    model.__class__ = type(original.__name__, (mixin, original), body)
    model.__dict__.update(attributes)


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
