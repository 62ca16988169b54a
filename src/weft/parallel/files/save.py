"""`weft.save_model`: a parallel model as safetensors files that `from_pretrained` and `weft.load_sharded` read.

Whole tensors are gathered on rank 0 a few at a time and written one after the other, so that no rank ever holds the
model. The names and shapes of all are known first, and with them the files' headers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from weft.comm import Group
from weft.comm.deadline import FILES
from weft.comm.tell import tell_all
from weft.layout import Layout, Mesh
from weft.parallel.files.load import DTYPES, FILE_NAME, INDEX_NAME
from weft.parallel.files.shards import Slot, join_problems, rank_of, slots
from weft.reshard import Source, reshard_state_dict

GATHER_BYTES = 256 << 20
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    max_file_bytes: int = 5 << 30,
    group: ProcessGroup | None = None,
    timeout: float = FILES.seconds,
) -> None:
    """Writes a model as Hugging Face does: whole tensors, its config, an index if there are several files. Collective.

    model: on each rank its own part: parameters that are DTensors or plain, of the whole model or of a stage of it.
           What several ranks hold is written once; tied weights under their first name
    folder: on rank 0's machine; made if it is not there, and refused if it has a model already

    Rank 0 holds at most 256 MB of whole tensors, or one of them, at a time. An error there is raised on all ranks.

    >>> import tempfile
    >>> from weft.parallel.files.load import load_sharded
    >>> model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, folder)
    ...     load_sharded(twin, folder)
    >>> (model.weight == twin.weight).all().item()
    True
    """
    rank, own = rank_of(group), {slot.names[0]: slot for slot in slots(model)}
    problems = _problems(Path(folder), own) if rank == 0 else _problems(None, own)
    rows = [[n, list(s.tensor.shape), _SPELLED.get(s.tensor.dtype), _home(s)] for n, s in own.items()]
    said = tell_all("save_model", [problems, rows], group=group, timeout=timeout)
    _refuse(folder, join_problems([row[0] for row in said]))
    entries: dict[str, Entry] = {}
    for _, others in said:
        for name, shape, dtype, home in others:
            if name not in entries or home < entries[name].home:
                entries[name] = Entry(name, tuple(shape), dtype, home)
    writer = WeightWriter(Path(folder), list(entries.values()), max_file_bytes) if rank == 0 else None
    for batch in _batches(list(entries.values())):
        mine = {e.name: own[e.name] for e in batch if e.name in own and _home(own[e.name]) == e.home}
        whole = _gather(batch, mine, group, timeout)
        if writer is not None:
            writer.write({e.name: whole[e.name] for e in batch})
    found = [] if writer is None else writer.finish(model)
    _refuse(folder, join_problems([row for (row,) in tell_all("save_model", [found], group=group, timeout=timeout)]))


def _problems(folder: Path | None, own: dict[str, Slot]) -> list[str]:
    tensors = {name: slot.tensor for name, slot in own.items()}
    found = [
        f"{name} is {t.dtype}, which safetensors has not" for name, t in tensors.items() if t.dtype not in _SPELLED
    ]
    found += [f"{name} is on the meta device: it has no values yet" for name, t in tensors.items() if t.is_meta]
    if folder is not None and folder.exists():
        if not folder.is_dir():
            found.append(f"{folder} is not a folder")
        elif any(folder.glob("*.safetensors")) or (folder / INDEX_NAME).exists():
            found.append("it has a model already; choose another folder, or empty it")
    return found


def _refuse(folder: str | Path, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"the model cannot be saved to {folder}:\n  " + "\n  ".join(problems))


def _home(slot: Slot) -> int:
    """The first of the ranks that hold a tensor together, by its number in the default group."""
    tensor = slot.tensor
    return int(tensor.device_mesh.mesh.min()) if isinstance(tensor, DTensor) else rank_of(None)


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Runs of entries of one home that are gathered together; in the order of the entries, as files are written."""
    for _, same in groupby(entries, key=lambda e: e.home):
        batch: list[Entry] = []
        for entry in same:
            if batch and sum(e.nbytes for e in batch) + entry.nbytes > GATHER_BYTES:
                yield batch
                batch = []
            batch.append(entry)
        yield batch


def _gather(batch: list[Entry], mine: dict[str, Slot], group: ProcessGroup | None, timeout: float) -> dict[str, Tensor]:
    """The whole tensors of a batch on rank 0, nothing on others."""
    if group is None and not dist.is_initialized():
        return {name: slot.tensor.detach() for name, slot in mine.items()}
    comm = Group(dist.group.WORLD if group is None else group, timeout=timeout)  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(comm.pg)
    to = Mesh.of([ranks[0]], hosts=[comm.hosts[0]])
    plain = [e for e in batch if e.name in mine and not isinstance(mine[e.name].tensor, DTensor)]
    here = Layout(Mesh.of([batch[0].home], hosts=[comm.hosts[ranks.index(batch[0].home)]]), (Replicate(),))
    known = {e.name: Source(e.shape, DTYPES[e.dtype], here) for e in plain}
    state = {name: slot.tensor.detach() for name, slot in mine.items()}
    dst = {e.name: (to, [Replicate()]) for e in batch}
    found: dict[str, Tensor] = reshard_state_dict(state, dst, src=known, group=comm, timeout=timeout)
    return found


@dataclass(frozen=True)
class Entry:
    """A whole tensor to be written; `home` is the first rank of the mesh that gives it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    home: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class WeightWriter:
    """Writes tensors, in the order of the entries, into files of about equal size. Errors are kept for the end."""

    def __init__(self, folder: Path, entries: list[Entry], max_file_bytes: int) -> None:
        self._folder = folder
        self._files = _cut(entries, max_file_bytes)
        self._places = {e.name: number for number, file in enumerate(self._files) for e in file}
        self._left = [len(file) for file in self._files]
        self._open: dict[int, BinaryIO] = {}
        self._problem: OSError | None = None

    def write(self, tensors: dict[str, Tensor]) -> None:
        """The next tensors. After an error nothing more is written, while the ranks go on to the end together."""
        for name, tensor in tensors.items():
            if self._problem is None:
                try:
                    self._write(name, tensor)
                except OSError as error:
                    self._problem = error

    def finish(self, model: nn.Module) -> list[str]:
        """Puts the files under their names; what went wrong."""
        try:
            if self._problem is None:
                self._publish(model)
        except OSError as error:
            self._problem = error
        for file in self._open.values():
            file.close()
        with suppress(OSError):
            for number in range(len(self._files)):
                self._partial(number).unlink(missing_ok=True)
        return [] if self._problem is None else [f"{type(self._problem).__name__}: {self._problem}"]

    def _write(self, name: str, tensor: Tensor) -> None:
        number = self._places[name]
        if number not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[number] = self._partial(number).open("wb")
            self._open[number].write(_header(self._files[number]))
        data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._open[number].write(memoryview(data))
        self._left[number] -= 1
        if self._left[number] == 0:
            file = self._open.pop(number)
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _publish(self, model: nn.Module) -> None:
        for name in ("config", "generation_config"):
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(self._folder)
        for number in range(len(self._files)):
            self._partial(number).replace(self._folder / self._name(number))
        if len(self._files) > 1:
            total = sum(e.nbytes for file in self._files for e in file)
            names = {name: self._name(number) for name, number in self._places.items()}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True)
            (self._folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")

    def _name(self, number: int) -> str:
        count = len(self._files)
        return FILE_NAME if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _partial(self, number: int) -> Path:
        return self._folder / f".{self._name(number)}.partial"


def _cut(entries: list[Entry], most: int) -> list[list[Entry]]:
    """The entries of each file: as many as fit, at least one."""
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.nbytes for e in files[-1]) + entry.nbytes > most:
            files.append([])
        files[-1].append(entry)
    return files


def _header(entries: list[Entry]) -> bytes:
    """The head of a safetensors file: its length as 8 bytes, then JSON, padded so that data start at a multiple of 8.

    >>> _header([Entry("a", (2,), "F32", 0)])[8:]
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for e in entries:
        described[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [start, start + e.nbytes]}
        start += e.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
