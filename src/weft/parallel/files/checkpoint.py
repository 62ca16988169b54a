"""Checkpoints that are whole or not there, and that any number of ranks can read.

    DIR/step-00000020/        torch.distributed.checkpoint's files, and weft.json with the step and what the caller gave
    DIR/latest                the name of the newest one
    DIR/.step-00000030.*      one that is being written; the next save removes it if its writer died

A checkpoint is written under another name, forced to the disk, and then renamed, which the file system does at once or
not at all; `latest` is replaced the same way, after that. So a kill at any instant leaves the last one whole.
Parameters and the optimiser's moments are saved by name as torch saves DTensors: each shard once, by a rank that has
it. Loading reads the boxes that a rank needs now, whoever wrote them.

torch's own `get_state_dict` and `set_state_dict` are not used: they take a step of an optimiser without state to learn
what it keeps, and leave that step behind, in the optimiser and in the file. Here the file says what there is.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate

from weft.comm.deadline import FILES
from weft.comm.tell import tell_all
from weft.errors import WeftError
from weft.parallel.files.checkpoint_folder import ABOUT, CheckpointFolder, Draft, about_text
from weft.parallel.files.shards import join_problems, materialise, rank_of, slots, together

_STATE, _OPTIONS = "optimizer.state.", "optimizer.param_groups."  # as torch names them when they are flat


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded, besides the model and the optimiser: after how many steps, and what the caller had given."""

    step: int
    extra: dict[str, Any]
    path: Path


def save_checkpoint(
    directory: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    group: ProcessGroup | None = None,
    timeout: float = FILES.seconds,
) -> Path:
    """Saves after `step` steps, and removes all but the `keep` newest. Collective; returns where it is.

    directory: on a file system that all ranks share
    model:     on each rank its own: a parallel model, or its stage of a pipeline, with the names of the whole model
    extra:     what JSON gives back as it was, such as where the data are; rank 0's counts

    A rank that fails fails all; a checkpoint of the same step is then left as it was. Model and optimiser are read
    only: an optimiser that has not stepped is saved without state, and loads as one that has not.

    >>> import os, tempfile
    >>> model = nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1, 2, 3):
    ...         _ = save_checkpoint(folder, step, model, keep=2)
    ...     sorted(os.listdir(folder)), load_checkpoint(folder, model).step
    (['latest', 'step-00000002', 'step-00000003'], 3)
    """
    step, keep = _number("step", step, lowest=0), _number("keep", keep, lowest=1)
    folder, first = CheckpointFolder(Path(directory)), rank_of(group) == 0
    final: Path | None = None
    draft: Draft | None = None
    about, state = "", dict[str, Any]()
    mine = [step, None if optimizer is None else type(optimizer).__name__]
    said = tell_all("save_checkpoint", mine, group=group, timeout=timeout)
    steps, kinds = {row[0] for row in said}, sorted({row[1] for row in said} - {None})
    if len(steps) > 1:
        raise ValueError(f"ranks save different steps: {sorted(steps)}; give the same step on all ranks")
    try:
        with together("save_checkpoint", group=group, timeout=timeout):
            about, state = about_text(step, extra, kinds), _state(model, optimizer)  # raise before anything is written
            draft = folder.begin(step) if first else None
        name = tell_all("save_checkpoint", draft and draft.path.name, group=group, timeout=timeout)[0]
        part = folder.part(name)
        with together("save_checkpoint", group=group, timeout=timeout):
            if not part.is_dir():
                raise ValueError(f"{folder.root} is not what rank 0 sees there, expected a file system that all share")
        with together("save_checkpoint", group=group, timeout=timeout):
            # One file and one thread a rank; each file is forced to the disk.
            writer = FileSystemWriter(part, single_file_per_rank=True, sync_files=True, thread_count=1)
            with _as_error("saved"):
                save(state, storage_writer=writer, process_group=group, no_dist=_alone(group))
        with together("save_checkpoint", group=group, timeout=timeout):
            if first:
                final = folder.publish(part, step, about, keep=keep)
    finally:
        if draft is not None:
            draft.end(published=final is not None)
    return folder.root / str(tell_all("save_checkpoint", final and final.name, group=group, timeout=timeout)[0])


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | None = None,
    timeout: float = FILES.seconds,
) -> Checkpoint:
    """Loads the newest checkpoint, or that of `step`, in place. Collective.

    The meshes may be others than those that saved it, and stages may be cut elsewhere: each rank reads its boxes.
    A model on the meta device gets its memory on `device` first; make its optimiser after that. The optimiser gets the
    state and the options (learning rate and so on) of each of its parameters, in whatever groups they are.

    Tensors that are missing, extra or misshapen, and an optimiser of another kind or of other parameters, are one
    `ValueError` with all that is wrong, on every rank, before anything is loaded: model and optimiser stay as they
    were. torch stores an optimiser's numbers as pickles: load only checkpoints that you trust.
    """
    path, meta, about, problems = _look(CheckpointFolder(Path(directory)), step)
    used, misfits = _compare(model, meta) if path else ([], [])
    moments = None if path is None or optimizer is None else _Moments(model, optimizer, meta, about["optimizers"])
    problems += misfits + (moments.problems if moments else [])
    mine = [problems, used, None if path is None else path.name, moments is not None]
    said = tell_all("load_checkpoint", mine, group=group, timeout=timeout)
    found = join_problems([row[0] for row in said])
    names = {row[2] for row in said}
    if len(names) > 1:
        found.append(f"ranks see different checkpoints: {[row[2] for row in said]}; the directory must be shared")
    elif path is not None:
        extra = sorted(_models(meta).keys() - {name for row in said for name in row[1]})
        found += [f"{name} is extra: the model has no such tensor" for name in extra]
    _raise_if(directory, found)
    assert path is not None
    reader = FileSystemReader(path)

    def read(state: dict[str, Any]) -> None:
        with _as_error("loaded"):
            load(state, storage_reader=reader, process_group=group, no_dist=_alone(group))

    if any(row[3] for row in said):  # before anything that is loaded in place: options may not fit, either
        options = moments.room_for_options() if moments else {}
        read(options)
        misfits = moments.take_options(options) if moments else []
        _raise_if(directory, join_problems(tell_all("load_checkpoint", misfits, group=group, timeout=timeout)))
    if any(slot.tensor.is_meta for slot in slots(model)):
        materialise(model, device=device)
    weights, state = model.state_dict(), moments.room_for_state() if moments else {}
    read({"model": weights, **state})
    model.load_state_dict(weights)
    if moments:
        moments.give(state)
    return Checkpoint(about["step"], about["extra"], path)


def has_checkpoint(directory: str | Path) -> bool:
    """Whether there is a whole one; for `--resume` of a run that may not have come to its first.

    >>> has_checkpoint("/nonexistent")
    False
    """
    return bool(CheckpointFolder(Path(directory)).whole())


@contextmanager
def _as_error(done: str) -> Iterator[None]:
    """torch's own exception here is none of `Exception`, so that `except Exception` would not see it."""
    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
        raise WeftError(f"the checkpoint was not {done}: {failures}") from error


def _raise_if(directory: str | Path, found: list[str]) -> None:
    if found:
        raise ValueError(f"the checkpoint in {directory} does not fit; nothing was loaded:\n  " + "\n  ".join(found))


def _number(name: str, value: Any, *, lowest: int) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = lowest - 1
    if found < lowest or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected a whole number, {lowest} or more")
    return found


def _alone(group: ProcessGroup | None) -> bool:
    return group is None and not torch.distributed.is_initialized()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What is saved: weights by name, and what an optimiser has of each parameter, if it has anything."""
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is None:
        return state
    names = [names[0] for names in _names_of(model, optimizer)]
    held = optimizer.state_dict()  # by number of the parameter
    if odd := [key for key in held["state"] if key not in range(len(names))]:
        raise ValueError(
            f"the optimizer has state under {odd[0]!r:.60}, expected state of parameters only; save that yourself"
        )
    found = {f"{_STATE}{names[i]}.{key}": value for i, own in held["state"].items() for key, value in own.items()}
    for group in held["param_groups"]:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found |= {f"{_OPTIONS}{names[i]}.{key}": value for i in group["params"] for key, value in options.items()}
    for key, value in found.items():  # torch would take these apart, and give back what is no dict or list any more
        if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, _DEEP) for v in value)):
            raise ValueError(
                f"the optimizer's {key.removeprefix('optimizer.')} is a {type(value).__name__}, expected tensors, "
                "numbers and the like; save the optimizer yourself, and give none here"
            )
    return state | found


_DEEP = (Tensor, Mapping, list)


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names in the model of each parameter that an optimiser has, in its order; tied ones have several."""
    names = {id(slot.tensor): slot.names for slot in slots(model)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if strange := [p for p in parameters if id(p) not in names]:
        raise ValueError(
            f"the optimizer has {len(strange)} parameters that are not in the model, the first of shape "
            f"{list(strange[0].shape)}; expected parameters of this model; make the optimizer from model.parameters()"
        )
    return [names[id(p)] for p in parameters]


class _Moments:
    """What a checkpoint has for an optimiser, which is changed by `give` alone.

    problems: what does not fit
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any], kinds: list[str] | None
    ) -> None:  # fmt: skip
        self._optimizer, self._meta = optimizer, meta
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._names: list[str] = []
        self._groups: list[dict[str, Any]] = []
        self._keys: dict[str, list[str]] = {}  # by the beginning that those of a parameter share
        for key in meta:
            if key.startswith((_STATE, _OPTIONS)):
                self._keys.setdefault(key.rpartition(".")[0], []).append(key)
        self.problems = self._compare(model, kinds)

    def _compare(self, model: nn.Module, kinds: list[str] | None) -> list[str]:
        kind = type(self._optimizer).__name__
        if not self._keys:
            return [
                "it has no optimizer state: it was saved without an optimizer; load it without one, and make a new "
                f"{kind} after that"
            ]
        if kinds is not None and kind not in kinds:
            return [
                f"it was saved with the optimizer {' and '.join(kinds)}, and is loaded into {kind}; make one of the "
                "same kind, or load it without an optimizer and make a new one after that"
            ]
        try:
            names = _names_of(model, self._optimizer)
        except ValueError as error:
            return [str(error)]
        problems = []
        if any(p.is_meta for p in self._parameters):
            problems.append(
                "the optimizer's parameters are on the meta device, and loading puts others in their place; load the "
                "model without it first, make the optimizer, and load both"
            )
        for own in names:
            stored = [name for name in own if _OPTIONS + name in self._keys]
            self._names.append((stored or own)[0])
            if not stored:
                problems.append(f"{own[0]} is a parameter of the optimizer, and was none of the one that was saved")
        return problems

    def room_for_options(self) -> dict[str, Any]:
        """What to read first."""
        keys = [key for name in self._names for key in self._keys[_OPTIONS + name]]
        return {key: self._room(key, torch.empty(()), None) for key in keys}

    def take_options(self, read: Mapping[str, Any]) -> list[str]:
        """Sorts what was read into the optimiser's groups; parameters of a group that do not agree are a problem."""
        problems, names = list[str](), iter(self._names)
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            first = ""
            for name in itertools.islice(names, len(group["params"])):
                stored = {key.rpartition(".")[2]: read[key] for key in self._keys[_OPTIONS + name]}
                if not first:
                    first, options = name, options | stored
                problems += [
                    f"{first} and {name} are in one group of the optimizer, and were saved with {option} "
                    f"{options.get(option)} and {value}; make the groups that it had"
                    for option, value in stored.items()
                    if not _is_same(options.get(option), value)
                ]
            self._groups.append(options)
        return problems

    def room_for_state(self) -> dict[str, Any]:
        """What to read with the model. A parameter that had no state then, for want of a step, has none here."""
        room = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            held = self._optimizer.state.get(parameter, {})
            for key in self._keys.get(_STATE + name, ()):
                room[key] = self._room(key, parameter, held.get(key.rpartition(".")[2]))
        return room

    def _room(self, key: str, parameter: Tensor, held: Any) -> Any:
        """Memory for a value, as the optimiser would have it: most are as the parameter is, each rank has its shard."""
        stored = self._meta[key]
        if not isinstance(stored, TensorStorageMetadata):
            return None  # an object comes from the file as it is
        dtype = stored.properties.dtype
        is_count = key.endswith(".step")  # that of a parameter without dimensions has its shape, and is no DTensor
        for like in (held, parameter):
            if isinstance(like, Tensor) and like.shape == stored.size and not is_count:
                return torch.empty_like(like.detach(), dtype=dtype)
        made = torch.empty(stored.size, dtype=dtype, device=parameter.device if stored.size else "cpu")
        if isinstance(parameter, DTensor) and stored.size:  # such as Adafactor's sums over rows
            mesh = parameter.device_mesh
            return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return made

    def give(self, read: Mapping[str, Any]) -> None:
        """Loads what was read."""
        state: dict[int, dict[str, Any]] = {}
        for i, name in enumerate(self._names):
            for key in self._keys.get(_STATE + name, ()):
                state.setdefault(i, {})[key.rpartition(".")[2]] = read[key]
        numbers = itertools.count()
        groups = [
            {**options, "params": list(itertools.islice(numbers, len(group["params"])))}
            for options, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _look(folder: CheckpointFolder, step: int | None) -> tuple[Path | None, dict[str, Any], dict[str, Any], list[str]]:
    """(where it is, torch's metadata by name, weft's own, problems); None where it cannot be read."""
    try:
        path = folder.find(step)
        meta = dict(FileSystemReader(path).read_metadata().state_dict_metadata)
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        known = {"step": int(about["step"]), "extra": dict(about["extra"]), "optimizers": about.get("optimizers")}
        return path, meta, known, []
    except FileNotFoundError as error:
        return None, {}, {}, [str(error)]
    except Exception as error:  # whatever unpickling a damaged file raises
        return None, {}, {}, [f"its metadata cannot be read: {type(error).__name__}: {error}"]


def _models(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The model's tensors in a checkpoint, by their names in the model."""
    return {key.removeprefix("model."): value for key, value in meta.items() if key.startswith("model.")}


def _compare(model: nn.Module, meta: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names that this rank's model has, and what does not fit."""
    stored, used, problems = _models(meta), [], []
    for slot in slots(model):
        for name in slot.names:
            used.append(name)
            held = stored.get(name)
            if held is None:
                problems.append(f"{name} is missing")
            elif isinstance(held, TensorStorageMetadata) and held.size != slot.tensor.shape:
                problems.append(f"{name} has shape {list(held.size)}, expected {list(slot.tensor.shape)}")
    return used, problems
