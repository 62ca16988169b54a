"""The modules of a user's model: are they still made as when they were read, and how does a model get another
`forward`?

A packed or parallel model computes from a description of the user's modules, not by running them. So whatever changes
what they would compute must be noticed: a layer swapped or cut, an adapter around a linear, `dropout.p`, a submodule in
`eval()`, a hook, a patched `forward`, an option of the config. All of that is an identity somewhere in the modules'
dicts, and comparing these (`Watch`) costs well under a microsecond a module. Weights that change in place are another
question (`weft.kernels.freshness`).

The class of such a model keeps its name, and inherits from a mixin (`Twin`) and from the model's own class. `twin_of`
makes a twin: a shallow copy with the same modules and parameters under the same names, which can be copied, pickled and
compiled around. `become` changes a model in place.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import getitem, is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from weft._torch import has_global_module_hooks, in_functorch, is_faking, is_tracing, without_compile
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


def _check_module(module: nn.Module, where: str) -> None:
    state = module.__dict__
    for key, what in _HOOKS.items():
        for hook in state[key].values():
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):  # FSDP's own
                raise Unsupported(
                    f"{where} was given to fully_shard, but the layers of a parallel model are not called one by one, "
                    "so that they would not be gathered; give the whole model to fully_shard, not its layers"
                )
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


_OWN = ("_modules", "_parameters", "_buffers")
_NOT_COPIED = ("_weft_engine", "_weft_origin")
_T = TypeVar("_T")


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were passed by **kwargs among them."""
    bound = dict(_signature(forward).bind(None, *args, **kwargs).arguments)
    extra = bound.pop("kwargs", {})
    bound.pop("self", None)
    return {**bound, **extra}


@functools.cache
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


class Twin:
    """Mixed into the class of a model. `_weft_engine` and `_weft_origin` belong to one object, not to copies.

    `weft_why`: why torch.compile leaves a call as it is, and nobody else records it.
    """

    weft_why = "a packed model looks at the mask to see which tokens to compute"

    def weft_call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the new `forward` does; `original` is the forward of the model's own class."""
        if (by := recorder()) is not None:
            onnx = ", and ONNX by it" if by in ("torch.jit.trace", "torch.export") else ""
            raise Unsupported(
                f"{by}{onnx}: {self.weft_why}, so a call of it cannot be recorded or transformed; do it to the model "
                f"that was packed"
            )
        return self.weft_forward(original, bind(original, args, kwargs))

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """A call, by the names of its arguments."""
        raise NotImplementedError

    def weft_kept(self, name: str, make: Callable[[], _T]) -> _T:
        """What this object, and no copy of it, keeps under a name; made when first asked for."""
        found: tuple[int, _T] | None = self.__dict__.get(name)
        if found is None or found[0] != id(self):
            found = self.__dict__[name] = (id(self), make())
        return found[1]

    def weft_check(self) -> None:
        """Raises where this was never packed, or where the model that was packed has got other modules since, which
        this one would never see."""
        if "_weft" not in self.__dict__ and "_weft_head" not in self.__dict__:
            raise Unsupported(
                f"this {type(self).__name__} was made by the class of a packed model, and is not packed; make it by "
                f"the class of transformers, and call weft.pack"
            )
        origin: _Origin | None = self.__dict__.get("_weft_origin")
        if origin is not None and not origin.holds():
            raise Unsupported(
                f"modules or parameters of the {type(self).__name__} that was packed have been replaced since; pack it "
                f"again, or replace them in the packed model"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith(_NOT_COPIED)}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        mixin, original = type(self).__bases__
        return _empty, (original, mixin), self.__getstate__()


def twin_of(model: nn.Module, mixin: type[Twin], attributes: dict[str, Any]) -> nn.Module:
    """A twin whose class has `mixin` before the model's own."""
    twin = copy.copy(model)
    twin.__class__ = twin_class(type(model), mixin)
    for name in _OWN:
        twin.__dict__[name] = dict(model.__dict__[name])
    twin.__dict__.update(attributes, _weft_origin=_Origin(model))
    return twin


def become(model: nn.Module, mixin: type[Twin], attributes: dict[str, Any]) -> None:
    """Gives the model itself another `forward`; by the name of its class configs and checkpoints still find it."""
    model.__class__ = twin_class(type(model), mixin)
    model.__dict__.update(attributes)


def twin_class(original: type, mixin: type[Twin]) -> type:
    """The class of the twins of an `original`: one, so that twins are of the same class."""
    if (original, mixin) not in _classes:
        _classes[original, mixin] = _new_class(original, mixin)
    return _classes[original, mixin]


_classes: dict[tuple[type, type[Twin]], type] = {}


def _new_class(original: type, mixin: type[Twin]) -> type:
    own: Callable[..., Any] = original.forward  # type: ignore[attr-defined]

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.weft_call(own, args, kwargs)

    outside = without_compile(forward, mixin.weft_why)
    return type(original.__name__, (mixin, original), {"forward": outside, "__module__": original.__module__})


def _empty(original: type, mixin: type[Twin]) -> Any:
    """For pickle, which then fills it."""
    made = twin_class(original, mixin)
    return made.__new__(made)  # type: ignore[call-overload]


class _Origin:
    """The model that a twin was made of, while it lives, and what was in it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._content = self._now(model)

    @staticmethod
    def _now(model: nn.Module) -> list[Any]:
        return [value for name in _OWN for value in model.__dict__[name].values()]

    def holds(self) -> bool:
        model = self._model()
        if model is None:
            return True
        now = self._now(model)
        return len(now) == len(self._content) and all(map(is_, now, self._content))
