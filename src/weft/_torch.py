"""Every private name of torch that weft uses, one small function or alias each: what a new torch may break is here."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C import DispatchKey, _dispatch_keys, _functorch, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._dynamo import eval_frame
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.nn import Parameter
from torch.nn.modules import module as _module
from torch.utils import _python_dispatch

if TYPE_CHECKING:  # its import takes as long as torch's own, and not everybody has DTensors
    from torch.distributed.tensor import DTensor

# Process groups ---------------------------------------------------------------------------------------------


def group_store(pg: ProcessGroup) -> Store:
    """The store of a process group, under the group's own prefix; `KeyError` for one that torch does not know.

    torch drops this very object when the group is destroyed, and keeps it nowhere else. The public
    `ProcessGroup.get_group_store` gives another object for the same store.
    """
    return distributed_c10d._get_process_group_store(pg)


def group_by_name(name: str) -> ProcessGroup:
    """The process group that custom ops know as `name`."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def group_timeout(pg: ProcessGroup, device: str) -> float:
    """The seconds that a process group was made with."""
    options = pg._get_backend(torch.device(device)).options
    return float(options._timeout.total_seconds())


def backend_settings(name: str, timeout: timedelta) -> Any:
    """What torch asks a backend for, of a group that is written in Python and has none."""
    options = SimpleNamespace(_timeout=timeout, backend=name)
    abilities = ("supports_splitting", "supports_coalescing", "supports_time_estimate")
    return SimpleNamespace(options=options, **dict.fromkeys(abilities, False))


def cpu_group(name: str, ranks: Sequence[int], *, timeout: float, like: ProcessGroup | None = None) -> ProcessGroup:
    """`dist.new_group` for CPU tensors of these ranks alone, in this order, under a name that they have agreed on.

    Its backend is the default group's for the CPU; or all that another group has, which is `like` it.

    `new_group(use_local_synchronization=True)` names a group by its ranks and by how many groups this process is in:
    ranks that are in different numbers of groups never meet, and a group that is made after another one of its ranks
    was destroyed finds that one's addresses in the store.
    """
    world, here = distributed_c10d._world, dist.get_rank()
    config = dist.get_backend_config(like)
    backends = distributed_c10d.BackendConfig(dist.Backend(config)).get_device_backend_map()
    is_mixed = like is not None and len(set(backends.values())) > 1
    _, store = world.pg_map[distributed_c10d._get_default_group()]
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(here),
        list(ranks),
        dist.Backend(config if is_mixed else backends.get("cpu", "gloo")),
        store,
        distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=timeout),
    )
    assert isinstance(made, ProcessGroup)
    world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


# Tensors ----------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, Parameter)
_WRAPPERS = (
    DispatchKey.Python,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchGradWrapper,
    DispatchKey.Functionalize,
)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, without a record for gradients; another tensor is itself."""
    found: Tensor = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)
    return found


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as torch counts; -1 for one made in inference mode, which counts nothing."""
    return -1 if tensor.is_inference() else tensor._version


def settled(tensor: Tensor) -> Tensor:
    """The tensor, once a functional collective that still writes it is done; others are themselves."""
    if type(tensor) in _PLAIN:
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        done: Tensor = tensor.wait()
        return done
    return tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it has no memory of its own: subclasses that dispatch in Python, and what torch.func hands out."""
    keys = _dispatch_keys(tensor)
    return any(keys.has(key) for key in _WRAPPERS)


def has_memory(tensor: Tensor) -> bool:
    """False for the zeros that automatic differentiation makes without memory."""
    return not torch._is_zerotensor(tensor)


# DTensors ---------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is one of DTensor's. Where nobody has imported it, none is."""
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def strided_shard() -> type[Any]:
    """The placement with which FSDP2 says that a later axis of the mesh cuts first."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def shard_order(tensor: DTensor) -> dict[int, tuple[int, ...]]:
    """For each dim of a DTensor that is cut, the mesh axes in the order in which they cut it, where torch says so."""
    return {int(entry[0]): tuple(entry[1]) for entry in getattr(tensor._spec, "shard_order", None) or ()}


def strides_are_order(tensor: DTensor) -> bool:
    """False where a strided shard came from a view, and really means strides."""
    spec: Any = tensor._spec
    return getattr(spec, "use_strided_shard_as_shard_order", True) is not False


# Modules, transformations and tracers -----------------------------------------------------------------------


def has_global_module_hooks() -> bool:
    """Whether a hook is registered that runs at every module of the process (`register_module_forward_hook`, ...)."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def in_functorch() -> bool:
    """Whether a transformation of torch.func (vmap, grad, jvp) is at work."""
    return _functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether torch.jit.trace records what is computed."""
    return _get_tracing_state() is not None


def without_compile(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The function as torch.compile leaves it alone; `fullgraph=True` says the reason. Public, but without types."""
    found: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return found


def is_faking() -> bool:
    """Whether tensors are made without memory, to find out about shapes."""
    return detect_fake_mode() is not None


def leave_to_python(function: Callable[..., Any], reason: str) -> None:
    """What torch.compiler.disable does to a function, without importing the compiler, which takes a second."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    # Neither its own frame nor those that it calls.
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def dispatches_to_python() -> bool:
    """Whether a `TorchDispatchMode` sees every op (counters, fake tensors, functionalisation)."""
    return _len_torch_dispatch_stack() > 0


def in_forward_ad() -> bool:
    """Whether forward-mode differentiation is at work."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a dispatch mode, a tracer, forward-mode gradients or a transform of torch.func is active."""
    return dispatches_to_python() or is_tracing() or in_forward_ad() or in_functorch()


def tell_flop_counters(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Tells the FlopCounterModes that are active how to count ops, which they would count as nothing.

    Registering formulas once would import torch's own, and Triton with them; a counter copies the table at first.
    """
    if torch.compiler.is_compiling() or not dispatches_to_python():
        return
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registry.update({op: formula for op, formula in formulas.items() if op not in registry})


def compile_for_shapes(shapes: int) -> None:
    """Lets torch.compile compile a function for so many shapes; beyond its limit it would silently run eagerly."""
    config: Any = import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, shapes)


def redistribution_logger() -> logging.Logger:
    """Where DTensor says how it would rather be redistributed."""
    return logging.getLogger("torch.distributed.tensor._redistribute")


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def constant_in_compile(function: FunctionT) -> FunctionT:
    """torch.compile calls the function while it traces, and takes the result for a constant.

    What torch.compiler.assume_constant_result does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def op_name(op: Any) -> str:
    """The full name of what `torch.library.custom_op` made."""
    return str(op._qualname)


def own_parameters(module: nn.Module) -> dict[str, Parameter | None]:
    """The parameters of a module without its children, to read or to replace."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module without its children, to read or to replace."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module, to read or to replace."""
    return module._modules


COMPILED_CALL = "_compiled_call_impl"  # what `Module.compile` leaves in a module: a call of that very module


def shallow_copy(module: Any) -> nn.Module:
    """The module with the same children, in a dict of its own: they can be replaced there alone."""
    found: nn.Module = copy.copy(module)
    found.__dict__["_modules"] = dict(module._modules)
    return found


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


# Memory and machines ----------------------------------------------------------------------------------------


def storage_id(storage: UntypedStorage) -> int:
    """What tells a storage from all others that live, whichever Python object stands for it."""
    return int(storage._cdata)


def weak_storage(storage: UntypedStorage) -> Any:
    """A reference that keeps no memory: `expired()` says whether the storage is gone."""
    from torch.multiprocessing.reductions import StorageWeakRef

    make: Any = StorageWeakRef  # which has no types
    return make(storage)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AVX-512 BF16, AMX), as oneDNN would use them."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def symmetric_memory() -> Any:
    """torch's symmetric memory: `empty` and `rendezvous`."""
    return import_module("torch.distributed._symmetric_memory")


def stream_writes() -> Any | None:
    """`stream_write_value32` and `memset32`, which set 32 bits in stream order without a kernel; None without them."""
    found = getattr(symmetric_memory(), "_SymmetricMemory", None)
    return found if hasattr(found, "stream_write_value32") and hasattr(found, "memset32") else None
