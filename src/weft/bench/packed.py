"""The rows of the packed benchmark: who takes part, the turns, and what is made of them.

Packed models against everything that runs them today: end to end, attention alone, training, `weft embed`.

All systems of a row compute the same batch, in turns. "sorted" is a batch cut into groups of similar length, "loop" one
text at a time: what a careful user does against padding. The best of all these is what `vs_best_peer` compares with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.bench.harness import BenchOptions, Case, Measurement, measure, track
from weft.bench.systems.encoders import MODES, PEERS, WEFT, Call, Peer, Unavailable, runs
from weft.bench.systems.packed import (
    Padded,
    attention_cases,
    batch,
    embed_case,
    equal,
    measured,
    memory_row,
    minilm_folder,
    uniform,
)
from weft.kernels.cpu import isa, thread_count
from weft.packed import pack
from weft.report import Column, Headline, Report

QUICK_ROUNDS = 3
PEAK_ROUNDS = 2_000_000
AGREEMENT = 1e-4  # of states of unit size, across runtimes


@dataclass(frozen=True)
class Result:
    """One row: what was measured, the flops of its real tokens, and who could not take part."""

    measured: Measurement
    flops: float
    absent: dict[str, str]

    def vs(self, peer: str) -> float:
        return self.measured.ratio(peer, "weft")

    @property
    def best(self) -> str:
        peers = [name for name in self.measured.case.systems if name not in ("weft", "peak")]
        return min(peers, key=self.measured.median)

    @property
    def peak_fraction(self) -> float | None:
        if "peak" not in self.measured.case.systems or not self.flops:
            return None
        peak = _peak_flops() / self.measured.median("peak")
        return self.flops / self.measured.median("weft") / peak

    def row(self) -> dict[str, object]:
        names = self.measured.case.systems
        row = {key: value for key, value in self.measured.row().items() if not key.startswith("peak_")}
        ratios = {f"vs_{n.replace(' ', '_')}": self.vs(n) for n in names if n not in ("weft", "peak")}
        best = {"best_peer": self.best, "best_peer_ms": self.measured.median(self.best) * 1e3}
        absent = "; ".join(f"{name}: {why}" for name, why in self.absent.items()) or None
        return {**row, **ratios, **best, "vs_best_peer": self.vs(self.best), "peak_fraction": self.peak_fraction,
                "absent": absent}  # fmt: skip


class Lineup:
    """weft and the peers that can run a model, built once; each batch is measured in all their modes."""

    def __init__(self, model: Any, example: Padded, peers: Sequence[Peer]) -> None:
        self._model = model
        self._peers = {peer.name: peer for peer in (WEFT, *peers)}
        self._calls: dict[str, Call] = {}
        self._absent: dict[str, str] = {}
        want: Tensor | None = None
        for name, peer in self._peers.items():
            try:
                self._calls[name] = peer.build(model, example)
                states = self._calls[name](example.ids, example.mask)
                want = states if want is None else want
                _check(states, want, example)
            except Unavailable as error:
                self.leave_out(name, str(error))
            except Exception as error:  # a peer's own failure is its row's text, not the end of the benchmark
                if peer is WEFT:
                    raise
                self.leave_out(name, f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:80]}")

    def leave_out(self, name: str, why: str) -> None:
        """Takes a peer off the rows that follow, which then say why."""
        self._calls.pop(name, None)
        self._absent[name] = why

    def measure(self, case: str, padded: Padded, options: BenchOptions, modes: Sequence[str] = MODES) -> Result:
        modes = modes if len(padded.lengths) > 1 else ("padded",)
        systems: dict[str, Callable[[], Any]] = {}
        for name, call in self._calls.items():
            systems |= runs(self._peers[name], call, padded, modes)
        systems["peak"] = _peak_loop
        labels = {"batch": len(padded.lengths), "tokens": padded.tokens, "padded": padded.ids.numel()}
        took = timed(Case(case, systems, labels), options)
        return Result(took, flops(self._model.config, padded.lengths), dict(self._absent))


def _check(states: Tensor, want: Tensor, padded: Padded) -> None:
    """Raises if a peer computes something else, which would make its time worthless."""
    difference = ((states - want) * padded.mask[..., None]).abs().max()
    if not float(difference) < AGREEMENT:
        raise ValueError(f"its states differ from weft's by {float(difference):.1e}")


def flops(config: Any, lengths: Sequence[int]) -> float:
    """Multiplications and additions that real tokens need: matmuls and attention."""
    width, inner = config.hidden_size, config.intermediate_size
    linear = 2 * sum(lengths) * (4 * width * width + 2 * width * inner)
    attention = 4 * width * sum(length * length for length in lengths)
    return float(config.num_hidden_layers * (linear + attention))


def timed(case: Case, options: BenchOptions) -> Measurement:
    # Calls that find out how many fill a turn warm up as well.
    return measure(case, rounds=QUICK_ROUNDS, warmup=0, max_retries=1) if options.quick else measure(case)


def _peak_loop() -> None:
    _core.fma_loop(isa(), thread_count(0), PEAK_ROUNDS)


def _peak_flops() -> float:
    """Flops of one turn of the peak loop."""
    return _core.fma_loop(isa(), thread_count(0), 1) * PEAK_ROUNDS


NAME = "packed"
HELP = "models without padding against Hugging Face, torch.compile, ONNX Runtime, CTranslate2, OpenVINO and others"

QUICK_LAYERS = 1  # of BERT-base's 12: the ratios are those of the layers
QUICK_TEXTS = 200
CORE_PEERS = ("hf sdpa", "onnxruntime")  # in the rows beside the headline

COLUMNS = [
    Column("case", "case"),
    Column("weft_ms", "weft ms", form=".1f"),
    Column("weft_spread", "spread", form=".0%"),
    Column("best_peer", "best peer"),
    Column("best_peer_ms", "its ms", form=".1f"),
    Column("vs_best_peer", "x best", form=".2f", bar=True),
    Column("vs_hf_sdpa", "x hf sdpa", form=".2f"),
    Column("peak_fraction", "of peak", form=".2f"),
    Column("absent", "could not run"),
]


def run(options: BenchOptions) -> Report:
    """The rows of the claim; the quick form has one row for each figure."""
    with torch.no_grad():
        layers = QUICK_LAYERS if options.quick else 12
        model = bert_base(layers)
        name = "BERT-base" if layers == 12 else f"BERT-base, {layers} of 12 layers"
        lineup = Lineup(model, batch(uniform(256), 16), PEERS)
        head = lineup.measure(f"{name}, uniform 256, batch 16", batch(uniform(256), 16), options)
        # Equal lengths are sorted as they are.
        same = lineup.measure(f"{name}, equal 128, batch 16", batch(equal(128), 16), options, ("padded", "loop"))
        rows = [head, same, *(sweep(model, options) if not options.quick else [])]
    attention = [Result(timed(case, options), flops, absent) for case, flops, absent in attention_cases()]
    train = training(model, batch(uniform(256), 16), options)
    embed = Result(timed(embed_case(QUICK_TEXTS if options.quick else 20_000), options), 0.0, {})
    memory = memory_row(layers=QUICK_LAYERS)
    results = [*rows, *attention, train, embed]
    return Report(
        NAME,
        rows=[*(result.row() for result in results), memory],
        summary=_summary(head, same, attention[0], train, embed, memory),
        columns=COLUMNS,
        title=f"packed: {thread_count(0)} threads, float32",
        notes=["loop: one text at a time; sorted: groups of similar length", "x: how many times as long as weft"],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: two layers of BERT-base on texts of different length, against Hugging Face."""
    with torch.no_grad():
        padded = batch(uniform(256), 16)
        lineup = Lineup(bert_base(2), padded, [peer for peer in PEERS if peer.name == "hf sdpa"])
        result = lineup.measure("BERT-base, 2 layers, 16 texts of 51 to 256 tokens", padded, BenchOptions(quick=True))
    today, ours = result.measured.median("hf sdpa") * 1e3, result.measured.median("weft") * 1e3
    bound = ours * (result.peak_fraction or 1.0)
    return [Headline(result.measured.case.name, today, ours, bound, "ms", today / ours, result.measured.disturbed)]


def _summary(
    head: Result, same: Result, attention: Result, train: Result, embed: Result, memory: dict[str, object]
) -> dict[str, object]:
    def versus(result: Result, peer: str) -> float | str:
        return result.vs(peer) if peer in result.measured.case.systems else result.absent.get(peer, "not measured")

    return {
        "vs_hf_sdpa": versus(head, "hf sdpa"),
        "vs_compile": versus(head, "torch.compile"),
        "vs_onnxruntime": versus(head, "onnxruntime"),
        "vs_fastpath": versus(head, "fast path"),
        "vs_best_peer": head.vs(head.best),
        "equal_lengths_vs_best": same.vs(same.best),
        "peak_fraction": head.peak_fraction,
        "attention_vs_eager": versus(attention, "eager"),
        "attention_vs_sdpa": versus(attention, "sdpa"),
        "train_vs_sdpa": versus(train, "hf sdpa"),
        "embed_vs_sentence_transformers": embed.vs(embed.best),
        "memory_vs_eager": memory["ratio"],
    }


# ---- end to end ------------------------------------------------------------------------------------------------------


def bert_base(layers: int = 12) -> Any:
    """BERT-base with random weights."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(num_hidden_layers=layers, max_position_embeddings=1024)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def minilm() -> Any:
    """MiniLM-L6 with its real weights."""
    transformers: Any = import_module("transformers")
    return transformers.BertModel.from_pretrained(
        minilm_folder(), add_pooling_layer=False, local_files_only=True
    ).eval()


def sweep(model: Any, options: BenchOptions) -> list[Result]:
    """Other lengths, batch sizes and the small model; BERT-base with the core peers, MiniLM with all."""
    core = [peer for peer in PEERS if peer.name in CORE_PEERS]
    cases = [(f"uniform {s}", uniform(s), 16) for s in (64, 128, 512, 1024)]
    cases += [(f"uniform 256, batch {b}", uniform(256), b) for b in (1, 8, 32)]
    cases += [(name, measured(name), 16) for name in ("squad-384", "wikipedia-512")]
    small = minilm()
    short = [case for case in cases if "1024" not in case[0]]  # MiniLM has 512 positions
    lineups = {
        "BERT-base": Lineup(model, batch(uniform(256), 16), core),
        "MiniLM-L6": Lineup(small, batch(uniform(256), 16), PEERS),
    }
    plan = [("BERT-base", c) for c in cases] + [("MiniLM-L6", c) for c in short]
    return [
        lineups[name].measure(f"{name}, {what}", batch(draw, size), options)
        for name, (what, draw, size) in track(plan, title="packed")
    ]


# ---- training --------------------------------------------------------------------------------------------------------


def training(model: Any, padded: Padded, options: BenchOptions) -> Result:
    """One step forward and backward, without dropout, on the mean of the states of real tokens."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.train()
    fast = pack(model)

    def step(each: Any) -> Callable[[], None]:
        def call() -> None:
            each.zero_grad(set_to_none=True)
            states = each(padded.ids, attention_mask=padded.mask).last_hidden_state
            (states * padded.mask[..., None]).square().sum().backward()

        return call

    case = Case("training step, uniform 256, batch 16", {"weft": step(fast), "hf sdpa": step(model)})
    result = Result(timed(case, options), 3 * flops(model.config, padded.lengths), {})
    model.eval()
    return result
