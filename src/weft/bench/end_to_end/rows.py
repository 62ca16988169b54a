"""Measured rows of `weft bench end_to_end`: ratios, bounds, and the figures that the README quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.bench.end_to_end.cases import Load, Place, WorkKind
from weft.bench.end_to_end.lab import FIRST, EndToEndOutcome, Machine, TorchStep
from weft.bench.harness import Measurement
from weft.report import Column, Figure

OURS = "weft"
# What people run today, with padding and without it.
PADDED = {WorkKind.TRAIN: "torch_padded", WorkKind.PREFILL: "hf_tp", WorkKind.DECODE: "hf_tp"}
UNPADDED = {WorkKind.TRAIN: "torch_packed", WorkKind.PREFILL: "hf_tp_loop"}

COLUMNS = [
    Column("case", "ms"),
    Column("gbps", "Gbit/s", form=".2f"),
    Column("padded_ms", "padded", form=".0f"),
    Column("unpadded_ms", "unpadded", form=".0f"),
    Column("vllm_ms", "vLLM", form=".0f"),
    Column("weft_ms", "weft", form=".0f"),
    Column("weft_no_overlap_ms", "- overlap", form=".0f"),
    Column("weft_no_packing_ms", "- packing", form=".0f"),
    Column("weft_no_reshard_ms", "- reshard", form=".0f"),
    Column("weft_no_pipeline_ms", "- pipeline", form=".0f"),
    Column("bound_ms", "bound", form=".0f"),
    Column("vs_padded", "/padded", form=".2f", bar=True),
    Column("vs_unpadded", "/unpad.", form=".2f"),
    Column("vs_vllm", "/vLLM", form=".2f"),
    Column("weft_tokens_per_s", "tok/s", form=".0f"),
    Column("exposed", "exposed", form=".0%"),
]


@dataclass(frozen=True)
class Result:
    """One row, measured: where, what, what the lab gave, and what its bound is made of."""

    place: Place
    kind: WorkKind
    load: Load
    outcome: EndToEndOutcome
    gbps: float | None
    machine: Machine
    torch: TorchStep | None = None

    @property
    def measured(self) -> Measurement:
        return self.outcome.measured

    @property
    def tokens(self) -> int:
        """What tokens a second are counted by: read in training and prefill, written in decoding."""
        if self.kind is WorkKind.TRAIN:
            return self.load.train_tokens
        return (
            sum(self.load.prompt_lengths) if self.kind is WorkKind.PREFILL else self.load.prompts * self.load.new_tokens
        )

    @property
    def systems(self) -> list[str]:
        return [name for name in self.measured.case.systems if not name.endswith(FIRST)]

    def seconds(self, system: str) -> float:
        """The median; of decoding, what the tokens after the first take."""
        whole = self.measured.median(system)
        return whole - self.measured.median(system + FIRST) if self.kind is WorkKind.DECODE else whole

    def rate(self, system: str) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds(system)

    @property
    def bound(self) -> float:
        return bound_seconds(self.place, self.kind, self.load, self.machine, self.gbps)

    def versus(self, system: str | None) -> float | None:
        """How many times as long a system takes as weft; None where it did not take part."""
        return None if system is None or system not in self.systems else self.seconds(system) / self.seconds(OURS)

    @property
    def vllm(self) -> str | None:
        """vLLM at its best without the plugin: whatever number of ranks, compiled or not."""
        plain = [name for name in self.systems if name.startswith("vllm") and "plugin" not in name]
        return min(plain, key=self.seconds, default=None)

    @property
    def torch_share(self) -> float | None:
        """The part of torch's packed step that the link took, as it came out."""
        packed = "torch_packed"
        if self.torch is None or packed not in self.systems:
            return None
        return 1 - self.torch.seconds / self.seconds(packed)

    def row(self) -> dict[str, object]:
        found: dict[str, object] = {
            **self.measured.row(),
            "kind": self.kind.value, "model": self.place.size.name, "hosts": self.place.hosts,
            "devices": self.place.devices, "share": self.place.share, "gbps": self.gbps, "tokens": self.tokens,
            "rounds": len(self.measured.rounds),
        }  # fmt: skip
        for system in self.systems:
            found |= {f"{system}_ms": self.seconds(system) * 1e3, f"{system}_tokens_per_s": self.rate(system)}
        peers = {"padded": PADDED.get(self.kind), "unpadded": UNPADDED.get(self.kind), "vllm": self.vllm}
        for column, peer in peers.items():
            found[f"{column}_ms"] = found.get(f"{peer}_ms")
            found[f"vs_{column}"] = self.versus(peer)
        return {
            **found,
            "bound_ms": self.bound * 1e3,
            "bound_fraction": self.bound / self.seconds(OURS),
            "torch_share": self.torch_share,
            "exposed": self.outcome.exposed,
        }

    def figure(self) -> Figure:
        """What was predicted of weft's call, above what happened; or this alone."""
        predicted, happened = self.outcome.predicted, self.outcome.happened
        notes = [f"{happened.seconds * 1e3:.0f} ms measured"]
        if predicted is None:
            return Figure(self.measured.case.name, (happened,), notes)
        notes = [
            f"{predicted.seconds * 1e3:.0f} ms predicted, {notes[0]}",
            "predicted: ops by their plans, gaps as measured",
        ]
        return Figure(self.measured.case.name, (predicted, happened), notes)


def bound_seconds(place: Place, kind: WorkKind, load: Load, machine: Machine, gbps: float | None) -> float:
    """The longest of: all flops at the measured peak, all bytes over a card, all weights read once a decoding step.

    Norms, the softmax, the optimiser and latency are free here, so that it is reached by nobody.
    """
    size, wire = place.size, 0.0 if gbps is None else 8e-9 / gbps
    if kind is WorkKind.TRAIN:
        sent = size.train_bytes(load.train_tokens, place.hosts)
        return max(size.train_flops(load.train_lengths) / machine.flops, sent * wire)
    if kind is WorkKind.PREFILL:
        return max(
            size.prefill_flops(load.prompt_lengths) / machine.flops,
            size.forward_bytes(sum(load.prompt_lengths), place.hosts) * wire,
        )
    step = max(
        size.forward_flops([1] * load.prompts, head_rows=load.prompts) / machine.flops,
        size.forward_bytes(load.prompts, place.hosts) * wire,
        size.decode_weight_bytes / machine.bandwidth,
    )
    return load.new_tokens * step


def summary(results: Sequence[Result]) -> dict[str, object]:
    """The figures of Llama at 30 %, of prefill and decoding also inside a host; of several rows the worst.

    None where nothing was measured.
    """

    def worst(kind: WorkKind, peers: Mapping[WorkKind, str]) -> float | None:
        return min((x for r in _headlines(results, kind) if (x := r.versus(peers[kind])) is not None), default=None)

    exposed = [r.outcome.exposed for r in _headlines(results, WorkKind.TRAIN)]
    return {
        "train_vs_torch_packed": worst(WorkKind.TRAIN, UNPADDED),
        "train_vs_torch_padded": worst(WorkKind.TRAIN, PADDED),
        "prefill_vs_hf_tp": worst(WorkKind.PREFILL, PADDED),
        "prefill_vs_vllm": _vllm(results, WorkKind.PREFILL),
        "decode_vs_hf_tp": worst(WorkKind.DECODE, PADDED),
        "decode_vs_vllm": _vllm(results, WorkKind.DECODE),
        "vllm_plugin_prefill": _plugin(results, WorkKind.PREFILL),
        "vllm_plugin_decode": _plugin(results, WorkKind.DECODE),
        "exposed_comm_fraction": max((x for x in exposed if x is not None), default=None),
    }


def _headlines(results: Sequence[Result], kind: WorkKind) -> list[Result]:
    """What a figure is taken from; training figures are about links, and one host has none."""
    found = [result for result in results if result.kind is kind and result.place.is_headline]
    return [result for result in found if kind is not WorkKind.TRAIN or result.place.hosts > 1]


def _vllm(results: Sequence[Result], kind: WorkKind) -> float | None:
    return next((r.versus(r.vllm) for r in _headlines(results, kind) if r.vllm is not None), None)


def _plugin(results: Sequence[Result], kind: WorkKind) -> float | None:
    """Two ranks with the plugin against two ranks without it, started alike."""
    for result in _headlines(results, kind):
        if {"vllm_2", "vllm_2_plugin"} <= set(result.systems):
            return result.seconds("vllm_2") / result.seconds("vllm_2_plugin")
    return None
