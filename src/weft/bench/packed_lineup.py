"""The rows of the packed benchmark: who takes part, the turns, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft import _core
from weft.bench.harness import Case, Measurement, Options, measure
from weft.bench.packed_inputs import Padded
from weft.bench.packed_peers import MODES, WEFT, Call, Peer, Unavailable, runs
from weft.kernels.cpu import isa, thread_count

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

    def measure(self, case: str, padded: Padded, options: Options, modes: Sequence[str] = MODES) -> Result:
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


def timed(case: Case, options: Options) -> Measurement:
    # Calls that find out how many fill a turn warm up as well.
    return measure(case, rounds=QUICK_ROUNDS, warmup=0, max_retries=1) if options.quick else measure(case)


def _peak_loop() -> None:
    _core.fma_loop(isa(), thread_count(0), PEAK_ROUNDS)


def _peak_flops() -> float:
    """Flops of one turn of the peak loop."""
    return _core.fma_loop(isa(), thread_count(0), 1) * PEAK_ROUNDS
