"""What the adapters share: reading modules strictly, so that nothing unknown is ever computed as if it were known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from weft.packed.spec import Norm, Projection

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


class Unsupported(ValueError):
    """A model or an option that cannot be packed; the message names it and what can."""


def activation(name: object) -> str:
    """Our name of a config's activation."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise Unsupported(f"the activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


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


def require(config: Any, allowed: dict[str, Iterable[object]]) -> None:
    """Raises unless each option of the config has one of the allowed values; an option it lacks is fine."""
    for name, values in allowed.items():
        value = getattr(config, name, None)
        if value is not None and value not in list(values):
            expected = " or ".join(repr(v) for v in values)
            raise Unsupported(f"config.{name} = {value!r} is not supported; expected {expected}")
