"""What a parallelized model is besides its call: its parameters are DTensors, in place and under their names, and so
are logits that ranks share; whatever else a Hugging Face model can do works with them, or names the remedy.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from weft._torch import own_parameters
from weft.errors import Unsupported
from weft.models.modules import recorder
from weft.models.twin import Twin, bind
from weft.parallel.cut import Cuts, TensorCut
from weft.parallel.engine import gathered
from weft.transformer.parts import Words


def placement(cut: TensorCut | None) -> Placement:
    """Where a parameter lies on the axis."""
    return Replicate() if cut is None else Shard(cut.dim)


def distribute(model: nn.Module, mesh: DeviceMesh, found: Cuts) -> None:
    """Rank 0's values count, as with torch's `parallelize_module`; on the meta device there are none, and none move.

    A tensor that several modules hold stays one tensor.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    ]
    for _, name, parameter in places:  # before anything is changed
        if isinstance(parameter, DTensor):
            raise Unsupported(f"{name} is a DTensor already; parallelize a model once, before FSDP or DDP wraps it")
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in places:
        if id(parameter) not in made:
            spread = distribute_tensor(parameter.detach(), mesh, [placement(found.get(id(parameter)))])
            made[id(parameter)] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        own_parameters(module)[name] = made[id(parameter)]


@contextmanager
def local_parameters(
    model: nn.Module, *, without: nn.Module | None = None, known: Cuts | None = None
) -> Iterator[None]:
    """Replicated parameters as plain tensors, for a head's own code; outside of the block they are DTensors.

    Not those of the module `without`, and not those that are described and `known`. Callers take turns by the lock of
    `Ranks`: another thread would find plain tensors where DTensors belong, or the other way round.
    """
    left_out = set() if without is None else set(without.modules())
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            if module not in left_out:
                holder: dict[str, Any] = own_parameters(module)
                for name, p in [*holder.items()]:
                    if isinstance(p, DTensor) and id(p) not in (known or {}):
                        swapped.append((holder, name, p))
                        holder[name] = p.to_local()
        yield
    finally:
        for holder, name, p in swapped:
            holder[name] = p


def as_sharded(part: Tensor, words: Words, mesh: DeviceMesh) -> Tensor:
    """[..., V_r] as a DTensor [..., V] that is sharded along its last dim; nothing is copied."""
    shape = torch.Size([*part.shape[:-1], words.total])
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride
    )  # fmt: skip
    return whole


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ParallelModel(Twin):
    """Mixed into the class of every model that `parallelize` takes."""

    weft_why = "a model that weft.parallelize has shared runs on kernels of its own"  # and ranks meet in one order

    def weft_call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "_weft_ranks" not in self.__dict__:  # a plain model that was made by the class of a parallel one
            return original(self, *args, **kwargs)
        if (by := recorder()) is not None:
            raise Unsupported(f"{by}: a parallel model cannot be recorded or transformed; do it before parallelize")
        return self.weft_answer(original, bind(original, args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model: Any = self
        for p in model.parameters():
            memo.setdefault(id(p), _copied(p, memo))
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__getstate__())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(
            f"a parallel {type(self).__name__} cannot be pickled: it lives on several ranks; save it with "
            "model.save_pretrained(folder), weft.parallel.save_checkpoint, or its state_dict() with "
            "torch.distributed.checkpoint"
        )

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, max_shard_size: int | str = "50GB", **options: Any
    ) -> None:  # fmt: skip
        """As Hugging Face writes a model, gathered on rank 0 a few tensors at a time: see `weft.parallel.save_model`.

        Collective over the default group. Other options of Hugging Face's method are errors.
        """
        from weft.parallel.files.save import save_model

        allowed = {"is_main_process": (True, False), "safe_serialization": (True,), "push_to_hub": (False,)}
        odd = [name for name, value in options.items() if value is not None and value not in allowed.get(name, ())]
        if odd:
            raise Unsupported(
                f"save_pretrained of a parallel model does not take {', '.join(odd)}; save it, and load it as a plain "
                "model for the rest"
            )
        model: Any = self
        # What Hugging Face's own method writes into the config, too.
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(self).__name__.removeprefix("FSDP")]
        with gathered(model):
            save_model(model, os.fspath(save_directory), max_file_bytes=_bytes(max_shard_size))

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        raise Unsupported(
            "resize_token_embeddings: the ranks share the embedding of a parallel model; resize it before parallelize"
        )

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        _warn_of_checkpointing()

    def activation_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        _warn_of_checkpointing()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """torch's DDP asks for this before it does anything; others, such as torch.jit, look at all attributes."""
        model: Any = self
        asks = sys._getframe(1).f_globals.get("__name__")
        if asks == "torch.nn.parallel.distributed" and any(isinstance(p, DTensor) for p in model.parameters()):
            raise Unsupported(
                "torch's DistributedDataParallel does not take a model whose parameters are DTensors; use "
                "torch.distributed.fsdp.fully_shard(model, mesh=mesh['data']), or average p.grad.to_local() over the "
                "data axis after the backward pass"
            )
        raise AttributeError("_ddp_params_and_buffers_to_ignore")


def _copied(p: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy with its gradient, which torch cannot make of a DTensor that starts in the middle of its memory."""
    made = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    made.grad = None if p.grad is None else p.grad.detach().clone()
    made.__dict__.update(copy.deepcopy(p.__dict__, memo))
    return made


def _warn_of_checkpointing() -> None:
    warnings.warn(
        "gradient checkpointing has no effect inside a parallel model: it keeps what its own backward pass needs; "
        "to keep less, call torch.utils.checkpoint.checkpoint(model, ..., use_reentrant=False)",
        stacklevel=3,
    )


def _bytes(size: int | str) -> int:
    """Bytes, from a number or as Hugging Face spells them.

    >>> _bytes("5GB"), _bytes(7)
    (5000000000, 7)
    """
    if isinstance(size, int):
        return size
    for unit in sorted(_UNITS, key=len, reverse=True):
        digits = size.upper().removesuffix(unit)
        if digits != size.upper() and digits.strip().isdecimal():
            return int(digits) * _UNITS[unit]
    raise ValueError(f"max_shard_size is {size!r}, expected a number of bytes or a text such as '5GB'")
