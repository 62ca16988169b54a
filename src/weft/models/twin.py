"""Models that compute in another way than their own class does. The class of such a model keeps its name, and inherits
from a mixin (`Twin`) and from the model's own class. `twin_of` makes a twin: a shallow copy with the same modules and
parameters under the same names, which can be copied, pickled and compiled around. `become` changes a model in place.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, Protocol, TypeVar

from torch import nn

from weft._torch import COMPILED_CALL, without_compile
from weft.errors import Unsupported
from weft.models.modules import HAS_RECORDERS, has_recorders, recorder

_OWN = ("_modules", "_parameters", "_buffers")
_NOT_COPIED = ("_weft_engine", "_weft_origin", COMPILED_CALL)
_T = TypeVar("_T")


def bind(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with those that were passed by **kwargs among them."""
    bound = dict(_signature(forward).bind(None, *args, **kwargs).arguments)
    extra = bound.pop("kwargs", {})
    bound.pop("self", None)
    return {**bound, **extra}


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether a forward has an argument of this name, besides those that it takes by **kwargs."""
    return name in _signature(getattr(forward, "__func__", forward)).parameters


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
        return self.weft_answer(original, bind(original, args, kwargs))

    def weft_answer(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """A call as it came, by the names of its arguments; `weft_forward` gets it in the one form that it knows."""
        return self.weft_forward(original, arguments)

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
        origin: Origin | None = self.__dict__.get("_weft_origin")
        changed = None if origin is None else origin.changed()
        if changed is not None:
            raise Unsupported(
                f"{changed} of the {type(self).__name__} that was packed have been replaced since; pack it again, or "
                f"replace them in the packed model"
            )

    def weft_share_recorders(self) -> None:
        """Before and after code of transformers that may record states: it hangs hooks on layers once for each model,
        but twins share theirs, and what two hooks record is there twice, in the model that was packed, too."""
        module: Any = self
        if has_recorders(module):
            origin: Origin | None = self.__dict__.get("_weft_origin")
            for model in (module, None if origin is None else origin.model()):
                if model is not None:
                    model.__dict__[HAS_RECORDERS] = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith(_NOT_COPIED)}

    def __copy__(self) -> Any:
        """Shallow: of the same model, so it looks at that, too."""
        mixin, original = type(self).__bases__
        twin = _empty(original, mixin)
        twin.__dict__.update(self.__getstate__(), _weft_origin=self.__dict__.get("_weft_origin"))
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        mixin, original = type(self).__bases__
        return _empty, (original, mixin), self.__getstate__()


def twin_of(model: nn.Module, mixin: type[Twin], attributes: dict[str, Any]) -> nn.Module:
    """A twin whose class has `mixin` before the model's own."""
    twin: nn.Module = _empty(type(model), mixin)
    twin.__dict__.update(model.__dict__)
    for name in _OWN:
        twin.__dict__[name] = dict(model.__dict__[name])
    check_forward(model)
    for name in (COMPILED_CALL, "forward"):
        twin.__dict__.pop(name, None)
    twin.__dict__.update(attributes, _weft_origin=_OwnModules(model))
    return twin


def plain_of(twin: Twin) -> nn.Module:
    """The model of a twin by its own class's code, on the same modules; what is a twin inside is plain, too."""
    original: Any = type(twin).__bases__[1]
    plain: nn.Module = original.__new__(original)
    plain.__dict__.update((name, value) for name, value in twin.__dict__.items() if "_weft" not in name)
    plain.__dict__["_modules"] = {
        name: plain_of(child) if isinstance(child, Twin) else child for name, child in twin.__dict__["_modules"].items()
    }
    return plain


def become(model: nn.Module, mixin: type[Twin], attributes: dict[str, Any]) -> None:
    """Gives the model itself another `forward`; by the name of its class configs and checkpoints still find it."""
    check_forward(model)
    model.__dict__.pop("forward", None)
    model.__class__ = twin_class(type(model), mixin)
    model.__dict__.update(attributes)


def is_own_forward(module: nn.Module) -> bool:
    """Whether what a module itself has under the name `forward`, if anything, is its class's: some leave that there."""
    forward = module.__dict__.get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def check_forward(model: nn.Module) -> None:
    """Raises where a model runs code of the user's instead of its class's."""
    if not is_own_forward(model):
        raise Unsupported(
            f"this {type(model).__name__} has another forward than its class came with, which would run in place of "
            f"what weft computes; put that back (del model.forward), or wrap what weft makes of the model"
        )


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


class Origin(Protocol):
    """What a twin was made of, while that lives."""

    def model(self) -> nn.Module | None:
        """The model."""
        ...

    def changed(self) -> str | None:
        """What has been replaced in it since, which the twin would not see; None for nothing."""
        ...


# Attributes of transformers' models that say nothing about what they compute. Of checkpointing, layers say it.
_IDLE = {"name_or_path", "gradient_checkpointing", "all_tied_weights_keys", "kernel_config", "training"}
_LOSS = "_loss_function"  # where one is that a user has set


class _OwnModules:
    """Of a model: what it has at the top, modules, parameters, buffers, config, loss and the like. What is below these
    it shares with its twin."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._content = self._now(model)
        self._settings = {
            name: value for name, value in model.__dict__.items() if not name.startswith("_") and name not in _IDLE
        }
        self._settings[_LOSS] = model.__dict__.get(_LOSS)

    @staticmethod
    def _now(model: nn.Module) -> list[Any]:
        return [value for name in _OWN for value in model.__dict__[name].values()]

    def changed(self) -> str | None:
        model = self.model()
        if model is None:
            return None
        now = self._now(model)
        if len(now) != len(self._content) or not all(map(is_, now, self._content)):
            return "modules or parameters"
        for name, value in self._settings.items():
            found = model.__dict__.get(name)
            if found is not value and not (isinstance(value, (str, int, float)) and found == value):
                return f"settings ({name.removeprefix('_')})"
        return None
