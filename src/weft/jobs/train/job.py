"""A training run as a value that every rank gets (`TrainJob`), and the text that it reads (`Corpus`).

Documents of different lengths stand end to end in packed micro-batches of bytes, without padding. Micro-batch n of a
run follows from the seed and n alone. So every rank makes the batches that it needs, a run that is resumed goes on with
the data that come next, and the losses do not depend on how many ranks share the work.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.comm.deadline import TRAIN
from weft.errors import LONGEST_SECONDS
from weft.packed import PackedBatch
from weft.packed.inputs import IGNORED_LABEL
from weft.pipeline.schedules.generators import schedule

# name: layers, hidden, heads, key/value heads, MLP
SIZES = {
    "tiny": (4, 64, 4, 2, 176),
    "mini": (4, 256, 8, 4, 704),
    "small": (8, 512, 8, 4, 1408),
    "base": (8, 1024, 16, 4, 2816),
    "1b": (22, 2048, 32, 4, 5632),
    "8b": (32, 4096, 32, 8, 14336),
}
ON_FAILURE = ("stop", "shrink")
END = 256
VOCABULARY = 320
"""Each byte is a token, and one more ends a document; the rest is there so that ranks share the words evenly."""


@dataclass(frozen=True)
class TrainJob:
    """A run of `steps` steps, each of `microbatches` packed micro-batches of `tokens` tokens.

    tp, pp, dp:    ranks that share a layer, stages of the pipeline, copies of the model; their product is all ranks.
                   dp "auto" is as many copies as there are ranks for, whenever the run starts or goes on
    microbatches:  of a whole step; each copy takes its share, one stage after the other
    context:       tokens of a document at most
    data:          text files; Python's own reference texts without
    init:          a folder with a Llama's safetensors to start from; random weights of `seed` without
    checkpoint:    a directory that all ranks share, and no other run; saved every `every` steps and at the end, the
                   `keep` newest kept
    resume:        go on from the newest checkpoint, if there is one; `lr` is this job's, all else as it was
    timeout:       seconds after which a rank gives another up
    on_failure:    "stop" ends all ranks when one is lost; "shrink" drops its copy of the model, and the others go on
                   from memory: every copy then holds all parameters and moments, which FSDP would share among them
    """

    model: str = "tiny"
    tp: int = 1
    pp: int = 1
    dp: int | Literal["auto"] = 1
    steps: int = 20
    microbatches: int = 4
    tokens: int = 512
    context: int = 256
    lr: float = 1e-3
    seed: int = 0
    schedule: str = "eager-1f1b"
    overlap: str = "on"
    data: tuple[str, ...] = ()
    init: str = ""
    checkpoint: str = ""
    every: int = 10
    keep: int = 2
    resume: bool = False
    timeout: float = TRAIN.seconds
    on_failure: Literal["stop", "shrink"] = "stop"

    @property
    def copies(self) -> int:
        """How many copies of the model; `on` says it for "auto"."""
        if isinstance(self.dp, str):
            raise ValueError(f"dp is {self.dp!r}, which depends on the number of ranks; use job.on(ranks)")
        return self.dp

    def on(self, ranks: int) -> TrainJob:
        """The job on so many ranks: dp "auto" becomes ranks / (tp x pp). Raises unless it can run there.

        >>> TrainJob(tp=2, dp="auto").on(8).dp
        4
        """
        if self.dp != "auto":
            self.check(ranks)
            return self
        share = self.tp * self.pp
        if share < 1 or ranks % share:
            raise ValueError(
                f"dp is 'auto' with tp {self.tp} x pp {self.pp} on {ranks} ranks; expected a number of ranks that "
                f"{share} divides: change one of them, or start another number of processes"
            )
        job = replace(self, dp=ranks // share)
        job.check(ranks)
        return job

    def check(self, ranks: int) -> None:
        """Raises unless the job can run on so many ranks."""
        copies = self.copies
        made = self.tp * self.pp * copies
        if min(self.tp, self.pp, copies) < 1 or made != ranks:
            raise ValueError(
                f"tp {self.tp} x pp {self.pp} x dp {copies} is {made} ranks, and there are {ranks}; expected "
                "the same: change one of them, or start another number of processes"
            )
        if self.microbatches > 0 and self.microbatches % copies:
            raise ValueError(
                f"{self.microbatches} micro-batches cannot be shared evenly by {copies} copies of the model"
            )
        if self.model not in SIZES:
            raise ValueError(f"model is {self.model!r}, expected one of {', '.join(SIZES)}")
        if self.steps < 0 or min(self.every, self.keep, self.microbatches) < 1:
            raise ValueError(
                f"steps is {self.steps}, every {self.every}, keep {self.keep} and microbatches {self.microbatches}; "
                "expected at least 0 steps and at least 1 of the others"
            )
        if not (0 < self.lr < math.inf and 0 < self.timeout <= LONGEST_SECONDS):
            raise ValueError(f"lr is {self.lr} and timeout {self.timeout}; expected numbers above 0")
        if copies > 1 and self.pp > 1 and self._splits_backward():
            raise ValueError(
                f"schedule {self.schedule} runs a backward pass in two parts, which FSDP cannot follow; expected "
                "another one with several copies, such as eager-1f1b"
            )
        if self.on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure is {self.on_failure!r}, expected one of {', '.join(ON_FAILURE)}")
        if self.on_failure == "shrink" and self.pp > 1:
            raise ValueError(
                f"on_failure is 'shrink' with pp {self.pp}, expected pp 1: a pipeline's schedule is made for its "
                "number of micro-batches, which grows when a copy is lost; use tp, or on_failure 'stop' and restarts"
            )
        if self.resume and not self.checkpoint:
            raise ValueError("resume without a checkpoint directory; expected checkpoint=, where the run was saved")

    def _splits_backward(self) -> bool:
        made = schedule(self.schedule, stages=self.pp, microbatches=self.microbatches // self.copies)
        return any(made.splits_backward(stage, m) for stage in range(made.stages) for m in range(made.microbatches))

    def config(self) -> Any:
        """The model's, a `LlamaConfig`; that of `init` where it is given."""
        from transformers import LlamaConfig

        if self.init:
            return LlamaConfig.from_pretrained(self.init)
        layers, hidden, heads, kv_heads, mlp = SIZES[self.model]
        return LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=max(2048, self.context),
            tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip


def parse_copies(text: str) -> int | Literal["auto"]:
    """What `--dp` may say: a number, or auto.

    >>> parse_copies("2"), parse_copies("auto")
    (2, 'auto')
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"got {text!r} copies of the model, expected a number, or auto")
    return int(text)


@dataclass(frozen=True, eq=False)
class Corpus:
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
    def of(cls, documents: Sequence[bytes], *, context: int, tokens: int, seed: int = 0) -> Corpus:
        """Cuts documents at line ends, so that each piece and its end fit into the context."""
        if context < 2 or tokens < context:
            raise ValueError(f"got a context of {context} and {tokens} tokens, expected 2 <= context <= tokens")
        pieces = tuple(piece for document in documents for piece in cut(document, context - 1) if piece.strip())
        if not pieces:
            raise ValueError("the documents hold no text; expected at least one that is not empty")
        return cls(pieces, context, tokens, seed)

    def microbatch(self, number: int) -> MicroBatch:
        """Micro-batch `number` of the run: exactly `tokens` tokens; the last piece ends where they are full.

        >>> text = Corpus.of([b"one two", b"three"], context=16, tokens=20)
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
        targets = [torch.cat([row[1:], row.new_full((1,), IGNORED_LABEL)]) for row in rows]
        return MicroBatch(PackedBatch.from_list(rows), torch.cat(targets))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """T tokens of some documents, and what each token must predict: the next one of its document, or -100."""

    batch: PackedBatch
    targets: Tensor

    @property
    def counted(self) -> int:
        """How many tokens have something to predict."""
        return int((self.targets != IGNORED_LABEL).sum())

    @property
    def labels(self) -> Tensor:
        """[T] as Hugging Face has them: the tokens themselves; a model shifts them."""
        return self.batch.values


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
