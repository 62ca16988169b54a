"""Checkpoints that are whole or not there, and that any number of ranks can read.

    DIR/step-00000020/        torch.distributed.checkpoint's files, and weft.json with the step and what the caller gave
    DIR/latest                the name of the newest one
    DIR/.step-00000030.*      one that is being written; the next save removes it if its writer died

A checkpoint is written under another name, forced to the disk, and then renamed, which the file system does at once or
not at all; `latest` is replaced the same way, after that. So a kill at any instant leaves the last one whole.
Parameters and the optimiser's moments are saved by name as torch saves DTensors: each shard once, by a rank that has
it. Loading reads the boxes that a rank needs now, whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weft.comm.deadline import FILES
from weft.comm.tell import tell_all
from weft.errors import WeftError
from weft.parallel.files.checkpoint_folder import ABOUT, CheckpointFolder, Draft
from weft.parallel.files.shards import join_problems, materialise, rank_of, slots, together

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # moments by name, so that those of stages differ


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
    extra:     what JSON can say, such as where the data are; rank 0's counts

    A rank that fails fails all; a checkpoint of the same step is then left as it was.

    >>> import os, tempfile
    >>> model = nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1, 2, 3):
    ...         _ = save_checkpoint(folder, step, model, keep=2)
    ...     sorted(os.listdir(folder)), load_checkpoint(folder, model).step
    (['latest', 'step-00000002', 'step-00000003'], 3)
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step is {step} and keep {keep}, expected a step of at least 0 and to keep at least 1")
    folder, first = CheckpointFolder(Path(directory)), rank_of(group) == 0
    final: Path | None = None
    draft: Draft | None = None
    about = ""
    steps = {said for (said,) in tell_all("save_checkpoint", [step], group=group, timeout=timeout)}
    if len(steps) > 1:
        raise ValueError(f"ranks save different steps: {sorted(steps)}; give the same step on all ranks")
    try:
        with together("save_checkpoint", group=group, timeout=timeout):
            about = _about(step, extra)  # raises before anything is written
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
                save(_state(model, optimizer), storage_writer=writer, process_group=group, no_dist=_alone(group))
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
    A model on the meta device gets its memory on `device` first; make its optimiser after that.

    Tensors that are missing, extra or misshapen are one `ValueError` with all of them, on every rank, before anything
    is loaded. torch stores an optimiser's numbers as pickles: load only checkpoints that you trust.
    """
    path, meta, about, problems = _look(CheckpointFolder(Path(directory)), step)
    used, misfits = _compare(model, meta) if path else ([], [])
    mine = [problems + misfits, used, None if path is None else path.name]
    said = tell_all("load_checkpoint", mine, group=group, timeout=timeout)
    found = join_problems([row[0] for row in said])
    names = {row[2] for row in said}
    if len(names) > 1:
        found.append(f"ranks see different checkpoints: {[row[2] for row in said]}; the directory must be shared")
    elif path is not None:
        extra = sorted(_models(meta).keys() - {name for row in said for name in row[1]})
        found += [f"{name} is extra: the model has no such tensor" for name in extra]
    if found or path is None:
        raise ValueError(f"the checkpoint in {directory} does not fit; nothing was loaded:\n  " + "\n  ".join(found))
    if any(slot.tensor.is_meta for slot in slots(model)):
        materialise(model, device=device)
    state = _state(model, optimizer)
    with _as_error("loaded"):
        load(state, storage_reader=FileSystemReader(path), process_group=group, no_dist=_alone(group))
    if optimizer is None:
        model.load_state_dict(state["model"])
    else:
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=_FLAT)
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


def _about(step: int, extra: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps({"step": step, "extra": dict(extra or {})})
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra holds what JSON cannot say: {error}") from error


def _alone(group: ProcessGroup | None) -> bool:
    return group is None and not torch.distributed.is_initialized()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model": model.state_dict()}
    weights, moments = get_state_dict(model, optimizer, options=_FLAT)
    return {"model": weights, "optimizer": moments}


def _look(folder: CheckpointFolder, step: int | None) -> tuple[Path | None, dict[str, Any], dict[str, Any], list[str]]:
    """(where it is, torch's metadata by name, weft's own, problems); None where it cannot be read."""
    try:
        path = folder.find(step)
        meta = dict(FileSystemReader(path).read_metadata().state_dict_metadata)
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        return path, meta, {"step": int(about["step"]), "extra": dict(about["extra"])}, []
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
