"""What loading and saving share: errors that all ranks raise together, a model's tensors, memory for its shards.

A model that was made on the meta device gets memory for its shards only, and values for buffers that no file has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from weft._torch import own_buffers, own_parameters, unsaved_buffers
from weft.comm.tell import tell_all
from weft.errors import WeftError
from weft.reshard.tensors import to_dtensor


@contextmanager
def together(what: str, *, group: ProcessGroup | None, timeout: float) -> Iterator[None]:
    """A part of a collective: what fails in it on one rank is raised on all at its end, and nobody waits for more."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    mine = [] if problem is None else [f"{type(problem).__name__}: {problem}"]
    found = join_problems(tell_all(what, mine, group=group, timeout=timeout))
    if problem is not None:
        raise problem
    if found:
        raise WeftError(f"{what} failed:\n  " + "\n  ".join(found))


def join_problems(problems: list[list[str]]) -> list[str]:
    """The problems of all ranks, each once, with the ranks that have it where it is not all of them.

    >>> join_problems([["no file", "a is missing"], ["a is missing"]])
    ['no file (rank 0)', 'a is missing']
    """
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(problems):
        for problem in dict.fromkeys(own):
            holders.setdefault(problem, []).append(rank)
    return [
        problem if len(ranks) == len(problems) else f"{problem} (rank {', '.join(map(str, ranks))})"
        for problem, ranks in holders.items()
    ]


def rank_of(group: ProcessGroup | None) -> int:
    """This rank in the group; 0 without one.

    >>> rank_of(None)
    0
    """
    if group is None:
        return dist.get_rank() if dist.is_initialized() else 0
    return int(group.rank())


@dataclass(eq=False)
class Slot:
    """One tensor of a model and all places that hold it; tied weights have several.

    names:  as in `state_dict`, the first one first
    places: (module, attribute)
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        """What this rank holds of it."""
        return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor.detach()


def slots(model: nn.Module) -> list[Slot]:
    """The parameters and persistent buffers of a model: what its `state_dict` has, each tensor once.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> [slot.names for slot in slots(model)]
    [['0.weight', '1.weight'], ['0.bias']]
    """
    found: dict[int, Slot] = {}
    for name, module, attribute, tensor in _tensors(model):
        if attribute not in unsaved_buffers(module):
            slot = found.setdefault(id(tensor), Slot(tensor))
            slot.names.append(name)
            slot.places.append((module, attribute))
    return list(found.values())


def materialise(model: nn.Module, *, device: torch.device | str = "cpu") -> None:
    """Gives memory to what is on the meta device: only this rank's shard of each DTensor. In place.

    Parameters and buffers of the `state_dict` hold anything afterwards, until somebody loads them; tied weights stay
    tied. Buffers that are not in it, such as rotary frequencies, get their values: a Hugging Face model knows how.
    """
    remade: dict[nn.Module, list[str]] = {}
    for name, module, attribute, tensor in list(_tensors(model)):
        if tensor.is_meta and attribute in unsaved_buffers(module):
            remade.setdefault(module, []).append(name)
            own_buffers(module)[attribute] = torch.full_like(tensor, float("nan"), device=device) if (
                tensor.is_floating_point()
            ) else torch.zeros_like(tensor, device=device)  # fmt: skip
    _initialise(model, remade)
    for slot in slots(model):
        if slot.tensor.is_meta:
            made = _with_memory(slot.tensor, torch.device(device))
            for module, attribute in slot.places:
                held = own_parameters(module) if attribute in own_parameters(module) else own_buffers(module)
                held[attribute] = made  # type: ignore[assignment]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor.to_local(), device=device)
        made: Tensor = to_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape)
    else:
        made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _initialise(model: nn.Module, remade: dict[nn.Module, list[str]]) -> None:
    """Values for buffers that were on the meta device, by the model's own code."""
    initialise: Any = getattr(model, "_init_weights", None)  # of every Hugging Face model; for one module
    with torch.no_grad():
        for module in remade if initialise is not None else ():
            initialise(module)  # what it does to parameters is lost: they are loaded after this
    unknown = [
        name
        for module, names in remade.items()
        for name in names
        if initialise is None or _is_untouched(own_buffers(module)[name.rpartition(".")[2]])
    ]
    if unknown:
        raise ValueError(
            f"the buffers {', '.join(unknown)} are on the meta device and in no file, and the model does not say what "
            "their values are; set them before, for instance by making their modules on the CPU"
        )


def _is_untouched(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_floating_point() and bool(torch.isnan(buffer).any())


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, attribute, tensor) of all parameters, then all buffers; tied ones at each of their places."""
    for own in (own_parameters, own_buffers):
        for prefix, module in model.named_modules(remove_duplicate=False):
            for attribute, tensor in own(module).items():
                if tensor is not None:
                    yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, tensor
