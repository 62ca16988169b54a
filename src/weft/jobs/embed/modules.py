"""Texts to embeddings by sentence-transformers' own modules, with its transformers packed: for folders that hold more
than `recipe.py` knows. Importing that library takes seconds, so it is done only here.

A text is tokenized alone. Of a batch, only the transformer's layers are called at once; what comes behind them, its own
head too, runs text by text, by one thread, since torch's matmuls and sums give other bits in other batches. So an
embedding has the same bits alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft._torch import own_modules, shallow_copy
from weft.jobs.embed.encoder import Encoder
from weft.jobs.embed.identity import identity_of_all
from weft.jobs.embed.loading import DTYPES, UNREAD, check_complete, check_positions, one_thread
from weft.jobs.embed.recipe import DENSE, SPARSE, TOKENS, NotPlain, Wish, kind_of
from weft.models.family import HeadKind
from weft.models.twin import Twin, plain_of
from weft.packed.api import pack
from weft.packed.huggingface import PackedBase, PackedHead

_BY_TOKEN = {"input_ids", "attention_mask", "token_type_ids"}
_OF_ALL = {"modality", "prompt_length", "task"}


def open_encoder(folder: Path, **options: Any) -> Encoder | ModuleEncoder:
    """An `Encoder` where the folder is plain, else a `ModuleEncoder`; `options` are those of both."""
    try:
        return Encoder(folder, **options)
    except NotPlain as why:
        return ModuleEncoder(folder, why=str(why), **options)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """What their modules make of one text before its transformer, by name; as long as its tokens."""

    content: dict[str, Any]

    def __len__(self) -> int:
        mask, ids = self.content.get("attention_mask"), self.content.get("input_ids")
        if isinstance(mask, Tensor):
            return int(mask.sum())
        return ids.numel() if isinstance(ids, Tensor) else 1

    @property
    def is_plain(self) -> bool:
        """Whether it can be put side by side with others: nothing but ids, their mask and types, [1, length] each."""
        mask = self.content.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or set(self.content) - _BY_TOKEN - _OF_ALL:
            return False
        return bool((mask == 1).all()) and all(
            self.content[n].shape == mask.shape for n in _BY_TOKEN & set(self.content)
        )


class ModuleEncoder:
    """A model that embeds texts as `SentenceTransformer(folder).encode` does, whatever modules it has; so do a
    `SparseEncoder` and a `MultiVectorEncoder`, the latter as its `encode_document` where no task is asked for.

    The options are those of `Encoder`; a `task`, "query" or "document", also chooses the route of a model that has
    several. `why` says what makes this necessary.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_length: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
        dtype: str | None = None,
        why: str = "",
    ) -> None:
        self.kind = kind_of(folder)
        task = task or ("document" if self.kind == TOKENS else None)
        wish = Wish(prompt, prompt_name, task)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"got the dtype {dtype}, expected {' or '.join(DTYPES)}")
        self._folder = folder
        model = _load(folder, self.kind, dtype, why)
        self.prompt = wish.of(model.prompts, model.default_prompt_name)
        self._kwargs = {} if task is None else {"task": task}
        self.dtype = str(model.dtype).removeprefix("torch.")
        self._truncate: int | None = getattr(model, "truncate_dim", None)
        self._active: int | None = getattr(model, "max_active_dims", None)  # of a sparse vector at most
        has_transformer = any(map(_is_transformer, model.modules()))
        self._first, self._rest = _cut(pack(model) if has_transformer else model, task)
        self._head = _Head.of(self._first)
        self.max_length = self._limit(max_length, task)
        self.width = int(self._results(self.tokenize(["a"]))[0].shape[1])

    def _limit(self, asked: int | None, task: str | None) -> int | None:
        """Tokens of a text, None for no limit; set where it is asked for. A module may have one for each task."""
        first: Any = next(self._first.children())
        filled = getattr(first, "query_expansion", None) if task == "query" else None
        if asked is not None:
            if filled is not None:
                raise ValueError(
                    f"{self._folder} fills queries up to {filled['length']} tokens; leave --max-length out"
                )
            if asked < 1:
                raise ValueError(f"got at most {asked} tokens a text, expected at least 1")
            try:
                self._first.max_seq_length = asked
            except AttributeError as error:
                kind = type(next(self._first.children())).__name__
                raise ValueError(f"a {kind} takes a text of any length; leave --max-length out") from error
            if getattr(first, f"{task}_length", None) is not None:
                setattr(first, f"{task}_length", None)  # it would win
        limit = getattr(first, f"{task}_length", None) or self._first.max_seq_length
        if filled is not None:
            is_fixed = filled["strategy"] == "fixed" or limit is None
            limit = filled["length"] if is_fixed else max(limit, filled["length"])
        limit = None if limit is None or limit == math.inf else int(limit)
        for transformer in filter(_is_transformer, self._first.modules()):
            check_positions(limit or 0, transformer)
        return limit

    def identity(self) -> dict[str, Any]:
        """What makes its embeddings these and no others: the content of the folder, the library, and the options."""
        from sentence_transformers import __version__

        options = {"prompt": self.prompt, "max_length": self.max_length, "dtype": self.dtype}
        return {"model": identity_of_all(self._folder), **options, **self._kwargs, "sentence_transformers": __version__}

    @property
    def ends_normalized(self) -> bool:
        """Whether rows have length 1."""
        last = [type(module).__name__ for module in own_modules(self._rest).values()][-1:]
        return last == ["Normalize"] and self._truncate is None

    def tokenize(self, texts: Sequence[str]) -> list[TextFeatures]:
        """What each text is to the first module, prompt and special tokens included."""
        prompt = self.prompt or None
        return [TextFeatures(self._first.preprocess([text], prompt=prompt, **self._kwargs)) for text in texts]

    @torch.inference_mode()
    def embed(self, ids: Sequence[TextFeatures]) -> Tensor | list[dict[str, Tensor]]:
        """Of what `tokenize` gave: float32 [texts, width]; of a `SparseEncoder` the `indices` [n] of each text, which
        ascend, and its `values` [n]; of a `MultiVectorEncoder` its `vectors` [n, width]."""
        results = self._results(ids)
        if self.kind == DENSE:
            return torch.cat([torch.zeros(0, self.width), *results])
        if self.kind == TOKENS:
            return [{"vectors": vectors} for vectors in results]
        found = [(row, row[0].nonzero()[:, 0]) for row in results]
        return [{"indices": indices, "values": row[0, indices]} for row, indices in found]

    @torch.inference_mode()
    def _results(self, ids: Sequence[TextFeatures]) -> list[Tensor]:
        """[rows, width] of each text."""
        if not ids:
            return []
        rows: Iterable[dict[str, Any]]
        if self._is_one_call and all(text.is_plain for text in ids):
            rows = self._together(ids)
        else:
            rows = [self._first(dict(text.content), **self._kwargs) for text in ids]
        with one_thread():
            return [self._finished(row) for row in rows]

    @property
    def _is_one_call(self) -> bool:
        first = next(self._first.children())
        has_head = any(map(_is_head, first.children()))
        return isinstance(first, Twin) and (self._head is not None or not has_head)

    def _together(self, texts: Sequence[TextFeatures]) -> Iterator[dict[str, Any]]:
        """What the transformer makes of each text, called once. One at a time is copied: logits are large."""
        lengths = [len(text) for text in texts]
        longest = max(lengths) or 1
        features = dict(texts[0].content)
        for name in _BY_TOKEN & set(features):
            padded = [
                F.pad(text.content[name].long(), (0, longest - n)) for text, n in zip(texts, lengths, strict=True)
            ]
            features[name] = torch.cat(padded)
        shape = len(texts), longest
        if self._head is not None:
            states = self._head.states(features)
            each = ((_row(features, i, n, shape), _row(states, i, n, shape)) for i, n in enumerate(lengths))
            return (self._head(row, state, self._kwargs) for row, state in each)
        out: dict[str, Any] = self._first(features, **self._kwargs)
        return (_row(out, i, n, shape) for i, n in enumerate(lengths))

    def _finished(self, features: dict[str, Any]) -> Tensor:
        active = {} if self._active is None else {"max_active_dims": self._active}
        out = self._rest(features, **self._kwargs, **active) if len(self._rest) else features
        if self.kind == TOKENS:
            return out["token_embeddings"][0][out["attention_mask"][0].bool()].float()  # type: ignore[no-any-return]
        found = out.get("sentence_embedding")
        if not isinstance(found, Tensor) or found.dim() != 2:
            raise ValueError(
                f"{self._folder} gives {', '.join(out)}, and no sentence_embedding: weft embed writes one a text"
            )
        if self.kind == SPARSE:
            from sentence_transformers.util import select_max_active_dims

            found = found.to_dense() if found.layout != torch.strided else found
            return select_max_active_dims(found, self._active).float()
        return found[:, : self._truncate].float()


class _Head:
    """A transformer with a head that gives each token logits: its layers are packed, and take a batch; the head is
    theirs, and takes one text."""

    def __init__(self, base: Any, first: Any, below: _Below) -> None:
        self._base, self._first, self._below = base, first, below
        self._takes = _BY_TOKEN & set(signature(plain_of(base).forward).parameters)

    @classmethod
    def of(cls, model: Any) -> _Head | None:
        """Of a model with one module; None where it has no such head, or more of a transformer is asked for."""
        name: str = next(iter(own_modules(model)))
        module: Any = own_modules(model)[name]
        held: Any = next(filter(_is_head, module.children()), None)
        text = getattr(module, "modality_config", {}).get("text")
        is_usual = text == {"method": "forward", "method_output_name": "logits"}
        if not isinstance(module, Twin) or held is None or held._weft_head is not HeadKind.TOKENS or not is_usual:
            return None
        if getattr(held.config, "output_hidden_states", False):
            return None
        base_name, base = next((n, m) for n, m in held.named_children() if isinstance(m, PackedBase))
        first, plain, below = shallow_copy(model), plain_of(module), _Below()
        own_modules(first)[name] = plain
        own_modules(next(filter(_is_transformer, plain.children())))[base_name] = below
        return cls(base, first, below)

    def states(self, features: dict[str, Any]) -> dict[str, Any]:
        given = {name: features[name] for name in self._takes & set(features)}
        return {"states": self._base(**given, return_dict=True).last_hidden_state}

    def __call__(self, features: dict[str, Any], states: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        self._below.states = states["states"]
        return self._first(features, **options)  # type: ignore[no-any-return]


class _Below(nn.Module):
    """Stands for the layers below a head: it gives the states of the text that is at hand."""

    states: Tensor

    def forward(self, *args: Any, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self.states)


def _is_head(module: nn.Module) -> bool:
    return isinstance(module, PackedHead)


def _load(folder: Path, kind: str, dtype: str | None, why: str) -> Any:
    try:
        library: Any = import_module("sentence_transformers")
    except ImportError as error:
        raise ImportError(f"{why}; sentence-transformers can: pip install sentence-transformers") from error
    if not hasattr(library, kind):
        raise ImportError(f"{folder} holds a {kind}, which is in later versions; pip install -U sentence-transformers")
    options = {} if dtype is None else {"dtype": DTYPES[dtype]}
    model = getattr(library, kind)(str(folder), device="cpu", local_files_only=True, model_kwargs=options).eval()
    if model.dtype not in (None, *DTYPES.values()):  # again, since modules behind the transformer were rounded, too
        return _load(folder, kind, "float32", why)
    for module in model.modules():
        if _is_transformer(module):
            loaded = {name: getattr(p, "_is_hf_initialized", False) for name, p in module.named_parameters()}
            if loaded and not any(loaded.values()):
                raise ValueError(f"{folder}: this transformers does not say which weights were in the files")
            missing = (name for name, was_there in loaded.items() if not was_there)
            check_complete(folder, module, missing, unread=UNREAD)
    return model


def _is_transformer(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _cut(model: Any, task: str | None) -> tuple[Any, Any]:
    """The model with its first module only, and with those behind it; of a Router, those of the route of a text."""
    modules = dict(own_modules(model))
    name, first = next(iter(modules.items()))
    routes: Any = getattr(first, "sub_modules", None)
    if routes is not None and hasattr(first, "_resolve_route"):
        route: Any = first
        chosen = {f"{name}.{i}": m for i, m in enumerate(routes[route._resolve_route(task=task, modality="text")])}
        modules = {**chosen, **{n: m for n, m in modules.items() if n != name}}
    names = list(modules)
    parts = shallow_copy(model), shallow_copy(model)
    for part, kept in zip(parts, (names[:1], names[1:]), strict=True):
        own_modules(part).clear()
        own_modules(part).update((n, modules[n]) for n in kept)
    return parts


def _row(features: dict[str, Any], index: int, length: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The features of one text, without padding; one masked column stands for a text without tokens."""

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cut(name, one) for one in value)
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != shape[0]:
            return value
        row = value[index : index + 1]
        by_token = value.dim() > 1 and value.shape[1] == shape[1] and name != "sentence_embedding"
        return (row[:, : max(length, 1)] if by_token else row).clone()  # where a batch has it, bits may differ

    return {name: cut(name, value) for name, value in features.items()}
