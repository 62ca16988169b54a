"""What a model was when it was read: its modules, their options and its config, and whether it is that still.

A parallel model computes from a description of its modules and never calls them. So a layer that was cut off or
replaced, an adapter, another dropout or another config must be read again, and a hook on a module that is never called
must be refused: it would not run. Looking costs about a quarter of a microsecond a module, in every call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft._torch import has_global_module_hooks
from weft.packed.models.common import Unsupported

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_PLAIN = (bool, int, float, str, type(None))
# Hugging Face leaves these on layers that it has run; they do nothing unless its own code asks for hidden states.
_HARMLESS = "transformers.utils.output_capturing"


class Structure:
    """The modules below `root` as they are now. Those in `called` run as themselves: they may have hooks."""

    def __init__(self, root: nn.Module, called: Iterable[nn.Module]) -> None:
        self._root = root
        self._modules = list(root.modules())
        self._states: list[dict[str, Any]] = [m.__dict__ for m in self._modules]
        self._children = self._children_now()
        self._types = [type(m) for m in self._modules]
        free = set(called)
        self._silent = [m for m in self._modules if m not in free]
        self._forwards = {kind: kind.forward for kind in {type(m) for m in self._silent}}
        options = [(d, name) for d in self._states for name in d if _is_option(name, d[name])]
        self._owners, self._names = [d for d, _ in options], [name for _, name in options]
        self._options = self._options_now()
        self._modes = self._modes_now()
        configs = {id(c): c for d in self._states if hasattr(c := d.get("config"), "__dict__")}
        # A copy, as an option may be a dict that is changed in place.
        self._configs = [(c.__dict__, copy.deepcopy(c.__dict__)) for c in configs.values()]

    def holds(self) -> bool:
        """Whether the same modules with the same options are in the same places."""
        return (
            self._children_now() == self._children
            and list(map(type, self._modules)) == self._types
            and self._options_now() == self._options
            and all(now == then for now, then in self._configs)
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._modes_now() == self._modes
        )

    def check_hooks(self) -> None:
        """Raises where code of the user's hangs on a module that is not called."""
        for module in self._silent:
            d = module.__dict__
            if (
                d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"]
                or "forward" in d
            ) and (found := _found_in(d)):  # fmt: skip
                raise Unsupported(self._complaint(module, found))
        if has_global_module_hooks():
            raise Unsupported(
                f"a hook for all modules of the process is registered (torch.nn.modules.module), but a parallel "
                f"{type(self._root).__name__} does not call its modules one by one, so that it would not run; remove it"
            )

    def _children_now(self) -> list[Any]:
        return [child for d in self._states for child in d["_modules"].values()]

    def _options_now(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names))

    def _modes_now(self) -> list[bool]:
        """Which modules are in training mode; nothing where all are, or none: that is for the call to say."""
        modes: list[bool] = [d["training"] for d in self._states]
        return modes if len(set(modes)) > 1 else []

    def _complaint(self, module: nn.Module, what: str) -> str:
        name = next((n for n, m in self._root.named_modules() if m is module), "") or type(module).__name__
        if isinstance(module, FSDPModule):
            return (
                f"{name} was given to fully_shard, but layers of a parallel model are not called one by one, so that "
                "they would not be gathered; give the whole model to fully_shard, not its layers"
            )
        return (
            f"{name} has a {what}, which would never run: a parallel model computes its layers together and does not "
            "call its modules; remove it, put it on the whole model, or ask for output_hidden_states"
        )


def _found_in(state: dict[str, Any]) -> str | None:
    """What hangs on a module; None where it is Hugging Face's own."""
    for key, word in _HOOKS.items():
        if any(getattr(hook, "__module__", "") != _HARMLESS for hook in state[key].values()):
            return word
    return "forward of its own" if "forward" in state else None


def _is_option(name: str, value: object) -> bool:
    """Whether an attribute may say how a module computes; `training` changes often, and is asked for apart."""
    return not name.startswith("_") and name != "training" and isinstance(value, _PLAIN)
