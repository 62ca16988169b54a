"""Packed models against everything that runs them today: end to end, attention alone, training, `weft embed`.

All systems of a row compute the same batch, in turns. "sorted" is a batch cut into groups of similar length, "loop" one
text at a time: what a careful user does against padding. The best of all these is what `vs_best_peer` compares with.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.bench.bounds import at_best_peak
from weft.bench.harness import BenchOptions, Case, Result, System, measure, track
from weft.bench.machine import peak_growth
from weft.bench.programs import TRAINED_TEXTS, WORDS, arrivals_row, qwen3, trainer_case
from weft.bench.systems.packed import (
    MODES,
    PEERS,
    WEFT,
    Call,
    PaddedBatch,
    Peer,
    attention_case,
    batch,
    equal,
    lengths_like,
    runs,
    uniform,
    why_absent,
)
from weft.bench.systems.sentence_transformers import embed_case, minilm_folder, rerank_case, sentences
from weft.kernels.cpu import isa, thread_count
from weft.packed import pack
from weft.report import Column, Headline, Report, Row

NAME = "packed"
HELP = "models without padding against Hugging Face, torch.compile, ONNX Runtime, CTranslate2, OpenVINO and others"

QUICK_LAYERS = 1  # of BERT-base's 12: the ratios are those of the layers
QUICK_TEXTS = 200
QUICK_PAIRS = 24
QUICK_ROUNDS = 3
PEAK_ROUNDS = 2_000_000
AGREEMENT = 1e-4  # of states of unit size, across runtimes
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
        head = _row(lineup.measure(f"{name}, uniform 256, batch 16", batch(uniform(256), 16), options))
        modes = ("padded", "loop")  # equal lengths are sorted as they are
        same = _row(lineup.measure(f"{name}, equal 128, batch 16", batch(equal(128), 16), options, modes))
        others = [] if options.quick else [_row(result) for result in sweep(model, options)]
        decoder = _row(decoder_result(QUICK_LAYERS if options.quick else 18, options))
    case, absent = attention_case("attention, uniform 512, batch 16", batch(uniform(512), 16))
    attention = _row(_result(case, options, absent=absent))
    train = _row(training(model, batch(uniform(256), 16), options))
    texts = batch(uniform(512), TRAINED_TEXTS, vocabulary=WORDS)
    trainer = trainer_row(_result(trainer_case(texts, layers=QUICK_LAYERS if options.quick else 4), options))
    embed = _row(_result(embed_case(QUICK_TEXTS if options.quick else 20_000), options))
    pairs = rerank_case(minilm_folder(), sentences(2000), QUICK_PAIRS if options.quick else 100)
    rerank = _row(_result(pairs, options))
    arrivals = arrivals_row(quick=options.quick)
    memory = memory_row(layers=QUICK_LAYERS)
    head, same, decoder, *others = at_best_peak([head, same, decoder, *others])
    figures = {"head": head, "same": same, "attention": attention, "train": train, "embed": embed, "rerank": rerank}
    return Report(
        NAME,
        rows=[head, same, *others, decoder, attention, train, trainer, embed, rerank, arrivals, memory],
        summary=summary(**figures, decoder=decoder, trainer=trainer, arrivals=arrivals, memory=memory),
        columns=COLUMNS,
        title=f"packed: {thread_count(0)} threads, float32",
        notes=[
            "loop: one text at a time; sorted: groups of similar length",
            "x: how many times as long as weft",
            "of peak: of the most that fused multiply-adds showed in the whole run, in turns with the rows",
        ],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: two layers of BERT-base on texts of different length, against Hugging Face."""
    with torch.no_grad():
        padded = batch(uniform(256), 16)
        lineup = Lineup(bert_base(2), padded, [peer for peer in PEERS if peer.name == "hf sdpa"])
        result = lineup.measure("BERT-base, 2 layers, 16 texts of 51 to 256 tokens", padded, BenchOptions(quick=True))
    return [result.headline(result.measured.case.name, today="hf sdpa")]


def summary(
    *, head: Row, same: Row, decoder: Row, attention: Row, train: Row, trainer: Row, embed: Row, rerank: Row,
    arrivals: Row, memory: Row,
) -> dict[str, object]:  # fmt: skip
    """The figures that the README quotes; of a peer that could not run, the reason."""
    absent = "not measured"
    return {
        "vs_hf_sdpa": head.get("vs_hf_sdpa", absent),
        "vs_compile": head.get("vs_torch.compile", absent),
        "vs_onnxruntime": head.get("vs_onnxruntime", absent),
        "vs_fastpath": head.get("vs_fast_path", absent),
        "vs_best_peer": head["vs_best_peer"],
        "equal_lengths_vs_best": same["vs_best_peer"],
        "peak_fraction": head["peak_fraction"],
        "attention_vs_eager": attention.get("vs_eager", absent),
        "attention_vs_sdpa": attention.get("vs_sdpa", absent),
        "train_vs_sdpa": train.get("vs_hf_sdpa", absent),
        "embed_vs_sentence_transformers": embed["vs_best_peer"],
        "crossencoder_vs_st": rerank["vs_best_peer"],
        "qwen3_vs_sdpa": decoder.get("vs_hf_sdpa", absent),
        "trainer_vs_sdpa": trainer["vs_hf_sdpa"],
        "trainer_registry_vs_sdpa": trainer["registry_vs_hf_sdpa"],
        "continuous_vs_closed": arrivals["vs_best_peer"],
        "memory_vs_eager": memory["ratio"],
    }


class Lineup:
    """weft and the peers that can run a model, built once; each batch is measured in all their modes."""

    def __init__(self, model: Any, example: PaddedBatch, peers: Sequence[Peer]) -> None:
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
            except Exception as error:
                if peer is WEFT:
                    raise
                self._calls.pop(name, None)  # the rows say why it is not there
                self._absent[name] = why_absent(error)

    def measure(self, case: str, padded: PaddedBatch, options: BenchOptions, modes: Sequence[str] = MODES) -> Result:
        """One batch by everybody, in turns."""
        modes = modes if len(padded.lengths) > 1 else ("padded",)
        systems: dict[str, System] = {}
        for name, call in self._calls.items():
            systems |= runs(self._peers[name], call, padded, modes)
        systems["peak"] = _peak_loop
        labels = {"batch": len(padded.lengths), "tokens": padded.tokens, "padded": padded.ids.numel()}
        return _result(Case(case, systems, labels), options, flops(self._model.config, padded.lengths), self._absent)


def _check(states: Tensor, want: Tensor, padded: PaddedBatch) -> None:
    """Raises if a peer computes something else, which would make its time worthless."""
    difference = ((states - want) * padded.mask[..., None]).abs().max()
    if not float(difference) < AGREEMENT:
        raise ValueError(f"its states differ from weft's by {float(difference):.1e}")


def flops(config: Any, lengths: Sequence[int]) -> float:
    """Multiplications and additions that real tokens need: matmuls and attention, half of that where it is causal."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    decodes, head_dim = hasattr(config, "num_key_value_heads"), getattr(config, "head_dim", width // heads)
    keys = config.num_key_value_heads if decodes else heads
    weights = width * head_dim * (2 * heads + 2 * keys) + (3 if decodes else 2) * width * inner
    pairs = sum(length * (length + 1) / 2 if decodes else length * length for length in lengths)
    return float(config.num_hidden_layers * (2 * sum(lengths) * weights + 4 * heads * head_dim * pairs))


def _result(case: Case, options: BenchOptions, flops: float = 0.0, absent: Mapping[str, str] | None = None) -> Result:
    """Measures; the bound is the time of `flops` at the best peak that took turns with the rest, if one did."""
    # Calls that find out how many fill a turn warm up as well.
    measured = measure(case, rounds=QUICK_ROUNDS, warmup=0, max_retries=1) if options.quick else measure(case)
    bound, absent = None, absent or {}
    facts: dict[str, object] = {_versus(name): why for name, why in absent.items()}
    if "peak" in case.systems and flops:
        peak = _core.fma_loop(isa(), thread_count(0), 1) * PEAK_ROUNDS / measured.best("peak")
        bound = flops / peak
        facts["peak_gflops"] = peak / 1e9
    return Result(
        measured, bound, facts={**facts, "absent": "; ".join(f"{n}: {why}" for n, why in absent.items()) or None}
    )


def _peak_loop() -> None:
    _core.fma_loop(isa(), thread_count(0), PEAK_ROUNDS)


def _versus(peer: str) -> str:
    """The key of a peer's time over weft's; of one that could not run, of the reason."""
    return f"vs_{peer.replace(' ', '_')}"


def _row(result: Result) -> Row:
    measured = result.measured
    peers = [name for name in measured.case.systems if name not in ("weft", "peak")]
    best = min(peers, key=measured.median)
    return {
        **{key: value for key, value in measured.row().items() if not key.startswith("peak_")},
        **{_versus(name): measured.ratio(name, "weft") for name in peers},
        "best_peer": best,
        "best_peer_ms": measured.median(best) * 1e3,
        "vs_best_peer": measured.ratio(best, "weft"),
        "peak_fraction": None if result.bound is None else result.bound / measured.median("weft"),
        **result.facts,
    }


def trainer_row(result: Result) -> Row:
    """A row with what the registry alone gains, too."""
    return {**_row(result), "registry_vs_hf_sdpa": result.measured.ratio("hf sdpa", "registry")}


# ---- models ----------------------------------------------------------------------------------------------------------


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
    cases += [(name, lengths_like(name), 16) for name in ("squad-384", "wikipedia-512")]
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


def decoder_result(layers: int, options: BenchOptions) -> Result:
    """Texts through a decoder, as embedders are made of them."""
    padded = batch(uniform(256), 16)
    lineup = Lineup(qwen3(layers), padded, [peer for peer in PEERS if peer.name in ("hf sdpa", "hf eager")])
    return lineup.measure(f"Qwen3-shaped, {layers} layers, uniform 256, batch 16", padded, options)


# ---- training --------------------------------------------------------------------------------------------------------


def training(model: Any, padded: PaddedBatch, options: BenchOptions) -> Result:
    """One step forward and backward, without dropout, on the mean of the states of real tokens."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.train()
    fast = pack(model)

    def step(each: Any) -> System:
        def call() -> None:
            each.zero_grad(set_to_none=True)
            states = each(padded.ids, attention_mask=padded.mask).last_hidden_state
            (states * padded.mask[..., None]).square().sum().backward()

        return call

    case = Case("training step, uniform 256, batch 16", {"weft": step(fast), "hf sdpa": step(model)})
    result = _result(case, options)
    model.eval()
    return result


# ---- memory ----------------------------------------------------------------------------------------------------------

_DEADLINE_SECONDS = 600
_CHILD = """
import sys
from weft.bench.packed import forward_peak_mib
print(forward_peak_mib(sys.argv[1], int(sys.argv[2])))
"""


def memory_row(*, layers: int) -> Row:
    """MiB that a forward at uniform 1024, batch 16, adds to what the model takes."""
    children = [_start_child(system, layers) for system in ("weft", "eager")]  # at once: memory is not time
    weft, eager = (_peak_of(child) for child in children)
    return {
        "case": f"peak memory, uniform 1024, batch 16, {layers} layers",
        "weft_mib": weft,
        "hf_eager_mib": eager,
        "ratio": weft / eager,
        "best_peer": f"weft {weft:.0f} MiB, padded eager {eager:.0f} MiB",
    }


def _start_child(system: str, layers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, system, str(layers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _peak_of(child: subprocess.Popen[str]) -> float:
    try:
        out, errors = child.communicate(timeout=_DEADLINE_SECONDS)
    finally:
        child.kill()
    if child.returncode:
        raise RuntimeError(f"the memory of {child.args!r} could not be measured:\n{errors[-2000:]}")
    return float(out.split()[-1])


def forward_peak_mib(system: str, layers: int) -> float:
    """Runs one forward here and returns the memory that it added at its peak."""
    model, padded = bert_base(layers), batch(uniform(1024), 16)
    with torch.no_grad():
        if system == "weft":
            call = pack(model)
            call(padded.ids[:1, :8])  # packs the weights, which a user does once
        else:
            model.set_attn_implementation("eager")
            call = model
        return peak_growth(lambda: call(padded.ids, attention_mask=padded.mask)) / (1 << 20)
