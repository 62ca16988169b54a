"""Texts and pairs of texts to scores: a classifier of transformers, or a CrossEncoder of sentence-transformers.

The layers take a batch at once. The head runs text by text, by one thread, on the one token that it reads (all of them
where it takes their mean): torch's matmuls give other bits in other batches. So logits have the same bits alone and in
any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft._torch import own_modules
from weft.jobs.embed.identity import Beside, identity_of
from weft.jobs.embed.loading import (
    check_dtype,
    load_classifier,
    load_tokenizer,
    one_thread,
    text_length,
    tokenizer_backend,
)
from weft.jobs.embed.recipe import (
    ABOUT,
    ACTIVATIONS,
    SCORES,
    NotPlain,
    Wish,
    check_transformer,
    prompts_of,
    read_json,
    transformer_options,
)
from weft.models.family import HeadKind
from weft.models.twin import plain_of
from weft.packed.api import pack
from weft.packed.batch import PackedBatch

_SCORES: dict[str, Any] = {  # what the Transformer of a CrossEncoder says of itself
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
_CLASSIFIER = "ForSequenceClassification"

TextOrPair = str | tuple[str, str]


def is_scorer(folder: Path) -> bool:
    """Whether a folder holds what `Scorer` takes: it says so itself, by its class."""
    if read_json(folder / ABOUT, dict).get("model_type") == SCORES:
        return True
    named = read_json(folder / "config.json", dict).get("architectures") or [""]
    return not (folder / "modules.json").exists() and str(named[0]).endswith(_CLASSIFIER)


@dataclass(frozen=True)
class ScoredTokens:
    """The tokens of a text or of a pair, special ones included; `types` tell the texts of a pair apart, where the model
    reads such."""

    ids: list[int]
    types: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Scorer:
    """A model that scores texts or pairs of texts, one number for each of its `labels`.

    `folder` is what `save_pretrained` of transformers' `*ForSequenceClassification` or of a `CrossEncoder` wrote.
    `max_length`, the tokens of a text or a pair, is the folder's unless given; `dtype` as of `Encoder`. A pair that is
    too long loses tokens of the longer text first, as theirs do. `activation` names what `activate` does.
    """

    def __init__(self, folder: Path, *, max_length: int | None = None, dtype: str | None = None) -> None:
        check_dtype(dtype)
        self.recipe = ScoreRecipe.of(folder)
        self._identity = Beside(lambda: identity_of(self.recipe.folders))
        where = self.recipe.transformer
        tokenizer = load_tokenizer(where, self.recipe.max_length, is_plain=self.recipe.is_plain)
        model = load_classifier(where, dtype)
        self.dtype = str(model.dtype).removeprefix("torch.")
        if self.recipe.is_widened and self.dtype != "float32":
            raise NotPlain(f"{folder}: keep_in_fp32_modules is not supported for {self.dtype}; pass --dtype float32")
        self.prompt = self.recipe.prompt
        self.labels = [str(model.config.id2label[i]) for i in range(int(model.config.num_labels))]
        self.max_length = text_length(tokenizer, model, self.recipe.max_length, max_length, pairs=True)
        self.tokenizer = tokenizer_backend(tokenizer, self.max_length, self.recipe.lower_case)
        self._head = _ClassifierHead(model)
        takes = signature(plain_of(self._head.base).forward).parameters
        self._has_types = "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in takes
        self.activation = self.recipe.activation or _usual(self.recipe, model.config)
        self._activation: nn.Module = nn.Softmax(dim=-1) if self.activation == "Softmax" else _module(self.activation)

    def identity(self) -> dict[str, Any]:
        """What makes its scores these and no others: the content of the folder, and the options."""
        options = {"prompt": self.prompt, "max_length": self.max_length, "dtype": self.dtype}
        return {"model": self._identity.result(), **options}

    def tokenize(self, inputs: Sequence[TextOrPair]) -> list[ScoredTokens]:
        """The tokens of each text or pair; of a pair, the prompt of the folder is put before the first."""
        return self.read(self.tokenizer.encode_batch_fast(self.prompted(inputs)))

    def prompted(self, inputs: Sequence[TextOrPair]) -> list[TextOrPair]:
        """Texts or pairs with the prompt before them."""
        if not self.prompt:
            return list(inputs)
        return [self.prompt + i if isinstance(i, str) else (self.prompt + i[0], i[1]) for i in inputs]

    def read(self, encodings: Sequence[Any]) -> list[ScoredTokens]:
        """What `score` takes of what the tokenizer made."""
        return [ScoredTokens(one.ids, one.type_ids if self._has_types else None) for one in encodings]

    @torch.no_grad()
    def score(self, ids: Sequence[ScoredTokens]) -> Tensor:
        """float32 logits [texts, labels]."""
        if not ids:
            return torch.zeros(0, len(self.labels))
        if any(not len(one) for one in ids):
            raise ValueError("got a text without tokens, of which a classifier can read none; leave it out")
        lengths = torch.tensor([len(one) for one in ids], dtype=torch.int64)
        tokens = torch.tensor([token for one in ids for token in one.ids], dtype=torch.int64)
        batch = PackedBatch.from_values(tokens, lengths)
        types = torch.tensor([t for one in ids for t in one.types or ()]) if self._has_types else None
        return self._head(batch, types, [one.ids for one in ids])

    def activate(self, logits: Tensor) -> Tensor:
        """float32 [texts, labels]: what `CrossEncoder.predict` gives for such logits; of a folder that no CrossEncoder
        saved, what transformers' text classification gives.

        Row by row: torch computes the last few elements of a tensor by other instructions than the rest.
        """
        rows = [self._activation(row[None]) for row in logits.float()]
        return torch.cat(rows) if rows else logits.float()


@dataclass(frozen=True)
class ScoreRecipe:
    """What a folder says: where its transformer is, how texts are tokenized, what becomes of logits.

    `activation` is a class of torch.nn, None where the folder leaves it open. `is_cross`: a CrossEncoder saved it, at
    some time. `is_widened`: parts of it are to be computed in float32, whatever the weights are.
    """

    transformer: Path
    folders: tuple[Path, ...]
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    activation: str | None = None
    is_cross: bool = False
    is_widened: bool = False
    is_plain: bool = False

    @classmethod
    def of(cls, folder: Path) -> ScoreRecipe:
        about = read_json(folder / ABOUT, dict)
        kind = about.get("model_type", SCORES)
        if kind != SCORES:
            raise ValueError(f"{folder} holds a {kind}, expected a {SCORES} or a classifier; weft embed takes it")
        inner = _inner(folder)
        check_transformer(folder, inner)
        config = read_json(inner / "config.json", dict)
        named = str((config.get("architectures") or [""])[0])
        if not named.endswith(_CLASSIFIER):
            raise ValueError(
                f"{folder} holds a {named or 'model without a name'}, expected a class that ends in {_CLASSIFIER}, "
                f"with one result for a text or a pair"
            )
        options = transformer_options(inner, _SCORES)
        own = config.get("sentence_transformers") or {}
        activation = about.get("activation_fn") or own.get("activation_fn") or config.get(_OLD_ACTIVATION)
        is_cross = "model_type" in about or bool(own) or _OLD_ACTIVATION in config
        return cls(
            inner, tuple(dict.fromkeys((folder, inner))), options.get("max_seq_length") or None,
            bool(options.get("do_lower_case")), Wish().of(prompts_of(about), about.get("default_prompt_name")),
            None if activation is None else _torch_name(folder, str(activation)), is_cross,
            bool(about.get("keep_in_fp32_modules")), not (folder / "modules.json").exists(),
        )  # fmt: skip


_OLD_ACTIVATION = "sbert_ce_default_activation_function"  # in the config of the model, before 4.0


def _inner(folder: Path) -> Path:
    """Where the transformer of a folder is; raises where there is more than that."""
    modules = read_json(folder / "modules.json", list)
    kinds = [str(m.get("type", "")) if isinstance(m, dict) else "" for m in modules]
    if not modules:
        return folder
    known = [kind.startswith("sentence_transformers.") and kind.endswith(".Transformer") for kind in kinds]
    if known != [True]:
        raise NotPlain(
            f"{folder} has the modules {', '.join(kinds)}; expected one Transformer, whose head gives scores"
        )
    path = Path(str(modules[0].get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{folder / 'modules.json'} has a module outside of the folder: {str(path)!r}")
    return folder / path


def _torch_name(folder: Path, named: str) -> str:
    """The class of torch.nn that a folder names as its activation."""
    module, _, name = named.rpartition(".")
    if not module.startswith("torch.nn") or name not in (*ACTIVATIONS, "Softmax"):
        raise NotPlain(f"{folder}: got the activation {named}, expected torch.nn's {', '.join(ACTIVATIONS)} or Softmax")
    return name


def _usual(recipe: ScoreRecipe, config: Any) -> str:
    """The activation where a folder names none: a CrossEncoder's, or that of transformers' text classification."""
    one = int(config.num_labels) == 1
    if recipe.is_cross:
        return "Sigmoid" if one else "Identity"
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return "Identity"
    return "Sigmoid" if one or problem == "multi_label_classification" else "Softmax"


def _module(name: str) -> nn.Module:
    made: nn.Module = getattr(nn, name)()
    return made


class _ClassifierHead:
    """A classifier whose layers are packed and take a batch; its head is the model's own code, and takes one text."""

    def __init__(self, model: Any) -> None:
        inner: Any = getattr(model, model.base_model_prefix)
        pooler = getattr(inner, "pooler", None)
        if pooler is not None:
            inner.pooler = None  # it belongs to the head: it takes one text, too
        packed: Any = pack(model)
        if packed._weft_head not in (HeadKind.FIRST, HeadKind.LAST):
            raise NotPlain(f"{type(model).__name__} gives no result for a text as a whole")
        self.base: Any = getattr(packed, packed._weft_base)
        self._reads_last = packed._weft_head is HeadKind.LAST
        self._reads_all = not self._reads_last and getattr(model.config, "classifier_pooling", "cls") == "mean"
        self._padding: int | None = model.config.get_text_config().pad_token_id
        self._below = _StatesOfOne(pooler)
        self._plain: Any = plain_of(packed)
        own_modules(self._plain)[packed._weft_base] = self._below

    def __call__(self, batch: PackedBatch, types: Tensor | None, ids: list[list[int]]) -> Tensor:
        """float32 [texts, labels]."""
        given = {} if types is None else {"token_type_ids": types}
        states: Tensor = self.base(batch, return_dict=True, **given).last_hidden_state
        starts = batch.cu_seqlens.tolist()
        with one_thread():
            return torch.cat([self._one(states, start, one) for start, one in zip(starts, ids, strict=False)])

    def _one(self, states: Tensor, start: int, ids: list[int]) -> Tensor:
        """[1, labels]. A copy, which begins where torch begins a tensor: inside of a batch, bits may differ."""
        if not self._reads_all:
            at = self._last(ids) if self._reads_last else 0
            start, ids = start + at, ids[at : at + 1]
        self._below.states = states[None, start : start + len(ids)].clone()
        found: Tensor = self._plain(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), return_dict=True
        ).logits
        return found.float()

    def _last(self, ids: list[int]) -> int:
        """The place of the last token that is not padding, as a decoder's head finds it: the first where all are."""
        if self._padding is None:
            return len(ids) - 1
        return max((i for i, token in enumerate(ids) if token != self._padding), default=0)


class _StatesOfOne(nn.Module):
    """Stands for the layers below a head: it gives the states of the text that is at hand, and what the pooler of the
    model makes of them."""

    states: Tensor

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler

    def forward(self, *args: Any, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

        pooled = None if self._pooler is None else self._pooler(self.states)
        return Output(last_hidden_state=self.states, pooler_output=pooled)
