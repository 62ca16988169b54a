"""The modules of a user's model: are they still made as when they were read?

A packed or parallel model computes from a description of the user's modules, not by running them. So whatever changes
what they would compute must be noticed: a layer swapped or cut, an adapter around a linear, `dropout.p`, a submodule in
`eval()`, a hook, a patched `forward`, an option of the config. All of that is an identity somewhere in the modules'
dicts, and comparing these (`Watch`) costs well under a microsecond a module. Weights that change in place are another
question (`weft.kernels.freshness`).
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from weft._torch import has_global_module_hooks, in_functorch, is_faking, is_tracing
from weft.errors import Unsupported

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_TENSORS = ("_parameters", "_buffers")
# What every module has: containers, looked at by their content, and what concerns state dicts only.
_COMMON = frozenset(nn.Module().__dict__) - {"training"}


class Watch:
    """What modules were like when it was made: `holds` says whether they are still like that.

    Without `tensors`, parameters and buffers may be replaced; FSDP does it in every call, and who lets it looks at
    them by other means.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    >>> watch = Watch(list(model.modules()))
    >>> watch.holds()
    True
    >>> model[1].p = 0.2
    >>> watch.holds()
    False
    """

    def __init__(self, modules: list[nn.Module], *, tensors: bool = True) -> None:
        self._modules = modules
        self._types: list[Any] = list(map(type, modules))
        self._forwards = [(t, t.forward) for t in dict.fromkeys(self._types)]
        configs = _configs(modules)
        own: list[dict[str, Any]] = [m.__dict__ for m in modules] + configs
        hooks = [m.__dict__[name] for m in modules for name in _HOOKS]
        children = [m.__dict__[name] for m in modules for name in ("_modules", *(_TENSORS if tensors else ()))]
        self._no_hooks = [h for h in hooks if not h]
        self._sized = own + children + [h for h in hooks if h]
        self._sizes = list(map(len, self._sized))
        options = [(d, key) for d in own for key in d if key not in _COMMON]
        self._dicts, self._keys = [d for d, _ in options], [key for _, key in options]
        self._options = [d[key] for d, key in options]
        self._filled = [d for d in children + hooks if d]
        self._content = list(chain.from_iterable(map(dict.values, self._filled)))
        # Options of a config that can be changed in place.
        self._inner = [value for d in configs for value in d.values() if isinstance(value, (dict, list, set))]
        self._inner_then = copy.deepcopy(self._inner)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        try:
            return (
                not any(self._no_hooks)
                and list(map(type, self._modules)) == self._types
                and list(map(len, self._sized)) == self._sizes
                and all(map(is_, map(getitem, self._dicts, self._keys), self._options))
                and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._content))
                and all(t.forward is forward for t, forward in self._forwards)
                and self._inner == self._inner_then
            )
        except KeyError:  # an option was deleted, and another one set
            return False


def _configs(modules: list[nn.Module]) -> list[dict[str, Any]]:
    found = {id(c): c for c in (m.__dict__.get("config") for m in modules) if hasattr(c, "__dict__")}
    return [c.__dict__ for c in found.values()]


def check_untouched(root: nn.Module, is_known: Callable[[type], bool], *, called: Iterable[nn.Module]) -> None:
    """Raises where a module inside of `root` would not compute what its class does, or is of a class nobody knows.

    Not of those that are `called`: their own code runs, and their hooks.
    """
    running = set(called)
    for name, module in root.named_modules():
        if module in running:
            continue
        where, kind = f"{type(root).__name__}.{name}", type(module)
        _check_sharded(module, where)
        if not is_known(kind):
            raise Unsupported(
                f"{where} is a {kind.__module__}.{kind.__name__}, which a packed model does not know; merge adapters, "
                f"undo quantization and parametrizations, or put the original module back"
            )
        _check_module(module, where)
        if not _is_stock(kind):
            raise Unsupported(f"{where} has another forward than its class came with, {_NOT_RUN}; put that back")


def check_hooks(root: nn.Module, *, called: Iterable[nn.Module]) -> None:
    """Raises where code of the user's hangs on a module of `root` that is not `called`: it would not run."""
    running = set(called)
    for name, module in root.named_modules():
        if module not in running:
            _check_module(module, f"{type(root).__name__}.{name}")
    check_global_hooks()


def _check_sharded(module: nn.Module, where: str) -> None:
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        raise Unsupported(
            f"{where} was given to fully_shard, but layers of a packed or parallel model are not called one by one, "
            "so that they would not be gathered; give the whole model to fully_shard, not its layers"
        )


def _check_module(module: nn.Module, where: str) -> None:
    state = module.__dict__
    for key, what in _HOOKS.items():
        for hook in state[key].values():
            _check_sharded(module, where)
            if not _is_harmless(hook):
                raise Unsupported(f"{where} has a hook ({what} {_name(hook)}), {_NOT_RUN}; remove it")
    if "forward" in state:
        raise Unsupported(f"{where} has another forward than its class came with, {_NOT_RUN}; put that back")


_NOT_RUN = (
    "but a packed model does not run the code of its layers, only of the whole model and of its head, and a parallel "
    "one that of the whole model"
)


def check_global_hooks() -> None:
    """Raises where hooks of all modules are registered: the layers of a packed model would not run them."""
    if has_global_module_hooks():
        raise Unsupported(
            f"a hook for all modules is registered (by register_module_forward_hook and its like, or by a tool such as "
            f"FlopCounterMode), {_NOT_RUN}; remove it, or call the model that was packed"
        )


def recorder() -> str | None:
    """Who records or transforms the call that is under way, which no model of weft can have; None for nobody."""
    if is_tracing():
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if in_functorch():
        return "torch.func (vmap, grad, jvp)"
    return "FakeTensorMode" if is_faking() else None


def home_of(model: nn.Module) -> str:
    """The module of torch or transformers that has the model's own class, whatever was made of that since: FSDP puts a
    class of its own before it.

    >>> class Wrapped(nn.Linear): pass
    >>> home_of(Wrapped(1, 1))
    'torch.nn.modules.linear'
    """
    names = (kind.__module__ for kind in type(model).__mro__)
    return next(name for name in names if name.startswith(("transformers.", "torch.nn.")))


def is_of(kind: type, *homes: str) -> bool:
    """Whether a class is one of the modules with these names, and not one made to look so."""
    return kind.__module__ in homes and _home(kind) is kind


def _home(kind: type) -> object:
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None)


HAS_RECORDERS = "_output_capturing_hooks_installed"  # the mark of transformers on a model with such hooks


def has_recorders(root: nn.Module) -> bool:
    """Whether transformers has hung hooks on the layers of a model that record hidden states."""
    return any(_is_recorder(hook) for module in root.modules() for hook in module.__dict__["_forward_hooks"].values())


def _is_recorder(hook: object) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _is_harmless(hook: object) -> bool:
    """Hugging Face's own: the one that records hidden states, which packed models record in another way, and the one
    that makes gradient checkpointing start at the embeddings, which their kind of checkpointing does not need."""
    name = getattr(hook, "__qualname__", "")
    return _is_recorder(hook) or (
        name.startswith("PreTrainedModel.enable_input_require_grads.") and name.endswith("make_inputs_require_grads")
    )


def _is_stock(kind: type) -> bool:
    """Whether a class has the `forward` that it was written with: code of torch or transformers, under its own name."""
    for base in kind.__mro__:
        forward = base.__dict__.get("forward")
        if base is nn.Module:  # a list of modules has none
            return True
        if forward is not None:
            code, name = getattr(forward, "__code__", None), getattr(forward, "__qualname__", "")
            written = code is not None and code.co_filename.startswith(_roots())
            return written and name == f"{base.__qualname__}.forward"
    return False


def _roots() -> tuple[str, ...]:
    """The folders of torch and transformers, as the names of files in them begin."""
    files = [sys.modules[name].__file__ for name in ("torch", "transformers") if name in sys.modules]
    return tuple(os.path.join(os.path.dirname(file), "") for file in files if file is not None)


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__
