"""Is a model still made as it was when it was read? Its modules, their classes, modes, options, hooks and configs.

A packed model computes from a description of the user's modules, not by running them. So whatever changes what they
would compute must be noticed: a layer swapped or cut, an adapter around a linear, `dropout.p`, a submodule in `eval()`,
a hook, a patched `forward`, an option of the config. All of that is an identity somewhere in the modules' dicts, and
comparing these costs well under a microsecond a module. Weights that change in place are another question
(`weft.kernels.freshness`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from operator import getitem, is_
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft._torch import has_global_module_hooks, in_functorch, is_faking, is_tracing
from weft.errors import Unsupported

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CHILDREN = ("_modules", "_parameters", "_buffers")
# What every module has: containers, looked at by their content, and what concerns state dicts only.
_COMMON = frozenset(nn.Module().__dict__) - {"training"}


class Watch:
    """What modules were like when it was made: `holds` says whether they are still like that.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    >>> watch = Watch(list(model.modules()))
    >>> watch.holds()
    True
    >>> model[1].p = 0.2
    >>> watch.holds()
    False
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._types: list[Any] = list(map(type, modules))
        self._forwards = [(t, t.forward) for t in dict.fromkeys(self._types)]
        own: list[dict[str, Any]] = [m.__dict__ for m in modules] + _configs(modules)
        hooks = [m.__dict__[name] for m in modules for name in _HOOKS]
        children = [m.__dict__[name] for m in modules for name in _CHILDREN]
        self._no_hooks = [h for h in hooks if not h]
        self._sized = own + children + [h for h in hooks if h]
        self._sizes = list(map(len, self._sized))
        options = [(d, key) for d in own for key in d if key not in _COMMON]
        self._dicts, self._keys = [d for d, _ in options], [key for _, key in options]
        self._options = [d[key] for d, key in options]
        self._filled = [d for d in children + hooks if d]
        self._content = list(chain.from_iterable(map(dict.values, self._filled)))

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
            )
        except KeyError:  # an option was deleted, and another one set
            return False


def _configs(modules: list[nn.Module]) -> list[dict[str, Any]]:
    found = {id(c): c for c in (m.__dict__.get("config") for m in modules) if hasattr(c, "__dict__")}
    return [c.__dict__ for c in found.values()]


def check_untouched(root: nn.Module, is_known: Callable[[type], bool], *, runs: nn.Module | None = None) -> None:
    """Raises where a module inside of `root` would not compute what its class does, or is of a class nobody knows.

    Not of `root` itself, whose hooks run, nor of the module `runs` in it, whose own code runs.
    """
    running = set() if runs is None else set(runs.modules())
    for name, module in root.named_modules():
        if module is root or module in running:
            continue
        where, kind = f"{type(root).__name__}.{name}", type(module)
        if not is_known(kind):
            raise Unsupported(
                f"{where} is a {kind.__module__}.{kind.__name__}, which a packed model does not know; merge adapters, "
                f"undo quantization and parametrizations, or put the original module back"
            )
        for hook in chain.from_iterable(module.__dict__[kept].values() for kept in _HOOKS):
            if not _is_harmless(hook):
                raise Unsupported(f"{where} has a hook ({_name(hook)}), {_NOT_RUN}; remove it")
        if "forward" in module.__dict__ or not _is_stock(kind):
            raise Unsupported(f"{where} has another forward than its class came with, {_NOT_RUN}; put that back")


_NOT_RUN = "but a packed model does not run the code of its layers, only of the whole model and of its head"


def check_global_hooks() -> None:
    """Raises where hooks of all modules are registered: the layers of a packed model would not run them."""
    if has_global_module_hooks():
        raise Unsupported(
            f"a hook for all modules is registered (by register_module_forward_hook and its like, or by a tool such as "
            f"FlopCounterMode), {_NOT_RUN}; remove it, or call the model that was packed"
        )


def check_caller() -> None:
    """Raises where a call is recorded or transformed: which tokens there are is known from the values only."""
    for found, what in (
        (is_tracing(), "torch.jit.trace, and ONNX by it"),
        (torch.compiler.is_exporting(), "torch.export, and ONNX by it"),
        (in_functorch(), "torch.func (vmap, grad, jvp)"),
        (is_faking(), "FakeTensorMode"),
    ):
        if found:
            raise Unsupported(
                f"{what}: a packed model looks at the mask to see which tokens to compute, so a call of it cannot be "
                f"recorded or transformed; do it to the model that was packed"
            )


def is_of(kind: type, *homes: str) -> bool:
    """Whether a class is one of the modules with these names, and not one made to look so."""
    return kind.__module__ in homes and _home(kind) is kind


def _home(kind: type) -> object:
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None)


def _is_harmless(hook: object) -> bool:
    """Hugging Face's own: the one that records hidden states, which packed models record in another way, and the one
    that makes gradient checkpointing start at the embeddings, which their kind of checkpointing does not need."""
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or (
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
            written = code is not None and any(root in Path(code.co_filename).parents for root in _roots())
            return written and name == f"{base.__qualname__}.forward"
    return False


def _roots() -> Iterator[Path]:
    for name in ("torch", "transformers"):
        if name in sys.modules:
            file = sys.modules[name].__file__
            assert file is not None
            yield Path(file).parent


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__
