"""`weft.load_sharded`: each rank reads its own slices of safetensors files, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from weft.comm.deadline import FILES
from weft.comm.tell import tell_all
from weft.layout.layout import Box
from weft.parallel.files.shards import Slot, join_problems, materialise, slots, together
from weft.parallel.files.weight_files import DTYPES, WeightFiles
from weft.reshard.tensors import layout_of_dtensor


def load_sharded(
    model: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
    timeout: float = FILES.seconds,
) -> None:
    """Fills a model from safetensors files, in place. Collective over `group`, the default group unless told.

    model:  with DTensor parameters, as `weft.parallelize` makes them, or plain ones; on the meta device or not. On the
            meta device it gets memory for this rank's shards, on `device` (the mesh's unless told)
    path:   a file, or a folder with one file, or with several and `model.safetensors.index.json`
    timeout: seconds to wait for the other ranks

    A rank reads its own box of each tensor, block by block, cast to the parameter's dtype; so memory peaks at the
    shards and one block. Names are those of the `state_dict`, with or without the prefix of the base model, as
    Hugging Face has it; a tied weight may be there under any of its names. A stage of a pipeline loads its part.

    Whatever does not fit (missing, extra or misshapen tensors, tied ones that differ, unreadable or truncated files, an
    index that leaves its folder) is one `ValueError` with all of it, on every rank, before anything is loaded. A rank
    that fails to read after that fails all.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tensors = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}
    ...     save_file(tensors, f"{folder}/model.safetensors")
    ...     load_sharded(model, folder)
    >>> model(torch.ones(2)).tolist()
    [6.0]
    """
    files = WeightFiles.scan(path)
    found = _match(model, files)
    mine = [found.problems, found.used, files.digest(), not files.problems]
    said = tell_all("load_sharded", mine, group=group, timeout=timeout)
    problems = join_problems([row[0] for row in said])
    if all(row[3] for row in said):  # with a file missing, nobody knows what is too much
        extra = sorted(files.tensors.keys() - {name for row in said for name in row[1]} - _ignored(model, files))
        problems += [f"{name} is extra: the model has no such tensor" for name in extra]
        if len({row[2] for row in said}) > 1:
            problems.append("ranks see different files there: the names, shapes or types in them are not the same")
    if problems:
        raise ValueError(
            f"{path} does not fit the {type(model).__name__}; nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nexpected each tensor of the model's state_dict once; check path and configuration"
        )
    with together("load_sharded", group=group, timeout=timeout):
        if any(slot.tensor.is_meta for slot in slots(model)):
            materialise(model, device=_device(model) if device is None else device)
        with torch.no_grad():
            for slot, source in zip(slots(model), found.sources, strict=True):
                _fill(slot, files, source)


@dataclass(frozen=True)
class _Match:
    """For each slot its name in the files; the names that this rank uses; and what does not fit."""

    sources: list[str]
    used: list[str]
    problems: list[str]


def _match(model: nn.Module, files: WeightFiles) -> _Match:
    wanted = slots(model)
    rename = _renaming(model, wanted, files)
    sources, used, problems = [], [], list(files.problems)
    for slot in wanted:
        known = [name for name in map(rename, slot.names) if name in files.tensors]
        used += known
        sources.append(known[0] if known else "")
        if not known:
            if not files.problems:
                problems.append(f"{' or '.join(slot.names)} is missing")
            continue
        found = [problem for name in known if (problem := _misfit(slot, name, files))]
        problems += found or _contradictions(slot, known, files)
    return _Match(sources, used, problems)


def _misfit(slot: Slot, name: str, files: WeightFiles) -> str | None:
    stored, tensor = files.tensors[name], slot.tensor
    if stored.shape != tuple(tensor.shape):
        return f"{name} has shape {list(stored.shape)}, expected {list(tensor.shape)}"
    dtype = DTYPES.get(stored.dtype)
    if dtype is None or dtype.is_floating_point != tensor.dtype.is_floating_point:
        return f"{name} is {stored.dtype}, expected one that can be cast to {str(tensor.dtype).removeprefix('torch.')}"
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        return f"{name} is placed as {tensor.placements}, expected Shard or Replicate: terms of a sum cannot be loaded"
    try:
        box_of(tensor)
    except ValueError as error:
        return f"{name}: {error}; load before fully_shard"
    return None


def _contradictions(slot: Slot, names: list[str], files: WeightFiles) -> list[str]:
    """A tied tensor that is there under several names must be the same under each; this rank compares its own part."""
    box = box_of(slot.tensor)
    found: list[str] = []
    for name in names[1:]:
        if box is None:
            break
        pairs = zip(files.blocks(names[0], box), files.blocks(name, box), strict=True)
        if not all(torch.equal(a.to(slot.tensor.dtype), b.to(slot.tensor.dtype)) for (_, a), (_, b) in pairs):
            found.append(f"{names[0]} and {name} are one tied tensor in the model, but differ in the files")
    return found


def _renaming(model: nn.Module, wanted: list[Slot], files: WeightFiles) -> Any:
    """How names of the model become names of the files: as they are, or with the base model's prefix put on or off."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ways = [lambda name: name]
    if len(prefix) > 1:
        ways += [lambda name: prefix + name, lambda name: name.removeprefix(prefix)]
    return max(ways, key=lambda way: sum(any(way(name) in files.tensors for name in s.names) for s in wanted))


def _ignored(model: nn.Module, files: WeightFiles) -> set[str]:
    """Tensors that old checkpoints hold and the model says it does not need."""
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {name for name in files.tensors if any(re.search(pattern, name) for pattern in patterns)}


def _device(model: nn.Module) -> str:
    """The kind of device that the model's mesh is of."""
    meshes = (slot.tensor.device_mesh for slot in slots(model) if isinstance(slot.tensor, DTensor))
    return str(next((mesh.device_type for mesh in meshes), "cpu"))


def box_of(tensor: Tensor) -> Box | None:
    """Where this rank's part lies in the whole tensor; None for a rank outside of its mesh.

    >>> box_of(torch.zeros(2, 3))
    ((0, 2), (0, 3))
    """
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    rank = dist.get_rank()
    ranks: list[int] = tensor.device_mesh.mesh.reshape(-1).tolist()
    if rank not in ranks:
        return None
    return layout_of_dtensor(tensor, dict.fromkeys(ranks, 0)).box(tensor.shape, rank)


def _fill(slot: Slot, files: WeightFiles, source: str) -> None:
    box = box_of(slot.tensor)
    if box is None:
        return
    files.copy_into(slot.local, source, box)
    # Whoever keeps something made of the weights looks at the version of the parameter, not of the shard inside.
    torch.autograd.graph.increment_version(slot.tensor)
