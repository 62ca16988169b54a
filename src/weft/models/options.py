"""The options of a config: what becomes of each, so that none is ignored unknowingly.

A family lists every option that its config class declares. One that is in no list, because transformers is newer than
weft or the class is somebody's own, is an error unless it has its default value. What no class declares, nobody reads:
but for the few options that code of transformers asks for all the same, which stand among `fixed`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from weft.errors import Unsupported


@dataclass(frozen=True)
class Options:
    """The options of one family's config class.

    followed  the description says what they say: read from the config, from modules that were made by it, or by code of
              transformers that runs as it is (a head, a loss, generation)
    idle      nothing that is computed from given weights depends on them
    fixed     must have one of these values
    """

    followed: Set[str]
    idle: Set[str]
    fixed: Mapping[str, Iterable[object]] = field(default_factory=dict)

    @property
    def names(self) -> Set[str]:
        """All of them."""
        return self.followed | self.idle | self.fixed.keys()

    def check(self, config: Any) -> None:
        """Raises where a config says something that would be ignored."""
        require(config, {**COMMON.fixed, **self.fixed})
        known, kind = COMMON.names | self.names, type(config)
        for name, default in declared(kind).items():
            value = getattr(config, name, default)
            if name not in known and value is not default and value != default:
                raise Unsupported(
                    f"{kind.__name__}.{name} = {value!r} is an option that weft does not know, so it would be ignored; "
                    f"expected {default!r}, its default; leave it at that, or use the model without weft"
                )


# Of all config classes, or with one meaning wherever they are.
COMMON = Options(
    followed={
        "vocab_size", "max_position_embeddings", "pad_token_id", "tie_word_embeddings", "use_cache", "return_dict",
        "output_hidden_states", "id2label", "label2id", "problem_type",
    },
    idle={
        "architectures", "transformers_version", "dtype",  # weights say what they are
        "initializer_range", "bos_token_id", "eos_token_id",
        "chunk_size_feed_forward",  # the same numbers, a part of the rows at a time
    },
    fixed={"is_heterogeneous": (False,), "is_encoder_decoder": (False,)},
)  # fmt: skip


def require(config: Any, allowed: Mapping[str, Iterable[object]]) -> None:
    """Raises unless each option of the config has one of the allowed values; an option it lacks is fine."""
    for name, values in allowed.items():
        value = getattr(config, name, None)
        if value is not None and value not in list(values):
            expected = " or ".join(repr(v) for v in values)
            raise Unsupported(f"config.{name} = {value!r} is not supported; expected {expected}")


def declared(kind: type) -> dict[str, Any]:
    """The options that a config class and those above it declare, by fields or as arguments, and their defaults.

    >>> class Config:
    ...     def __init__(self, width=8, **rest): ...
    >>> class Mine(Config):
    ...     def __init__(self, scale=1.0, **rest): ...
    >>> declared(Mine)
    {'width': 8, 'scale': 1.0}
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        if "__init__" in base.__dict__:
            parameters = inspect.signature(base.__dict__["__init__"]).parameters.values()
            found |= {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    found.pop("self", None)
    if is_dataclass(kind):
        found |= {f.name: f.default_factory() for f in fields(kind) if f.default_factory is not MISSING}
    return found
