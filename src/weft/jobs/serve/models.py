"""What a folder can do, and how: embed, give vectors of tokens or sparse ones, score pairs and classify.

A request's wishes (`Ask`) go with each of its texts, so that one batch may hold texts of different requests.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.jobs.embed import Encoder, ModuleEncoder, open_encoder
from weft.jobs.embed.encoder import normalize
from weft.jobs.embed.recipe import SPARSE, TOKENS
from weft.jobs.embed.scorer import Scorer, is_scorer
from weft.jobs.serve.errors import Problem, RequestError
from weft.jobs.serve.options import ModelChoice
from weft.jobs.serve.tokens import Direction, Pair, RequestTokenizer
from weft.packed.batch import PackedBatch


class Task(Enum):
    """What a request wants of a model; the value is what TEI calls a model that can."""

    EMBED = "an embedding model"
    TOKENS = "a model with a vector for each token"
    SPARSE = "an embedding model with sparse vectors"
    PREDICT = "a classifier model"
    RERANK = "a re-ranker model"


@dataclass(frozen=True)
class Ask:
    """A request's wishes. `normalize` None is as the folder says, `dimensions` None all of them."""

    task: Task
    prompt_name: str | None = None
    truncate: bool = False
    direction: Direction = None
    normalize: bool | None = None
    dimensions: int | None = None
    raw_scores: bool = False


Given = str | Pair | Sequence[int]


@dataclass(frozen=True, eq=False)
class TextContent:
    """What a model computes with: tokens, and the wishes that hold for this text."""

    tokens: Any
    ask: Ask
    prompt: str


class ServedModel(ABC):
    """A model under its name."""

    tasks: frozenset[Task]
    dtype: str
    max_length: int | None
    width: int
    labels: Sequence[str] = ()
    pooling = ""
    sha: str | None = None  # of the weights

    def __init__(self, choice: ModelChoice) -> None:
        self.name, self.folder = choice.name, choice.folder

    def check(self, ask: Ask) -> None:
        """Raises where the model cannot do that."""
        if ask.task not in self.tasks:
            raise RequestError(Problem.BACKEND, f"model is not {ask.task.value}")
        if ask.dimensions is not None and not 1 <= ask.dimensions <= self.width:
            raise RequestError(
                Problem.FIELDS,
                f"got {ask.dimensions} dimensions, expected from 1 to the model's {self.width}",
                param="dimensions",
            )

    @abstractmethod
    def prepare(self, given: Sequence[Given], ask: Ask) -> list[tuple[TextContent, int]]:
        """The texts, or ids, of a request as `run` takes them, and how many tokens each has. In any thread."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What makes its results these and no others, as the jobs that write files keep it."""

    @abstractmethod
    def run(self, contents: Sequence[TextContent]) -> list[Any]:
        """A result for each, or the exception that it failed with. In one thread."""

    def prompt_of(self, name: str) -> str:
        """The prompt of this name."""
        raise RequestError(
            Problem.FIELDS, f"got the prompt_name {name!r}, but {self.name} has none", param="prompt_name"
        )

    @abstractmethod
    def tokenizer(self) -> RequestTokenizer:
        """For routes that ask for tokens alone."""


class PlainModel(ServedModel):
    """A folder that `Encoder` takes: [width] a text, or [tokens, hidden size] of its tokens."""

    tasks = frozenset({Task.EMBED, Task.TOKENS})

    def __init__(self, choice: ModelChoice, encoder: Encoder) -> None:
        super().__init__(choice)
        self._encoder = encoder
        self._tokenizer = RequestTokenizer(encoder.tokenizer, encoder.max_length)
        self.dtype, self.max_length, self.width = encoder.dtype, encoder.max_length, encoder.width
        self.pooling = "+".join(encoder.recipe.pooling.modes)

    def prompt_of(self, name: str) -> str:
        prompts = self._encoder.recipe.prompts
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise RequestError(
                Problem.FIELDS, f"got the prompt_name {name!r}, expected one of {known}", param="prompt_name"
            )
        return prompts[name]

    def tokenizer(self) -> RequestTokenizer:
        return self._tokenizer

    def identity(self) -> dict[str, Any]:
        return self._encoder.identity()

    def prepare(self, given: Sequence[Given], ask: Ask) -> list[tuple[TextContent, int]]:
        self.check(ask)
        prompt = self._encoder.prompt if ask.prompt_name is None else self.prompt_of(ask.prompt_name)
        ids = prepared_ids(self._tokenizer, given, ask, prompt)
        return [(TextContent(text, ask, prompt), len(text)) for text in ids]

    def run(self, contents: Sequence[TextContent]) -> list[Any]:
        states = self._encoder.states([content.tokens for content in contents])
        return _by_group(contents, states, self._finished)

    def _finished(self, states: PackedBatch, content: TextContent) -> Sequence[Tensor]:
        ask = content.ask
        if ask.task is Task.TOKENS:
            return states.to_list()
        rows = self._encoder.finish(states, prompt=content.prompt, normalized=ask.normalize)
        if ask.dimensions is None or ask.dimensions == rows.shape[1]:
            return list(rows)
        # Cut rows have another length; whoever had them at 1 expects 1.
        is_normalized = self._encoder.ends_normalized if ask.normalize is None else ask.normalize
        cut = rows[:, : ask.dimensions].contiguous()
        return list(normalize(cut) if is_normalized else cut)


class ModuleModel(ServedModel):
    """A folder that sentence-transformers' own modules compute: dense, sparse, or a vector for each token."""

    def __init__(self, choice: ModelChoice, encoder: ModuleEncoder) -> None:
        super().__init__(choice)
        self._encoder = encoder
        self.tasks = frozenset({{SPARSE: Task.SPARSE, TOKENS: Task.TOKENS}.get(encoder.kind, Task.EMBED)})
        self.dtype, self.max_length, self.width = encoder.dtype, encoder.max_length, encoder.width
        self.pooling = "splade" if encoder.kind == SPARSE else encoder.kind
        self._lock = threading.Lock()  # their tokenizers are set anew in each call

    def tokenizer(self) -> RequestTokenizer:
        raise RequestError(Problem.BACKEND, f"{self.name} is computed by modules that have a tokenizer of their own")

    def identity(self) -> dict[str, Any]:
        return self._encoder.identity()

    def prepare(self, given: Sequence[Given], ask: Ask) -> list[tuple[TextContent, int]]:
        self.check(ask)
        texts = [text for text in given if isinstance(text, str)]
        refused = {
            "ids instead of texts": len(texts) < len(given),
            "prompt_name": ask.prompt_name is not None,
            "truncation_direction": ask.direction is not None,
            "normalize: false": ask.normalize is False and self._encoder.ends_normalized,
            "dimensions": ask.dimensions not in (None, self.width),
        }
        if asked := [name for name, is_asked in refused.items() if is_asked]:
            raise RequestError(
                Problem.BACKEND, f"{self.name} is computed by modules of its own: no {', '.join(asked)} there"
            )
        with self._lock:
            features = self._encoder.tokenize(texts)
        return [(TextContent(text, ask, self._encoder.prompt), len(text)) for text in features]

    def run(self, contents: Sequence[TextContent]) -> list[Any]:
        rows = self._encoder.embed([content.tokens for content in contents])
        if isinstance(rows, Tensor):
            wanted = [content.ask.normalize and not self._encoder.ends_normalized for content in contents]
            return [_checked(normalize(row[None])[0] if n else row) for n, row in zip(wanted, rows, strict=True)]
        if Task.TOKENS in self.tasks:
            return [_checked(row["vectors"]) for row in rows]
        return [(row["indices"].numpy(), _checked(row["values"])) for row in rows]


class ScoringModel(ServedModel):
    """A folder that `Scorer` takes: [labels] a text or pair, as the folder's activation leaves them, or raw."""

    def __init__(self, choice: ModelChoice, scorer: Scorer) -> None:
        super().__init__(choice)
        self._scorer = scorer
        self._tokenizer = RequestTokenizer(scorer.tokenizer, scorer.max_length)
        self.tasks = frozenset({Task.PREDICT, Task.RERANK} if len(scorer.labels) == 1 else {Task.PREDICT})
        self.dtype, self.max_length, self.width = scorer.dtype, scorer.max_length, len(scorer.labels)
        self.labels = scorer.labels

    def tokenizer(self) -> RequestTokenizer:
        return self._tokenizer

    def identity(self) -> dict[str, Any]:
        return self._scorer.identity()

    def prepare(self, given: Sequence[Given], ask: Ask) -> list[tuple[TextContent, int]]:
        self.check(ask)
        texts: Any = given
        inputs = self._scorer.prompted(texts)
        found = self._scorer.read(self._tokenizer.encodings(inputs, truncate=ask.truncate, direction=ask.direction))
        if any(not len(tokens) for tokens in found):
            raise RequestError(Problem.TOKENIZER, "got a text without tokens, of which a classifier can read none")
        return [(TextContent(tokens, ask, ""), len(tokens)) for tokens in found]

    def run(self, contents: Sequence[TextContent]) -> list[Any]:
        logits = self._scorer.score([content.tokens for content in contents])
        scores = self._scorer.activate(logits)
        pairs = zip(contents, logits, scores, strict=True)
        return [_checked(raw if content.ask.raw_scores else score) for content, raw, score in pairs]


def open_model(choice: ModelChoice, *, dtype: str | None = None) -> ServedModel:
    """What a folder holds, ready to run."""
    if not choice.folder.is_dir():
        raise ValueError(f"got the model {choice.folder}, expected a folder")
    if is_scorer(choice.folder):
        return ScoringModel(choice, Scorer(choice.folder, dtype=dtype))
    encoder = open_encoder(choice.folder, dtype=dtype)
    return PlainModel(choice, encoder) if isinstance(encoder, Encoder) else ModuleModel(choice, encoder)


def warm_up(model: ServedModel) -> None:
    """Packs weights, makes buffers, starts threads: the first request should not pay for it."""
    task = next(iter(sorted(model.tasks, key=lambda task: task.name)))
    text: Given = ("a", "b") if task is Task.RERANK else "a"
    for repeats in (1, 64):
        longer = text if isinstance(text, tuple) else "a " * repeats
        for result in model.run([c for c, _ in model.prepare([longer] * 4, Ask(task, truncate=True))]):
            if isinstance(result, Exception):
                raise result
    model.sha = str(model.identity()["model"]["weights"])


def prepared_ids(tokenizer: RequestTokenizer, given: Sequence[Given], ask: Ask, prompt: str) -> list[list[int]]:
    """Of texts, or of ids, which have no prompt."""
    if all(isinstance(text, str) for text in given):
        texts: Any = given
        return tokenizer.ids(texts, prompt=prompt, truncate=ask.truncate, direction=ask.direction)
    if ask.prompt_name is not None:
        raise RequestError(Problem.FIELDS, "got ids and a prompt_name, expected texts with it", param="prompt_name")
    found = []
    for one in given:
        if isinstance(one, str):
            found += tokenizer.ids([one], prompt=prompt, truncate=ask.truncate, direction=ask.direction)
        else:
            ids: Any = one
            found.append(tokenizer.check(ids, truncate=ask.truncate, direction=ask.direction))
    return found


def _by_group(
    contents: Sequence[TextContent],
    states: PackedBatch,
    finish: Callable[[PackedBatch, TextContent], Sequence[Tensor]],
) -> list[Any]:
    """Results in order; texts of like wishes are finished together."""
    groups: dict[tuple[Ask, str], list[int]] = {}
    for i, content in enumerate(contents):
        groups.setdefault((content.ask, content.prompt), []).append(i)
    results: list[Any] = [None] * len(contents)
    parts = states.to_list() if len(groups) > 1 else []
    for indices in groups.values():
        chosen = [parts[i] for i in indices] if parts else []
        lengths = torch.tensor([len(part) for part in chosen], dtype=torch.int64)
        some = PackedBatch.from_values(torch.cat(chosen), lengths) if parts else states
        for i, row in zip(indices, finish(some, contents[indices[0]]), strict=True):
            results[i] = _checked(row)
    return results


def _checked(values: Tensor) -> Any:
    """As numpy has it; a refusal where it holds what is no number: JSON has none for that."""
    array = values.numpy()
    if not np.isfinite(array).all():
        return RequestError(Problem.BACKEND, "the model gave NaN or infinity for a text")
    return array
