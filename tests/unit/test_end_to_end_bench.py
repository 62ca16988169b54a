"""`weft bench end_to_end` without ranks: sizes, rows, bounds, summary, and torch's models against Hugging Face's."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from weft.bench import end_to_end
from weft.bench.end_to_end import bound_seconds, make_row, summary
from weft.bench.end_to_end_lab import Machine, TorchStep, predicted_step
from weft.bench.harness import Case, Measurement, Result, Round
from weft.bench.systems import torch_models
from weft.bench.systems.end_to_end import (
    GPT2,
    GROUPS,
    LLAMA,
    SHARES,
    TINY_GPT2,
    TINY_LLAMA,
    Load,
    ModelSize,
    Place,
    WorkKind,
    full,
    mixed_lengths,
    quick,
    tiny,
    train_batch,
)
from weft.bench.systems.parallel import hf_model
from weft.packed.inputs import IGNORED_LABEL
from weft.report import Row
from weft.timeline import Event, Timeline, TracedCall

MACHINE = Machine(flops=100e9, bandwidth=10e9)
KEYS = [
    "train_vs_torch_packed", "train_vs_torch_padded", "prefill_vs_hf_tp", "prefill_vs_vllm", "decode_vs_hf_tp",
    "decode_vs_vllm", "vllm_plugin_prefill", "vllm_plugin_decode", "exposed_comm_fraction",
    "bounds_beaten", "noisy_rows", "rows", "noisy_extremes",
]  # fmt: skip


def row_of(
    kind: WorkKind,
    seconds: dict[str, float],
    place: Place | None = None,
    exposed: float | None = None,
    step: TorchStep | None = None,
) -> Row:
    case = Case("row", dict.fromkeys(seconds, int))
    measured = Measurement(case, (Round(seconds, 0.0),), 0)
    result = Result(measured, bound=0.5, timelines=(Timeline([]),), facts={"exposed": exposed})
    return make_row(place or Place(LLAMA, 1, 2, None), kind, Load(), result, gbps=1.0, step=step)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [TINY_LLAMA, TINY_GPT2, replace(TINY_LLAMA, kv_heads=2)])
def test_parameters_are_those_of_the_model(size: ModelSize) -> None:
    matrices = [p.numel() for p in hf_model(size).parameters() if p.dim() == 2]
    assert sum(matrices) == size.parameters


def test_flops_of_a_step_are_six_for_each_parameter_and_token_and_attention() -> None:
    matmuls = LLAMA.layers * LLAMA.layer_parameters + LLAMA.head_parameters
    attention = 3 * LLAMA.layers * 2 * (100**2 + 28**2) * LLAMA.width
    assert LLAMA.train_flops((100, 28)) == 6 * matmuls * 128 + attention


def test_one_host_sends_nothing() -> None:
    assert LLAMA.train_bytes(2048, hosts=1) == 0
    # 8 layers x 4 exchanges and 2 more, there and back, of half of 2048 rows
    assert LLAMA.train_bytes(2048, hosts=2) == 2 * 34 * 1024 * 1024 * 4


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_the_full_benchmark_has_every_group_and_share_for_both_models() -> None:
    wanted = {(h, d, share) for h, d in GROUPS for share in (SHARES if h > 1 else (None,))}
    for size in (LLAMA, GPT2):
        found = [place for place, kinds in full().places if place.size == size and WorkKind.TRAIN in kinds]
        assert {(p.hosts, p.devices, p.share) for p in found} == wanted
    assert all(full().rounds_of(place) >= 7 for place, _ in full().places if place.is_headline)
    assert {kind for place, kinds in full().places for kind in kinds if place.size == LLAMA} == set(WorkKind)


@pytest.mark.parametrize("scale", [full(), quick(), tiny()])
def test_every_scale_measures_each_kind_where_the_summary_looks(scale: Any) -> None:
    headline = {kind for place, kinds in scale.places for kind in kinds if place.is_headline}
    assert headline == set(WorkKind)


def test_a_quick_row_says_that_layers_are_missing() -> None:
    assert "2 of 8 layers" in quick().places[0][0].name


def test_lengths_fill_the_batch_and_pad_to_more() -> None:
    lengths = Load().train_lengths
    batch = train_batch(lengths, 1000, multiple=4)
    assert batch.tokens == 2048 == batch.packed.tokens
    assert batch.ids.numel() > 1.5 * batch.tokens
    assert batch.ids.shape[1] % 4 == 0
    assert (batch.labels != IGNORED_LABEL).sum() == (batch.packed_labels != IGNORED_LABEL).sum() == 2048 - len(lengths)


def test_decoding_is_what_comes_after_the_first_token() -> None:
    row = row_of(WorkKind.DECODE, {"weft": 3.0, "weft_first": 1.0, "hf_tp": 6.0, "hf_tp_first": 2.0})
    assert row["weft_ms"] == 2.0e3
    assert row["vs_padded"] == 2.0
    assert row["weft_tokens_per_s"] == 16 * 64 / 2.0


def test_the_share_that_came_out_is_shown() -> None:
    step = TorchStep(seconds=7.0, card_bytes=1e9)
    row = row_of(WorkKind.TRAIN, {"torch_packed": 10.0, "weft": 8.0}, Place(LLAMA, 2, 1, 0.3), step=step)
    assert row["torch_share"] == pytest.approx(0.3)


def test_a_bound_is_the_longest_of_its_parts() -> None:
    place, load = Place(LLAMA, 2, 1, 0.3), Load()
    flops = LLAMA.train_flops(load.train_lengths) / MACHINE.flops
    assert bound_seconds(place, WorkKind.TRAIN, load, MACHINE, 1000.0) == flops
    slow = 8e-9 * LLAMA.train_bytes(2048, hosts=2) / 0.01
    assert bound_seconds(place, WorkKind.TRAIN, load, MACHINE, 0.01) == pytest.approx(slow)
    assert slow > flops
    with_cpu = bound_seconds(place, WorkKind.TRAIN, load, MACHINE, 1000.0, cpu_per_byte=2e-9)
    carried = 2e-9 * place.hosts * LLAMA.train_bytes(2048, hosts=2) / (os.cpu_count() or 1)
    assert with_cpu == pytest.approx(flops + carried)
    one_host = replace(place, hosts=1, devices=2)
    assert bound_seconds(one_host, WorkKind.DECODE, load, MACHINE, None) == 64 * LLAMA.decode_weight_bytes / 10e9
    fast_memory = replace(MACHINE, bandwidth=1e15)
    assert 0 < bound_seconds(one_host, WorkKind.DECODE, load, fast_memory, None) < 64 * LLAMA.decode_weight_bytes / 10e9


def test_the_link_is_as_slow_as_the_share_needs() -> None:
    step = TorchStep(seconds=7.0, card_bytes=1e9)
    for share in SHARES:
        sending = step.card_bytes * 8e-9 / step.gbps(share)
        assert sending / (sending + step.seconds) == pytest.approx(share)


# ---- summary ---------------------------------------------------------------------------------------------------------


def test_the_summary_has_every_key_and_takes_the_worst_row() -> None:
    slow, fast = (
        {"torch_padded": 4.0, "torch_packed": 3.0, "weft": 2.0},
        {
            "torch_padded": 4.0,
            "torch_packed": 3.0,
            "weft": 1.0,
        },
    )
    rows = [
        row_of(WorkKind.TRAIN, slow, Place(LLAMA, 2, 1, 0.3), exposed=0.1),
        row_of(WorkKind.TRAIN, fast, Place(LLAMA, 2, 2, 0.3), exposed=0.2),
        row_of(
            WorkKind.TRAIN, {**slow, "weft": 9.0}, Place(LLAMA, 2, 2, 0.5), exposed=0.9
        ),  # not what the figures are about
        row_of(WorkKind.PREFILL, {"hf_tp": 3.0, "vllm_1": 5.0, "vllm_2": 4.0, "vllm_2_plugin": 2.0, "weft": 2.0}),
    ]
    found = summary(rows)
    assert list(found) == KEYS
    assert (found["train_vs_torch_packed"], found["train_vs_torch_padded"]) == (1.5, 2.0)
    assert (found["prefill_vs_hf_tp"], found["prefill_vs_vllm"], found["vllm_plugin_prefill"]) == (1.5, 2.0, 2.0)
    assert found["exposed_comm_fraction"] == 0.2
    assert found["decode_vs_vllm"] is None


def test_vllm_without_the_plugin_is_the_peer() -> None:
    row = {"vllm_1": 5.0, "vllm_1_first": 1.0, "vllm_2_plugin": 1.5, "vllm_2_plugin_first": 1.0}
    found = summary([row_of(WorkKind.DECODE, {**row, "weft": 3.0, "weft_first": 1.0})])
    assert found["decode_vs_vllm"] == 2.0


def test_it_is_registered_and_keeps_its_name() -> None:
    from weft.bench import load

    assert load("end_to_end").NAME == end_to_end.NAME == "end_to_end"


# ---- a predicted step ------------------------------------------------------------------------------------------------


def test_a_predicted_step_keeps_the_gaps_and_takes_the_plans_times() -> None:
    def call(start: float, end: float, promised: float) -> TracedCall:
        happened = Timeline([Event("compute", "compute", "y", start, end)])
        plan = Timeline([Event("rank 0/compute", "compute", "y", 0.0, promised)])
        return TracedCall("y", "", end - start, happened, predicted=lambda: plan)

    calls = [call(10.0, 12.0, 1.0), call(15.0, 16.0, 2.0)]
    step = predicted_step(calls, Timeline([Event("rank 0/compute", "compute", "y", 10.0, 16.0)]))
    assert step is not None
    assert [(e.start, e.end) for e in step.events] == [(0.0, 1.0), (4.0, 6.0)]  # the gap of 3 s stays
    assert predicted_step([], Timeline([])) is None


# ---- torch's own models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [TINY_LLAMA, replace(TINY_LLAMA, kv_heads=2), TINY_GPT2])
def test_torchs_model_is_hugging_faces(size: ModelSize) -> None:
    model = hf_model(size)
    twin = torch_models.from_hf(model, size)
    batch = train_batch(mixed_lengths(60, longest=24), size.vocabulary)
    positions = torch.arange(batch.ids.shape[1])[None].expand_as(batch.ids)
    padded = twin(batch.ids, positions)
    torch.testing.assert_close(padded, model(batch.ids).logits)
    packed = twin(batch.packed.values[None], batch.packed.positions[None], lengths=batch.lengths)
    losses = [
        F.cross_entropy(padded.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL),
        F.cross_entropy(packed[0], batch.packed_labels, ignore_index=IGNORED_LABEL),
    ]
    torch.testing.assert_close(*losses)
