"""What is to be simulated: a model, cut over a cluster, and a batch of texts. Checked here, so that the rest need not.

Models are sizes: what a layer multiplies, and how many there are. Lengths are quantiles, as a share of the longest
text, from which padding is reckoned. A batch that is padded computes every text as long as its longest; one that is
packed computes the tokens that are there. What counts is the mean, the mean of the squares (for attention), and the
same of a batch's longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np

from weft.parallel.cut import shared_heads
from weft.pipeline import SCHEDULES, Schedule, schedule
from weft.pipeline.schedules.generators import SEVERAL_STAGES
from weft.scale.gpus import Gpu
from weft.transformer.parts import IndexRun


@dataclass(frozen=True)
class Model:
    """A stack of equal layers.

    hidden, heads, kv_heads, head_width: of attention, where `kv_heads` are shared by several heads or not
    ffn:     the width between the MLP's matmuls;  gated: whether two matmuls of that width are multiplied
    causal:  whether a token sees only those before it
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = False
    causal: bool = True

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def up(self) -> int:
        """Columns of the MLP's first matmul."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's four matmuls."""
        return self.hidden * (self.qkv + self.hidden + self.up + self.ffn)

    @property
    def parameters(self) -> int:
        """All weights; embedding and logits share theirs.

        >>> round(find_model("gpt3-175b").parameters / 1e9), round(find_model("llama2-70b").parameters / 1e9)
        (175, 69)
        """
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def attention_flops(self, pairs: float) -> float:
        """Forward flops of one layer's attention over so many pairs of a query and a key, in all heads."""
        return 4.0 * pairs * self.hidden

    def forward_flops(self, tokens: float, pairs: float, *, logits: float) -> float:
        """Forward flops of the model on so many tokens, of which `logits` get a prediction."""
        matmuls = 2.0 * (tokens * self.layers * self.layer_parameters + logits * self.vocabulary * self.hidden)
        return matmuls + self.layers * self.attention_flops(pairs)


_ALL = (
    Model("gpt3-175b", 96, 12288, 96, 96, 49152, 50257),
    Model("gpt3-13b", 40, 5120, 40, 40, 20480, 50257),
    Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000, gated=True),
    Model("llama2-70b", 80, 8192, 64, 8, 28672, 32000, gated=True),
    Model("llama3-405b", 126, 16384, 128, 8, 53248, 128256, gated=True),
    Model("bert-large", 24, 1024, 16, 16, 4096, 30522, causal=False),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})


def find_model(name: str) -> Model:
    """The model of that name."""
    if name.lower() not in MODELS:
        raise ValueError(f"got the model {name!r}; expected one of: {', '.join(MODELS)}")
    return MODELS[name.lower()]


_SAMPLES = 20_000  # points of the quantile function that are averaged


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the length, each (share of the texts, share of the longest), with straight lines between them."""

    name: str
    quantiles: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares, lengths = zip(*self.quantiles, strict=True)
        if shares[0] != 0 or shares[-1] != 1 or list(lengths) != sorted(lengths) or not 0 < lengths[-1] <= 1:
            raise ValueError(
                f"quantiles are {self.quantiles}, expected growing pairs from share 0 to 1, lengths up to 1"
            )

    def moment(self, power: int, *, batch: int = 1) -> float:
        """The mean of the length, or of its square, of the longest of `batch` texts.

        >>> uniform = LENGTHS["uniform"]
        >>> round(uniform.moment(1), 3), round(uniform.moment(1, batch=32), 3)
        (0.6, 0.976)
        """
        return _moment(self.quantiles, power, batch)


@lru_cache(maxsize=256)
def _moment(quantiles: tuple[tuple[float, float], ...], power: int, batch: int) -> float:
    middles = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    shares, lengths = zip(*quantiles, strict=True)
    # The longest of b is below the quantile u ** (1/b) as often as one is below the quantile u.
    return float(np.mean(np.interp(middles ** (1.0 / batch), shares, lengths) ** power))


def _of(name: str, longest: float, shortest: float, p10: float, p50: float, p90: float, p99: float) -> Lengths:
    points = ((0.0, shortest), (0.1, p10), (0.5, p50), (0.9, p90), (0.99, p99), (1.0, longest))
    return Lengths(name, tuple((share, length / longest) for share, length in points))


_ALL_LENGTHS = (
    Lengths("full", ((0.0, 1.0), (1.0, 1.0))),
    Lengths("uniform", ((0.0, 0.2), (1.0, 1.0))),  # ByteTransformer's
    # Percentiles 10, 50, 90, 99 and the longest of public data; the shortest is not published, and taken as 1. Straight
    # lines between them are too high where tails are thin: the mean comes out 13 % too long for azure-code and 22 % for
    # azure-chat, so that packing saves a little more than is predicted.
    _of("squad", 384, 1, 107, 159, 260, 384),
    _of("wikipedia", 512, 1, 48, 204, 512, 512),
    _of("azure-code", 7437, 1, 147, 1469, 5187, 7436),
    _of("azure-chat", 14050, 1, 207, 1020, 2734, 4142),
)
LENGTHS: Mapping[str, Lengths] = MappingProxyType({each.name: each for each in _ALL_LENGTHS})


def find_lengths(name: str) -> Lengths:
    """The distribution of that name."""
    if name.lower() not in LENGTHS:
        raise ValueError(f"got the lengths {name!r}; expected one of: {', '.join(LENGTHS)}")
    return LENGTHS[name.lower()]


class Mode(str, Enum):
    """A step of training, all prompts through the model, or one more token for every sequence."""

    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"


class Activations(str, Enum):
    """What lies between a layer's parallel halves: rows cut among the GPUs (gather, reduce-scatter), or copies."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


class Promise(str, Enum):
    """The four things that weft does, each of which a step can be simulated without."""

    OVERLAP = "overlap"
    RESHARD = "reshard"
    PIPELINE = "pipeline"
    PACKED = "packed"


ALL_PROMISES = frozenset(Promise)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one replica: tokens that are computed, and pairs of a query and a key in attention."""

    tokens: int
    pairs: float


@dataclass(frozen=True)
class MostHeads:
    """The most heads on one GPU, as `weft.parallelize` shares them: of queries, of keys, and of queries, keys and
    values together. Key heads that GPUs do not divide, or of which there are fewer, are on several."""

    queries: int
    keys: int
    together: int


@dataclass(frozen=True)
class ScaleJob:
    """A model on hosts x devices GPUs, tp x pp x dp ways parallel; ranks count along tp first, then dp, then pp.

    schedule:     of the pipeline
    microbatches: of a step, in each of the dp replicas
    sequences:    in a micro-batch
    tokens:       the longest sequence; in decoding, the longest context
    lengths:      how long the others are
    gbps:         Gbit/s of a host's network cards together; the GPU's usual ones if None
    """

    model: Model
    gpu: Gpu
    hosts: int
    devices: int
    tp: int
    pp: int
    dp: int
    schedule: str = "eager-1f1b"
    microbatches: int = 32
    sequences: int = 1
    tokens: int = 2048
    lengths: Lengths = LENGTHS["full"]
    mode: Mode = Mode.TRAIN
    activations: Activations = Activations.SHARDED
    gbps: float | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("hosts", "devices", "tp", "pp", "dp", "microbatches", "sequences", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"got {name}={getattr(self, name)}; expected at least 1")
        if self.gbps is not None and not self.gbps > 0:
            raise ValueError(f"got gbps={self.gbps}; expected Gbit/s above 0, or None for the GPU's usual cards")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"got the schedule {self.schedule!r}; expected one of: {', '.join(SCHEDULES)}")
        self._check_placement()
        if self.model.heads < self.tp:
            raise ValueError(
                f"got tp={self.tp} for the {self.model.heads} query heads of {self.model.name}; expected at most as "
                "many GPUs as heads: a head is not cut"
            )
        if self.stages > self.model.layers:
            raise ValueError(
                f"got {self.stages} stages for the {self.model.layers} layers of {self.model.name}; "
                "expected at least a layer for each; lower pp"
            )

    def _check_placement(self) -> None:
        wanted, there = self.tp * self.pp * self.dp, self.hosts * self.devices
        if wanted != there:
            raise ValueError(
                f"got tp={self.tp} x pp={self.pp} x dp={self.dp} = {wanted} GPUs for a cluster of {self.hosts}x"
                f"{self.devices} = {there}; expected as many; change dp, or the cluster"
            )
        if self.devices > self.gpu.devices:
            raise ValueError(
                f"got {self.devices} GPUs a host; expected up to {self.gpu.devices}, as {self.gpu.name} is declared"
            )
        if self.devices % self.tp:
            raise ValueError(
                f"got tp={self.tp} on hosts of {self.devices} GPUs; expected a divisor, so that it stays in a host"
            )
        stage = self.tp * self.dp
        if stage % self.devices and self.devices % stage:
            raise ValueError(
                f"got tp={self.tp} x dp={self.dp} = {stage} GPUs for each stage on hosts of {self.devices}; expected a "
                "divisor or a multiple, so that no stage begins in the middle of another's host; change dp"
            )

    @property
    def size(self) -> int:
        """GPUs of the cluster."""
        return self.hosts * self.devices

    @property
    def stages(self) -> int:
        """Stages of the pipeline: one for each pp rank, two where a rank holds several."""
        return self.pp * (2 if self.schedule in SEVERAL_STAGES and self.pp > 1 else 1)

    @property
    def neighbours(self) -> int:
        """Replicas of a stage that share a host, and its network cards."""
        return min(self.dp, self.devices // self.tp)

    @property
    def host_gbps(self) -> float:
        """Gbit/s of a host's network cards; fewer GPUs than usual come with fewer cards."""
        return self.gbps if self.gbps is not None else self.gpu.network_gbps * self.devices / self.gpu.devices

    @cached_property
    def most(self) -> MostHeads:
        """What the busiest GPU has of attention. All wait for it: every matmul of a layer ends with an exchange."""
        each = shared_heads(self.model.heads, self.model.kv_heads, self.tp)
        both = max(h.queries.count + 2 * h.keys.count for h in each)
        return MostHeads(max(h.queries.count for h in each), max(h.keys.count for h in each), both)

    def host_of(self, stage: int) -> int:
        """The host of a stage's first replicas."""
        return self.made_schedule().rank_of(stage) * self.neighbours * self.tp // self.devices

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage, as even as can be."""
        return tuple(IndexRun.balanced(self.model.layers, s, self.stages).count for s in range(self.stages))

    def made_schedule(self) -> Schedule:
        """The schedule; forwards only in inference."""
        name = "1f1b" if self.pp == 1 else self.schedule  # one rank: nothing to be early for, or to interleave
        return _made(name, self.stages, self.microbatches, self.pp, self.mode is Mode.TRAIN)

    def batch(self, promises: frozenset[Promise]) -> Batch:
        """What a micro-batch computes: every sequence as long as the longest of it, or as long as it is."""
        together = 1 if Promise.PACKED in promises else self.sequences
        return self._batch(together)

    @property
    def real(self) -> Batch:
        """The tokens that are there."""
        return self._batch(1)

    def _batch(self, together: int) -> Batch:
        mean, square = (self.lengths.moment(power, batch=together) for power in (1, 2))
        if self.mode is Mode.DECODE:  # one token a sequence, beside its context
            return Batch(self.sequences, self.sequences * self.tokens * mean)
        seen = 0.5 if self.model.causal else 1.0
        tokens = max(1, round(self.sequences * self.tokens * mean))
        return Batch(tokens, self.sequences * self.tokens**2 * square * seen)

    def context(self, promises: frozenset[Promise]) -> float:
        """Tokens of a micro-batch that the caches hold; a padded batch keeps its padding."""
        together = 1 if Promise.PACKED in promises else self.sequences
        return self.sequences * self.tokens * self.lengths.moment(1, batch=together)

    @property
    def model_flops(self) -> float:
        """Flops that the real tokens of a step need, in all replicas; a backward is twice a forward."""
        batch = self.real
        forward = self.model.forward_flops(batch.tokens, batch.pairs, logits=self.predicted_tokens(batch))
        return forward * self.microbatches * self.dp * (3 if self.mode is Mode.TRAIN else 1)

    def predicted_tokens(self, batch: Batch) -> int:
        """Tokens of a micro-batch that get logits: all in training, else one a sequence."""
        return batch.tokens if self.mode is Mode.TRAIN else self.sequences


@lru_cache(maxsize=32)
def _made(name: str, stages: int, microbatches: int, ranks: int, backward: bool) -> Schedule:
    made = schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    return made if backward else made.forward_only()
