"""Text as packed micro-batches of bytes: documents of different lengths end to end, and no padding.

Micro-batch n of a run follows from the seed and n alone. So every rank makes the batches that it needs, a run that is
resumed goes on with the data that come next, and the losses do not depend on how many ranks share the work.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.packed import PackedBatch

END = 256
VOCABULARY = 320
"""Each byte is a token, and one more ends a document; the rest is there so that ranks share the words evenly."""
IGNORED = -100


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """T tokens of some documents, and what each token must predict: the next one of its document, or -100."""

    batch: PackedBatch
    targets: Tensor

    @property
    def counted(self) -> int:
        """How many tokens have something to predict."""
        return int((self.targets != IGNORED).sum())

    @property
    def labels(self) -> Tensor:
        """[T] as Hugging Face has them: the tokens themselves; a model shifts them."""
        return self.batch.values


@dataclass(frozen=True, eq=False)
class Text:
    """Pieces of at most `context` tokens, from which micro-batches of `tokens` are drawn."""

    pieces: tuple[bytes, ...]
    context: int
    tokens: int
    seed: int = 0

    @functools.cached_property
    def digest(self) -> str:
        """Tells texts apart, wherever their files are."""
        found = hashlib.sha256()
        for piece in self.pieces:
            found.update(len(piece).to_bytes(8, "big") + piece)
        return found.hexdigest()

    @classmethod
    def of(cls, documents: Sequence[bytes], *, context: int, tokens: int, seed: int = 0) -> Text:
        """Cuts documents at line ends, so that each piece and its end fit into the context."""
        if context < 2 or tokens < context:
            raise ValueError(f"got a context of {context} and {tokens} tokens, expected 2 <= context <= tokens")
        pieces = tuple(piece for document in documents for piece in cut(document, context - 1) if piece.strip())
        if not pieces:
            raise ValueError("the documents hold no text; expected at least one that is not empty")
        return cls(pieces, context, tokens, seed)

    def microbatch(self, number: int) -> MicroBatch:
        """Micro-batch `number` of the run: exactly `tokens` tokens; the last piece ends where they are full.

        >>> text = Text.of([b"one two", b"three"], context=16, tokens=20)
        >>> first = text.microbatch(0)
        >>> first.batch.tokens, first.targets.shape, torch.equal(first.targets, text.microbatch(0).targets)
        (20, torch.Size([20]), True)
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        rows: list[Tensor] = []
        left = self.tokens
        while left:
            piece = self.pieces[int(torch.randint(len(self.pieces), (1,), generator=generator))]
            row = torch.tensor([*piece, END][:left])
            rows.append(row)
            left -= row.numel()
        targets = [torch.cat([row[1:], row.new_full((1,), IGNORED)]) for row in rows]
        return MicroBatch(PackedBatch.from_list(rows), torch.cat(targets))


def cut(document: bytes, most: int) -> list[bytes]:
    """Pieces of at most `most` bytes, each up to the last line end that fits, if there is one.

    >>> cut(b"ab\\ncd\\nefghijkl", 7)
    [b'ab\\ncd\\n', b'efghijk', b'l']
    """
    pieces = []
    while len(document) > most:
        end = document.rfind(b"\n", 0, most) + 1 or most
        pieces.append(document[:end])
        document = document[end:]
    return [*pieces, document] if document else pieces


def documents_of(files: Sequence[str | Path]) -> list[bytes]:
    """The contents of files; without any, Python's own reference texts, which come with it."""
    return [Path(file).read_bytes() for file in files] if files else list(_own_texts())


@functools.cache
def _own_texts() -> tuple[bytes, ...]:
    """What `help()` prints on each topic: half a megabyte of English. Cached, as importing it takes a moment."""
    from pydoc_data.topics import topics

    return tuple(text.encode() for _, text in sorted(topics.items()))
