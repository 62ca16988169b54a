"""`weft.load_sharded`: each rank reads its own slices of safetensors files, and nothing else.

`WeightFiles` knows from the headers what lies in the files, and reads boxes of it block by block. A path is one file,
an index (`*.safetensors.index.json`), or a folder with `model.safetensors.index.json`, `model.safetensors` or a single
`*.safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from weft.comm.deadline import FILES
from weft.comm.tell import tell_all
from weft.layout.layout import Box
from weft.parallel.files.shards import Slot, join_problems, materialise, slots, together
from weft.reshard.tensors import layout_of_dtensor, mark_written

INDEX_NAME, FILE_NAME = "model.safetensors.index.json", "model.safetensors"
BLOCK_BYTES = 32 << 20
"""What is mapped at once: files are closed after as much, so that pages which were read do not stay resident."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


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
    mark_written([slot.tensor])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `dtype` as the file spells it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a checkpoint by name, and what is wrong with its files, one line each."""

    path: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def scan(cls, path: str | Path) -> WeightFiles:
        """Reads the index and the headers, no tensors. What cannot be read is a problem, not an error."""
        found = cls(Path(path))
        try:
            chosen = _choose(found.path)
            if chosen.name.endswith(".json"):
                found._add_index(chosen)
            else:
                found.tensors.update(_header(chosen))
        except _Unreadable as error:
            found.problems.append(str(error))
        return found

    def _add_index(self, index: Path) -> None:
        by_file: dict[str, list[str]] = {}
        for name, file in _weight_map(index).items():
            by_file.setdefault(file, []).append(name)
        for file, names in sorted(by_file.items()):
            if not _stays_inside(file):
                self.problems.append(f"{index.name} names the file {file!r}, which is outside of its folder")
                continue
            try:
                held = _header(index.parent / file)
            except _Unreadable as error:
                self.problems.append(str(error))
                continue
            self.problems.extend(
                f"{index.name} says that {name} is in {file}, which has no such tensor"
                for name in names
                if name not in held
            )
            self.tensors.update({name: held[name] for name in names if name in held})

    def digest(self) -> str:
        """A text that is the same for the same names, shapes and types."""
        rows = sorted((name, stored.shape, stored.dtype) for name, stored in self.tensors.items())
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    def blocks(self, name: str, box: Box) -> Iterator[tuple[slice, Tensor]]:
        """The box of a tensor in runs of its first dim: (where in the box, the block), as the file has it.

        A block is a view of the mapped file: copy it before the next one is asked for, and keep none of it.
        """
        stored = self.tensors[name]
        if not box:
            with _opened(stored.file) as file:
                yield slice(None), file.get_tensor(name).reshape(1)
            return
        (first, end), others = box[0], tuple(slice(a, b) for a, b in box[1:])
        # Whole rows count, as reading some columns maps the pages of all.
        row_bytes = math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize
        rows = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(first, end, rows):
            stop = min(end, start + rows)
            with _opened(stored.file) as file:
                yield slice(start - first, stop - first), file.get_slice(name)[(slice(start, stop), *others)]

    def copy_into(self, out: Tensor, name: str, box: Box) -> None:
        """Copies a box of a tensor into `out`, which has its shape, and its own dtype and device."""
        target = out if box else out.reshape(1)
        for where, block in self.blocks(name, box):
            target[where].copy_(block)


class _Unreadable(Exception):
    """What is wrong with a file, in a sentence."""


def _choose(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise _Unreadable(f"{path} is neither a file nor a folder")
    for name in (INDEX_NAME, FILE_NAME):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise _Unreadable(f"{path} has neither {INDEX_NAME} nor {FILE_NAME}, and {len(found)} other *.safetensors")
    return found[0]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        read = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _Unreadable(f"{index.name} cannot be read: {error}") from error
    mapping = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(mapping, dict) or not all(isinstance(file, str) for file in mapping.values()):
        raise _Unreadable(f"{index.name} has no weight_map of names to files")
    return mapping


def _stays_inside(file: str) -> bool:
    """Whether the name is of a file below the index. Links are followed: caches of models are made of them.

    >>> [_stays_inside(name) for name in ("a.safetensors", "../a", "/etc/a", "b/../../a", "b/a")]
    [True, False, False, False, True]
    """
    parts = PurePosixPath(file).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in file and "\\" not in file


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
            return {name: StoredTensor(file, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _Unreadable(f"{file.name} cannot be read: {error or type(error).__name__}") from error


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with safe_open(file, framework="pt", device="cpu") as opened:
        yield opened
