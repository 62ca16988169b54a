"""Whether this torch has the private names that `weft._torch` uses, and whether they mean what they should.

`weft doctor` shows it. There is a check for each function there; a test holds that none is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn.modules import module as modules

from weft import _torch


class Finding(NamedTuple):
    """Whether a function of `weft._torch` does what it should; if not, `detail` says what went wrong."""

    name: str
    ok: bool
    detail: str = ""


def self_check() -> list[Finding]:
    """Tries all of them, without a process group. A torch that lacks one is not for this weft."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace says that it is old
        for name, check in _CHECKS.items():
            try:
                problem = check()
            except Exception as error:  # whatever a missing name leads to
                problem = f"{type(error).__name__}: {error}"
            found.append(Finding(name, not problem, problem))
    return found


def _lacks(holder: Any, *names: str) -> str:
    missing = [name for name in names if not hasattr(holder, name)]
    return f"{getattr(holder, '__name__', holder)} lacks {', '.join(missing)}" if missing else ""


def _of_source(file: str, text: str) -> str:
    """For what would take seconds to import: whether torch's source has a text."""
    source = (Path(torch.__file__).parent / file).read_text(encoding="utf-8")
    return _unless(text in source, f"torch/{file} has no {text}")


def _unless(holds: bool, what: str) -> str:
    return "" if holds else what


def _check_versions() -> str:
    x = torch.zeros(2)
    before = _torch.version_of(x)
    x.add_(1)
    with torch.inference_mode():
        uncounted = _torch.version_of(torch.zeros(2))
    return _unless((_torch.version_of(x), uncounted) == (before + 1, -1), "a write does not count up Tensor._version")


def _check_weak_storage() -> str:
    x = torch.zeros(2)
    weak = _torch.weak_storage(x.untyped_storage())
    alive = not weak.expired()
    del x
    return _unless(alive and weak.expired(), "a StorageWeakRef does not tell when its storage is gone")


def _check_wrappers() -> str:
    inside: list[bool] = []

    def seen(x: Tensor) -> Tensor:
        inside.append(_torch.is_wrapper(x) and _torch.in_functorch())
        return x

    torch.vmap(seen)(torch.zeros(2))
    return _unless(
        inside == [True] and not _torch.in_functorch() and not _torch.is_wrapper(torch.zeros(2)), "vmap is not noticed"
    )


def _check_tracing() -> str:
    inside: list[bool] = []

    def seen(x: Tensor) -> Tensor:
        inside.append(_torch.is_tracing())
        return x + 1

    torch.jit.trace(seen, torch.zeros(2), check_trace=False)  # type: ignore[no-untyped-call]
    return _unless(inside == [True] and not _torch.is_tracing(), "torch.jit.trace is not noticed")


def _check_faking() -> str:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        inside = _torch.is_faking()
    return _unless(inside and not _torch.is_faking(), "tensors without memory are not noticed")


def _check_left_to_python() -> str:
    def function() -> int:
        return 1

    _torch.leave_to_python(function, "a check")
    return _unless(function() == 1, "a function is not itself")


def _check_op_name() -> str:
    from torch._library.custom_ops import CustomOpDef

    return _unless("_qualname" in CustomOpDef.__init__.__code__.co_names, "CustomOpDef lacks _qualname")


def _check_modes() -> str:
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        inside = _torch.dispatches_to_python()
    return _unless(inside and not _torch.dispatches_to_python(), "a dispatch mode is not noticed")


def _check_forward_ad() -> str:
    with forward_ad.dual_level():
        inside = _torch.in_forward_ad()
    return _unless(inside and not _torch.in_forward_ad(), "forward-mode differentiation is not noticed")


def _check_global_hooks() -> str:
    handle = modules.register_module_forward_hook(lambda *_: None)
    inside = _torch.has_global_module_hooks()
    handle.remove()
    return _unless(inside, "global hooks of modules are not noticed")


def _check_own() -> str:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("unsaved", torch.zeros(1), persistent=False)
    outer = nn.Sequential(norm)
    held = [
        *_torch.own_parameters(norm),
        *_torch.own_modules(outer),
        *(name for name in _torch.own_buffers(norm) if name == "unsaved"),
    ]
    same = held == ["weight", "bias", "0", "unsaved"] and _torch.unsaved_buffers(norm) == {"unsaved"}
    return _unless(same, f"a module holds {held}") or _lacks(nn.Module, _torch.COMPILED_CALL)


def _check_dtensor() -> str:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return _lacks(DTensor, "_local_tensor", "_spec") or _lacks(
        DTensorSpec, "shard_order", "use_strided_shard_as_shard_order"
    )


def _check_styles() -> str:
    """What `weft.ColwiseOverlap` and `RowwiseOverlap` override, and call."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    names = ("_apply", "_partition_linear_fn")
    return _lacks(ColwiseParallel, *names) or _lacks(RowwiseParallel, *names)


def _check_waiting() -> str:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    x = torch.zeros(2)
    return _lacks(AsyncCollectiveTensor, "wait") or _unless(_torch.settled(x) is x, "a plain tensor is not itself")


def _check_zeros() -> str:
    zeros: Any = torch._efficientzerotensor(2)
    return _unless(
        _torch.has_memory(torch.zeros(2)) and not _torch.has_memory(zeros), "zeros without memory are not noticed"
    )


def _check_flops() -> str:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _torch.tell_flop_counters({_check_flops: int})
    return _unless(counter.flop_registry.get(_check_flops) is int, "a counter is not told of formulas")


_CHECKS: dict[str, Callable[[], str]] = {
    "group_store": lambda: _lacks(distributed_c10d, "_get_process_group_store"),
    "group_by_name": lambda: _lacks(distributed_c10d, "_resolve_process_group"),
    "group_timeout": lambda: (
        _lacks(ProcessGroup, "_get_backend") or _lacks(torch._C._distributed_c10d.Backend.Options, "_timeout")
    ),
    "backend_settings": lambda: _lacks(torch._C._distributed_c10d.Backend.Options, "_timeout"),
    "cpu_group": lambda: (
        _lacks(distributed_c10d, "_new_process_group_helper", "_get_default_group", "_world", "GroupName")
        or _lacks(distributed_c10d._world, "pg_map", "pg_group_ranks")
    ),
    "version_of": _check_versions,
    "local_tensor": _check_dtensor,
    "is_dtensor": _check_dtensor,
    "settled": _check_waiting,
    "is_wrapper": _check_wrappers,
    "has_memory": _check_zeros,
    "storage_id": lambda: _unless(_torch.storage_id(torch.zeros(2).untyped_storage()) != 0, "a storage has no address"),
    "weak_storage": _check_weak_storage,
    "strided_shard": lambda: _lacks(_torch.strided_shard(), "split_factor", "dim"),
    "shard_order": _check_dtensor,
    "strides_are_order": _check_dtensor,
    "has_global_module_hooks": _check_global_hooks,
    "in_functorch": _check_wrappers,
    "is_tracing": _check_tracing,
    "is_faking": _check_faking,
    "leave_to_python": _check_left_to_python,
    "without_compile": lambda: _lacks(torch.compiler, "disable"),  # to call it would import the compiler
    "dispatches_to_python": _check_modes,
    "is_transformed": _check_modes,
    "tell_flop_counters": _check_flops,
    "in_forward_ad": _check_forward_ad,
    "constant_in_compile": lambda: _of_source("_dynamo/decorators.py", "_dynamo_marked_constant"),
    "op_name": _check_op_name,
    "compile_for_shapes": lambda: _of_source("_dynamo/config.py", "recompile_limit"),
    "redistribution_logger": lambda: _of_source("distributed/tensor/_redistribute.py", "getLogger(__name__)"),
    "own_parameters": _check_own,
    "own_buffers": _check_own,
    "own_modules": _check_own,
    "shallow_copy": _check_own,
    "unsaved_buffers": _check_own,
    "multiplies_bfloat16": lambda: _lacks(torch.cpu, "_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    "symmetric_memory": lambda: _lacks(_torch.symmetric_memory(), "empty", "rendezvous"),
    "stream_writes": lambda: _lacks(_torch.stream_writes(), "stream_write_value32", "memset32"),
    "ColwiseParallel, RowwiseParallel": _check_styles,
}
