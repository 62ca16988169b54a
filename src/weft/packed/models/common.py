"""What the adapters share: reading modules strictly, so that nothing unknown is ever computed as if it were known.

What a module does is read from the module, not from the config that it was once made with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import Unsupported as Unsupported
from weft.packed.spec import Norm, Projection
from weft.packed.watch import is_of

# transformers' names of activations -> ours
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# Those of its classes that have no options.
_CLASSES = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}
_FUNCTIONS = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu"}
_LEAVES = (
    nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh,
)  # fmt: skip


def is_known_leaf(kind: type) -> bool:
    """Whether a class is one of those that adapters read: torch's own, and transformers' activations."""
    return kind in _LEAVES or is_of(kind, "transformers.activations")


def activation(name: object) -> str:
    """Our name of a config's activation."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise Unsupported(f"the activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_of(function: Any) -> str:
    """Our name of what a module calls as its activation."""
    kind = type(function)
    if kind is nn.GELU:
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if kind in (nn.SiLU, nn.ReLU):
        return "silu" if kind is nn.SiLU else "relu"
    if is_of(kind, "transformers.activations"):
        found = _CLASSES.get(kind.__name__) or _named_inside(kind.__name__, function.__dict__.get("act"))
        if found is not None:
            return found
    if not isinstance(function, nn.Module) and function in _FUNCTIONS:
        return _FUNCTIONS[function]
    raise Unsupported(
        f"the activation {function} is not supported; supported are those that transformers calls "
        f"{', '.join(ACTIVATIONS)}, and torch's gelu, silu and relu"
    )


def _named_inside(kind: str, act: Any) -> str | None:
    """GELUActivation and GELUTanh call an attribute, which may be a function of torch or their own."""
    own = getattr(act, "__qualname__", "")
    if kind == "GELUActivation" and (act is F.gelu or own == "GELUActivation._gelu_python"):
        return "gelu"
    is_torch = isinstance(act, functools.partial) and act.func is F.gelu and act.keywords == {"approximate": "tanh"}
    return "gelu_tanh" if kind == "GELUTanh" and (is_torch or own == "GELUTanh._gelu_tanh_python") else None


def linear(*modules: nn.Module) -> Projection:
    """The stacked projection of plain linear modules."""
    for module in modules:
        if type(module) is not nn.Linear:
            raise Unsupported(
                f"expected a torch.nn.Linear, got {type(module).__module__}.{type(module).__name__}; "
                f"merge adapters or undo quantization first"
            )
    plain: list[Any] = list(modules)
    return Projection(tuple(m.weight for m in plain), tuple(m.bias for m in plain))


def layer_norm(module: Any) -> Norm:
    """A plain layernorm over the last dim."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        raise Unsupported(f"expected a torch.nn.LayerNorm over one dim, got {module}")
    return Norm(module.weight, module.bias, module.eps)


def table(module: Any) -> tuple[Tensor, int | None]:
    """The rows of a plain embedding, and which of them gets no gradient."""
    if type(module) is not nn.Embedding:
        raise Unsupported(f"expected a torch.nn.Embedding, got {type(module).__module__}.{type(module).__name__}")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise Unsupported(f"max_norm, scale_grad_by_freq and sparse of an embedding are not supported, got {module}")
    return module.weight, module.padding_idx


class Drops:
    """How much each module of a model drops in training.

    Where all modules are in one mode, that is for the call to say. Where they are not, those in eval mode drop nothing.

    >>> model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2).eval())
    >>> [Drops(model.modules()).of(dropout) for dropout in model]
    [0.1, 0.0]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._are_mixed = len({m.training for m in modules}) > 1

    def of(self, dropout: nn.Module) -> float:
        """The probability of a dropout module; 0 of torch.nn.Identity, which people put in its place."""
        return 0.0 if type(dropout) is nn.Identity else self.of_weights(dropout, dropout)

    def of_weights(self, attention: nn.Module, dropout: Any) -> float:
        """The same of an attention, which takes the probability from a dropout module, or has it, and its own mode."""
        if isinstance(dropout, nn.Module):
            if type(dropout) is not nn.Dropout:
                raise Unsupported(f"expected a torch.nn.Dropout, got {type(dropout).__name__}")
            dropout = dropout.p
        return 0.0 if self._are_mixed and not attention.training else float(dropout)


def recomputes(layer: Any) -> bool:
    """Whether gradient checkpointing is on for a layer of transformers."""
    return bool(getattr(layer, "gradient_checkpointing", False) and layer.training)


def require(config: Any, allowed: dict[str, Iterable[object]]) -> None:
    """Raises unless each option of the config has one of the allowed values; an option it lacks is fine."""
    for name, values in allowed.items():
        value = getattr(config, name, None)
        if value is not None and value not in list(values):
            expected = " or ".join(repr(v) for v in values)
            raise Unsupported(f"config.{name} = {value!r} is not supported; expected {expected}")


def check_causal(config: Any, attention: Any) -> None:
    """Raises where a decoder was told to look ahead, by its config or in one of its layers."""
    require(config, {"is_causal": [True]})
    if not attention.is_causal:
        raise Unsupported("an attention of the model has is_causal = False, expected True: it would see later tokens")
