"""What a job does to each record: embed it, classify it, or rank its documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from weft.jobs.embed.recipe import DENSE, SCORES
from weft.jobs.embed.scorer import Scorer, TextOrPair
from weft.jobs.texts.formats import Rows, RowTable
from weft.jobs.texts.readers import TextRecord


class TextEncoder(Protocol):
    """What makes embeddings; `Encoder` does. What `tokenize` gives for a text has a length, which counts its tokens.

    `embed` gives [texts, width], or for kinds of which rows differ in length what each text has, by name.
    """

    kind: str
    width: int

    def tokenize(self, texts: Sequence[str]) -> Sequence[Any]: ...

    def embed(self, ids: Sequence[Any]) -> Tensor | list[dict[str, Tensor]]: ...


class EmbedTask:
    """A vector for each text, or what else an encoder makes of it."""

    table: RowTable | None = None

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.kind, self.width = encoder.kind, encoder.width

    @property
    def numbers(self) -> int | None:
        return self.width if self.kind == DENSE else None

    def inputs(self, record: TextRecord) -> Sequence[str]:
        return [record.text]

    def tokenize(self, inputs: Sequence[str]) -> Sequence[Any]:
        return self._encoder.tokenize(inputs)

    def compute(self, ids: Sequence[Any]) -> Rows:
        rows = self._encoder.embed(ids)
        if isinstance(rows, Tensor):
            return rows.numpy()
        return [{name: value.numpy() for name, value in row.items()} for row in rows]

    def rows(self, results: Rows, counts: Sequence[int]) -> Rows:
        return results


class _ScoreTask:
    """Scores of texts, or of pairs of texts. `raw` gives the model's logits, and not what its folder makes of them."""

    kind = SCORES
    width = 0
    table: RowTable | None

    def __init__(self, scorer: Scorer, *, raw: bool = False) -> None:
        self._scorer, self._raw = scorer, raw

    @property
    def numbers(self) -> int | None:
        return len(self._scorer.labels)

    def inputs(self, record: TextRecord) -> Sequence[TextOrPair]:
        return [(record.text, other) for other in record.beside]

    def tokenize(self, inputs: Sequence[TextOrPair]) -> Sequence[Any]:
        return self._scorer.tokenize(inputs)

    def compute(self, ids: Sequence[Any]) -> Rows:
        """float32 [inputs, labels]; not a number for an input without tokens, which no classifier can read."""
        results = np.full((len(ids), len(self._scorer.labels)), np.nan, np.float32)
        filled = [i for i, one in enumerate(ids) if len(one)]
        logits = self._scorer.score([ids[i] for i in filled])
        if not bool(logits.isfinite().all()):
            raise ValueError(
                "the model gives scores that are not finite; look for such numbers in its weights, or try --dtype "
                "float32; what is done is kept"
            )
        results[filled] = (logits if self._raw else self._scorer.activate(logits)).numpy()
        return results


class ClassifyTask(_ScoreTask):
    """The label with the highest score for each text, and the scores of all; null where a text has no tokens."""

    def __init__(self, scorer: Scorer, *, raw: bool = False) -> None:
        super().__init__(scorer, raw=raw)
        columns = (("label", "string"), ("score", "float"), ("scores", "floats"))
        self.table = RowTable(columns, {"labels": json.dumps(scorer.labels)})

    def inputs(self, record: TextRecord) -> Sequence[TextOrPair]:
        return super().inputs(record) if record.beside else [record.text]

    def rows(self, results: Rows, counts: Sequence[int]) -> Rows:
        return [self._row(np.asarray(scores)) for scores in results]

    def _row(self, scores: np.ndarray[Any, Any]) -> dict[str, Any]:
        if np.isnan(scores).any():
            return {"label": None, "score": None, "scores": None}
        best = int(scores.argmax())
        return {"label": self._scorer.labels[best], "score": float(scores[best]), "scores": scores.tolist()}


class RerankTask(_ScoreTask):
    """The documents of each query by their scores: all, or the best `top`; in the order of the input if `in_order`."""

    def __init__(self, scorer: Scorer, *, raw: bool = False, in_order: bool = False, top: int | None = None) -> None:
        super().__init__(scorer, raw=raw)
        if len(scorer.labels) != 1:
            raise ValueError(
                f"the model has the labels {', '.join(scorer.labels)}, expected one, by which documents are ranked; "
                f"weft classify gives the scores of all"
            )
        if top is not None and (top < 1 or in_order):
            raise ValueError(f"got the best {top} documents, expected a number from 1 on, and no order of the input")
        self._in_order, self._top = in_order, top
        self.table = RowTable((("index", "ints"), ("score", "floats")))

    def rows(self, results: Rows, counts: Sequence[int]) -> Rows:
        return list(self._rows(np.asarray(results).reshape(-1), counts))

    def _rows(self, scores: np.ndarray[Any, Any], counts: Sequence[int]) -> Iterator[dict[str, Any]]:
        start = 0
        for count in counts:
            some = scores[start : start + count]
            start += count
            order = np.arange(len(some))
            if not self._in_order:  # equal scores keep their order, and what has none comes last
                order = np.lexsort((order, -np.nan_to_num(some, nan=-np.inf)))[: self._top]
            yield {
                "index": order.tolist(),
                "score": [None if np.isnan(some[i]) else float(some[i]) for i in order],
            }
