"""What the file of a family is written with: `Family`, and functions that read modules strictly.

Nothing unknown is ever computed as if it were known. What a module does is read from the module, not from the config
that it was once made with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import Unsupported
from weft.models.modules import check_untouched, home_of, is_of
from weft.models.options import Options, require
from weft.models.spec import Norm, NormKind, Projection, Transformer, VocabularyHead


class HeadKind(Enum):
    """Which states a head reads."""

    TOKENS = "tokens"  # each token by itself
    NEXT_TOKEN = "next token"  # each token by itself, its label is the next one's
    FIRST = "first"  # the first column of the padded states
    LAST = "last"  # the last token of each row that is not the padding token
    SPANS = "spans"  # each token by itself, a softmax over the columns


@dataclass(frozen=True)
class Head:
    """One class of a family with a head. `vocabulary` reads logits of words, which ranks share, out of such a model.

    `loss` is the name of the function of transformers that its `loss_function` is: it counts `num_items_in_batch`, and
    users may replace it. None where the class has a loss of its own, which nobody can replace.
    """

    kind: HeadKind
    vocabulary: Callable[[Any], VocabularyHead] | None = None
    loss: str | None = None


class Tokens(Protocol):
    """What the positions of a family depend on: the tokens of a call, as `weft.packed.PackedBatch` has them."""

    @property
    def values(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def columns(self) -> Tensor: ...
    def gather(self, padded: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class StageNames:
    """Where the modules that pipeline stages share out are: in the base model, and the head in the whole one.

    What else there is before the layers has the names `first`, and what every stage needs `everywhere`. A description
    is read of a stage as of a whole model (`modules()` are the stage's), with None for what is on another stage.
    """

    base: str
    embedding: str
    layers: str
    norm: str
    head: str
    everywhere: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """All that weft knows of a family of Hugging Face models.

    base       the class of the base model; `heads` are the classes around it
    describe   reads a base model
    output     the class of transformers.modeling_outputs that the base model returns
    positions  the positions [T] of tokens that say none, (model, tokens, padded ids); None: columns of the padded ids
    types      the types [T] of tokens that say none, (model, positions); None: zeros
    has_cache  a decoder: it fills a cache of keys and values
    on_ranks   `parallelize` takes it
    stages     how it is cut into pipeline stages
    options    what becomes of each option of its config class
    """

    base: str
    describe: Callable[[Any], Transformer]
    output: str
    heads: Mapping[str, Head]
    positions: Callable[[Any, Tokens, Tensor | None], Tensor] | None = None
    types: Callable[[Any, Tensor], Tensor] | None = None
    has_cache: bool = False
    on_ranks: bool = False
    stages: StageNames | None = None
    options: Options = field(kw_only=True)

    @property
    def classes(self) -> list[str]:
        """The names of its classes."""
        return [self.base, *self.heads]

    def read(self, model: Any) -> Transformer:
        """The description of a base model. Raises where a module in it would not compute what its class does, or an
        option of its config would be ignored."""
        for config in configs_in(model):
            self.options.check(config)
        check_attention(model.config)
        check_same_attention(model)
        home = home_of(model)
        check_untouched(model, lambda kind: is_of(kind, home) or is_known(kind), called=called_in(model))
        return self.describe(model)

    def base_of(self, model: nn.Module) -> str:
        """The name of the base model in one of the classes `heads`."""
        for name, child in model.named_children():
            if type(child).__name__ == self.base:
                return name
        raise Unsupported(f"{type(model).__name__} has no {self.base}; is it packed already, or changed?")


def encoder_heads(
    name: str, masked: Callable[[Any], VocabularyHead] | None = None, *, answers: bool = True, loss: str | None = None
) -> dict[str, Head]:  # fmt: skip
    """The usual classes around an encoder; `masked` reads the head of its masked language model, whose `loss` it is.
    `answers`: it has one for question answering."""
    heads = {
        f"{name}ForMaskedLM": Head(HeadKind.TOKENS, masked, loss),
        f"{name}ForTokenClassification": Head(HeadKind.TOKENS),
        f"{name}ForSequenceClassification": Head(HeadKind.FIRST),
    }
    return heads | ({f"{name}ForQuestionAnswering": Head(HeadKind.SPANS)} if answers else {})


def own_head(model: nn.Module, head: Any) -> Any:
    """A head of the model's own file in transformers. Raises where it, or a part of it, would compute another thing."""
    home = home_of(model)
    check_untouched(head, lambda kind: is_of(kind, home) or is_known(kind), called=())
    if not is_of(type(head), home):
        raise Unsupported(f"the head of {type(model).__name__} is a {type(head).__name__}, expected the original one")
    return head


CAUSAL_LOSS, MASKED_LOSS = "ForCausalLMLoss", "ForMaskedLMLoss"


def check_loss(model: Any, name: str) -> None:
    """Raises where a model computes another loss than transformers' function `name`, by its config or a user's hand."""
    found: Any = model.loss_function
    own = getattr(found, "__name__", type(found).__name__)
    if own != name or not str(getattr(found, "__module__", "")).startswith("transformers."):
        raise Unsupported(
            f"the loss_function of {type(model).__name__} is {own}, expected transformers' {name}, which ranks compute "
            "on logits as they lie; leave labels out and compute the loss from the logits"
        )


def causal_head(model: Any) -> VocabularyHead:
    """Of a language model whose head is one linear."""
    return VocabularyHead(linear(model.lm_head))


def decoder_heads(name: str, causal: str) -> dict[str, Head]:
    """The usual classes around a decoder; `causal` is the end of the name of its language model."""
    return {
        f"{name}{causal}": Head(HeadKind.NEXT_TOKEN, causal_head, CAUSAL_LOSS),
        f"{name}ForSequenceClassification": Head(HeadKind.LAST),
        f"{name}ForTokenClassification": Head(HeadKind.TOKENS),
        f"{name}ForQuestionAnswering": Head(HeadKind.SPANS),
    }


def check_same_attention(model: Any) -> None:
    """Raises where a layer comes from a model with another attention: it would misread the masks of this one."""
    wanted = getattr(model.config, "_attn_implementation", None)
    for name, module in model.named_modules():
        config = module.__dict__.get("config", model.config)
        found = wanted if config is model.config else getattr(config, "_attn_implementation", wanted)
        if found != wanted:
            raise Unsupported(
                f"{type(model).__name__}.{name} was made for the attention {found!r}, and the model for {wanted!r}; "
                f"give both the same by set_attn_implementation"
            )


def configs_in(model: Any) -> list[Any]:
    """The config of a model, and those of modules that were made by another one."""
    found = (module.__dict__.get("config") for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def called_in(base: Any) -> list[nn.Module]:
    """The modules of a base model that run by their own code: itself, and its pooler."""
    pooler = getattr(base, "pooler", None)
    return [base] if pooler is None else [base, *pooler.modules()]


# What transformers calls the activations that are known, for errors
_ACTIVATIONS = (
    "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh", "silu",
    "swish", "relu",
)  # fmt: skip
# Those of its classes that have no options.
_CLASSES = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}
_FUNCTIONS = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", torch.relu: "relu"}
_LEAVES = (
    nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh,
)  # fmt: skip


def is_known_leaf(kind: type) -> bool:
    """Whether a class is one of those that adapters read: torch's own, and transformers' activations."""
    return kind in _LEAVES or is_of(kind, "transformers.activations")


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
        f"{', '.join(_ACTIVATIONS)}, and torch's gelu, silu and relu"
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


def rms_norm(module: Any, kind: str, *, eps: str = "variance_epsilon", shift: float = 0.0) -> Norm:
    """One of transformers' RMSNorms, of the class `kind`, which keeps its epsilon under the name `eps`."""
    if type(module).__name__ != kind or not is_of(type(module), type(module).__module__):
        raise Unsupported(f"expected a {kind}, got {type(module).__name__}")
    return Norm(module.weight, None, getattr(module, eps), NormKind.RMS, shift)


def table(module: Any, kind: type[Any] = nn.Embedding) -> tuple[Tensor, int | None]:
    """The rows of a plain embedding, and which of them gets no gradient."""
    if type(module) is not kind:
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


def check_causal(config: Any, attention: Any) -> None:
    """Raises where a decoder was told to look ahead, by its config or in one of its layers."""
    require(config, {"is_causal": [True]})
    if not attention.is_causal:
        raise Unsupported("an attention of the model has is_causal = False, expected True: it would see later tokens")


def check_bidirectional(attention: Any) -> None:
    """Raises where an attention of an encoder hides later tokens: its model was once made as a decoder."""
    if attention.is_causal:
        raise Unsupported(
            "an attention of the encoder has is_causal = True, expected False: some kernels of transformers would hide "
            "later tokens, and others not; make the model by a config with is_decoder = False"
        )


def is_known(kind: type) -> bool:
    """Whether families know a class that is not of their own file in transformers."""
    return is_known_leaf(kind) or (is_of(kind, "transformers.pytorch_utils") and kind.__name__ == "Conv1D")


_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def check_attention(config: Any) -> None:
    """Raises where the model is told to compute attention by something that is not transformers' own."""
    name = getattr(config, "_attn_implementation", None)
    if name in (None, "eager", "weft"):  # the last is `weft.packed.registry`, the same attention
        return
    table: Any = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    function = table.get(name)
    if name not in _ATTENTION or not str(getattr(function, "__module__", "transformers.")).startswith("transformers."):
        raise Unsupported(
            f"the attention implementation {name!r} is not transformers' own, and a packed model would not call it; "
            f'call set_attn_implementation("sdpa") on the model'
        )


# Types whose frequencies do not depend on the length of the input.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_rope(kind: str) -> None:
    """Raises unless the type of rotary positions is one that is supported."""
    if kind not in _ROPE_TYPES:
        raise Unsupported(f"rope_type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
