"""What a training run is: a frozen value that every rank gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.comm.deadline import TRAIN
from weft.errors import LONGEST_SECONDS
from weft.train.text import VOCABULARY

# name: layers, hidden, heads, key/value heads, MLP
SIZES = {
    "tiny": (4, 64, 4, 2, 176),
    "mini": (4, 256, 8, 4, 704),
    "small": (8, 512, 8, 4, 1408),
    "base": (8, 1024, 16, 4, 2816),
    "1b": (22, 2048, 32, 4, 5632),
    "8b": (32, 4096, 32, 8, 14336),
}


@dataclass(frozen=True)
class Job:
    """A run of `steps` steps, each of `microbatches` packed micro-batches of `tokens` tokens.

    tp, pp, dp:    ranks that share a layer, stages of the pipeline, copies of the model; their product is all ranks
    microbatches:  of a whole step; each copy takes its share, one stage after the other
    context:       tokens of a document at most
    data:          text files; Python's own reference texts without
    init:          a folder with a Llama's safetensors to start from; random weights of `seed` without
    checkpoint:    a directory that all ranks share, and no other run; saved every `every` steps and at the end, the
                   `keep` newest kept
    resume:        go on from the newest checkpoint, if there is one; `lr` is this job's, all else as it was
    timeout:       seconds after which a rank gives another up
    """

    model: str = "tiny"
    tp: int = 1
    pp: int = 1
    dp: int = 1
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

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def check(self, ranks: int) -> None:
        """Raises unless the job can run on so many ranks."""
        if min(self.tp, self.pp, self.dp) < 1 or self.ranks != ranks:
            raise ValueError(
                f"tp {self.tp} x pp {self.pp} x dp {self.dp} is {self.ranks} ranks, and there are {ranks}; expected "
                "the same: change one of them, or start another number of processes"
            )
        if self.microbatches > 0 and self.microbatches % self.dp:
            raise ValueError(
                f"{self.microbatches} micro-batches cannot be shared evenly by {self.dp} copies of the model"
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
        if self.dp > 1 and self.pp > 1 and self.schedule in ("zero-bubble", "eager-1f1b+delay"):
            raise ValueError(
                f"schedule {self.schedule} runs a backward pass in two parts, which FSDP cannot follow; expected "
                "another one with several copies, such as eager-1f1b"
            )
        if self.resume and not self.checkpoint:
            raise ValueError("resume without a checkpoint directory; expected checkpoint=, where the run was saved")

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
