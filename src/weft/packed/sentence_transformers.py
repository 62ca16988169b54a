"""Models of sentence-transformers: each transformer inside is packed, wherever it is; everything else stays theirs.

A packed model is a copy of the modules around the transformers, with the same parameters under the same names: it
embeds, scores, trains and is saved by sentence-transformers' own code. What is set or replaced in it later counts in it
alone; what is set or replaced in the original is an error at its next call. The library itself is not imported here:
who has such a model has imported it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor, nn

from weft._torch import COMPILED_CALL, own_modules, shallow_copy
from weft.errors import Unsupported
from weft.models.twin import Twin, is_own_forward, plain_of, twin_of
from weft.packed.huggingface import PackedBase

MODELS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")
_HOME = "sentence_transformers"
_CONTAINERS = (nn.Sequential, nn.ModuleDict, nn.ModuleList)
# Modules of the library that compute each token by itself, or by the mask: they read nothing of padding. Not so CNN,
# whose windows reach into it.
_READ_NO_PADDING = frozenset(
    {
        "Transformer", "MLMTransformer", "Router", "Asym", "Pooling", "Dense", "Normalize", "Dropout", "LayerNorm",
        "WeightedLayerPooling", "WordWeights", "SpladePooling", "SparseAutoEncoder", "SparseStaticEmbedding",
        "StaticEmbedding", "WordEmbeddings", "BoW", "MultiVectorMask", "BaseTokenPooling", "LogitScore",
    }
)  # fmt: skip
# What modules have made of features: some losses call a model twice with the same ones.
_MADE = frozenset(
    {
        "token_embeddings", "sentence_embedding", "all_layer_embeddings", "cls_token_embeddings", "token_weights_sum",
        "scores", "causal_logits",
    }
)  # fmt: skip
_OWN = {"processor", "tokenizer", "input_formatter", "_prompt_length_mapping"}  # of a Transformer: its twin has others
# Attributes that the library fills in by itself, or that say nothing about results.
_IDLE = frozenset(nn.Module().__dict__) | {
    "_prompt_length_mapping", "_method_signature_cache", "_chat_template_suffix_cache", "_model_card_vars",
    "model_card_data", "_model_card_text", "_modules_placed", "_accelerate_placement_hook", "_device_map", "_legacy",
    "is_hpu_graph_enabled", "_similarity", "_similarity_pairwise", "input_formatter", COMPILED_CALL,
    "deprecation_warnings", "_in_target_context_manager", "verbose", "init_kwargs", "files_loaded",
}  # fmt: skip
_LAZY = frozenset({"embedding_dimension"})  # None until the library has seen it


def is_library_model(model: nn.Module) -> bool:
    """Whether this is one of sentence-transformers' models, or of a class made from one."""
    return any(kind.__name__ in MODELS and _is_theirs(kind) for kind in type(model).__mro__)


def pack_library_model(model: Any, pack_one: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The packed twin; `pack_one` packs a transformer of Hugging Face."""
    copies = _Copies(pack_one)
    getattr(model, "similarity_fn_name", None)  # which the library decides on when it is first asked
    twin: Any = copies.of(model, type(model).__name__)
    if not copies.packed:
        raise Unsupported(
            f"this {type(model).__name__} has no transformer inside, so nothing of it pads; use it as it is"
        )
    for name in ("prompts", "_model_card_vars", "model_card_data"):
        if name in twin.__dict__:
            twin.__dict__[name] = copy.copy(twin.__dict__[name])
    card = twin.__dict__.get("model_card_data")
    if getattr(card, "model", None) is model:
        card.model = twin
    twin.__dict__["_weft_origin"] = _Originals(copies.copied)
    return twin  # type: ignore[no-any-return]


class _Copies:
    """Copies of modules down to the transformers, which are packed. What is in two places is so in the copy, too."""

    def __init__(self, pack_one: Callable[[nn.Module], nn.Module]) -> None:
        self._pack_one = pack_one
        self._made: dict[int, nn.Module] = {}
        self.copied: list[tuple[str, nn.Module]] = []
        self.packed = 0

    def of(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) not in self._made:
            self._made[id(module)] = self._new(module, path)
        return self._made[id(module)]

    def _new(self, module: nn.Module, path: str) -> nn.Module:
        if _is_transformer(module):
            self.packed += 1
            return self._pack_one(module)
        if isinstance(module, Twin):
            raise Unsupported(f"{path} is packed or parallel already; use it as it is")
        _check(module, path)
        self.copied.append((path, module))
        if is_library_model(module):
            made = twin_of(module, PackedLibraryModel, {"_weft": None})
        else:
            holds = any(map(_is_transformer, module.children()))
            made = _transformer_twin(module) if holds else shallow_copy(module)
        made.__dict__.pop("forward", None)  # its own, which some losses leave behind, bound to the original
        if not any(map(_is_transformer, module.modules())):
            return made
        for name, child in own_modules(module).items():
            own_modules(made)[name] = None if child is None else self.of(child, f"{path}.{name}")
        return made


def _check(module: nn.Module, path: str) -> None:
    """Raises where a module may read what a packed transformer does not compute."""
    kind = type(module)
    if getattr(module, "backend", "torch") != "torch":
        raise Unsupported(f"{path} computes by {module.backend}, which cannot be packed; load it with backend='torch'")
    known = any(base.__name__ in (*MODELS, *_READ_NO_PADDING) and _is_theirs(base) for base in kind.__mro__)
    is_own = known and is_own_forward(module) and _is_theirs(kind.forward)
    if not is_own and kind not in _CONTAINERS:
        raise Unsupported(
            f"{path} is a {kind.__module__}.{kind.__name__}, which is not known to leave padding alone, and padding is "
            f"never computed; known are sentence-transformers' {', '.join(sorted(_READ_NO_PADDING))}. If it does, pack "
            f"the transformer alone: model[0].model = weft.pack(model[0].model)"
        )


def _transformer_twin(module: nn.Module) -> nn.Module:
    """Of a Transformer: with a tokenizer of its own, so that a length that is set here is set here only."""
    twin: Any = twin_of(module, PackedTransformer, {"_weft": None})
    for name in _OWN & set(twin.__dict__):
        twin.__dict__[name] = copy.copy(twin.__dict__[name])
    formatter = twin.__dict__.get("input_formatter")
    if hasattr(formatter, "processor"):
        formatter.processor = twin.processor
    return twin  # type: ignore[no-any-return]


class PackedLibraryModel(Twin):
    """Mixed into a model of sentence-transformers."""

    _weft: None

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self.weft_check()
        return original(self, **arguments)

    def weft_check(self) -> None:
        super().weft_check()
        model: Any = self
        for path, module in _around(model, type(self).__name__):
            if not isinstance(module, Twin):  # somebody may have put it here
                _check(module, path)

    @property
    def similarity(self) -> Any:
        self.weft_check()
        return super().similarity  # type: ignore[misc]

    @property
    def similarity_pairwise(self) -> Any:
        self.weft_check()
        return super().similarity_pairwise  # type: ignore[misc]


class _Originals:
    """The modules that were copied, and what each was like: its modules, and what is set in it and in its tokenizer."""

    def __init__(self, copied: list[tuple[str, nn.Module]]) -> None:
        self._were = [
            (path, weakref.ref(module), {name: _Setting(value) for name, value in _state(module).items()})
            for path, module in copied
        ]

    def model(self) -> nn.Module | None:
        return self._were[0][1]()

    def changed(self) -> str | None:
        for path, reference, then in self._were:
            module = reference()
            if module is None:
                continue
            now = _state(module)
            for name in {**then, **now}:
                was, is_there = then.get(name), name in now
                if was is None or not is_there or not (was.is_still(now[name]) or was.is_filled_later(name)):
                    return f"modules or settings ({path}.{name})"
        return None


class _Setting:
    """A value as it was. Of plain values a copy, so that a change inside is seen; of others which object it was."""

    def __init__(self, value: Any) -> None:
        self._is_plain = _is_plain(value)
        self.value = copy.deepcopy(value) if self._is_plain else value

    def is_still(self, value: Any) -> bool:
        """Whether it is the same now."""
        if value is self.value or not self._is_plain:
            return value is self.value
        return type(value) is type(self.value) and value == self.value

    def is_filled_later(self, name: str) -> bool:
        """Whether the library itself fills it, and had not yet."""
        return self.value is None and name in _LAZY


def _state(module: nn.Module) -> dict[str, Any]:
    """What a module's copy does not share with it, by name."""
    state = {name: value for name, value in module.__dict__.items() if name not in _IDLE}
    patched = state.pop("forward", None)
    state["forward"] = None if is_own_forward(module) else patched
    state.update(own_modules(module))
    processor = module.__dict__.get("processor")
    for part in ("", "tokenizer"):
        words = getattr(processor, part, None) if part else processor
        values = getattr(words, "__dict__", {}).items()
        state |= {f"tokenizer.{name}": value for name, value in values if name not in _IDLE}
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, Enum))


def _around(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules around the transformers."""
    if not _is_transformer(module):
        yield path, module
        if any(map(_is_transformer, module.modules())):
            for name, child in module.named_children():
                yield from _around(child, f"{path}.{name}")


class PackedTransformer(Twin):
    """Mixed into the module of sentence-transformers that calls a transformer of Hugging Face."""

    _weft: None

    def weft_forward(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self.weft_check()
        module: Any = self
        features: dict[str, Any] = arguments["features"]
        is_unpooled = not _reads_pooler(module)
        for child in module.children():
            if isinstance(child, PackedBase) and child.weft_is_unpooled != is_unpooled:
                child.weft_is_unpooled = is_unpooled
        inside = [part for part in module.modules() if isinstance(part, PackedBase)] if _reads_masked(features) else []
        for part in inside:
            part.weft_share_recorders()
        if inside:
            module = shallow_copy(module)
            for name, child in module.named_children():
                own_modules(module)[name] = plain_of(child) if isinstance(child, Twin) else child
        given = {name: value for name, value in features.items() if name not in _MADE}
        features.update(original(module, **{**arguments, "features": given}))
        for part in inside:
            part.weft_share_recorders()
        return features


def _reads_pooler(module: Any) -> bool:
    """Whether what a Transformer hands on is the pooler's, for one of its kinds of inputs."""
    kinds = getattr(module, "modality_config", {}).values()
    return any("pooler_output" in str(kind["method_output_name"]) for kind in kinds)


def _reads_masked(features: dict[str, Any]) -> bool:
    """Whether states of tokens that the mask hides are asked for: ColBERT's queries are filled up with tokens that see
    the query and that nobody sees. Such a batch has one length, or nearly so: the model's own code computes it."""
    filled, mask = features.get("query_expansion_positions"), features.get("attention_mask")
    if not isinstance(filled, Tensor) or not isinstance(mask, Tensor):
        return False
    return bool((filled.bool() & (mask == 0)).any())


def _is_transformer(module: nn.Module) -> bool:
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__)


def _is_theirs(what: Any) -> bool:
    """Of a class or a function."""
    return str(what.__module__).split(".")[0] == _HOME
