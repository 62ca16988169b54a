"""vLLM on two ranks with the plugin, through windows: what one rank without it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from outcome import Outcome
from references import close, greedy_of

pytestmark = pytest.mark.timeout(1800)  # the first to ask waits for all the processes

LAYERS, IN_A_LAYER = 2, 4
NATIVE = "native matmul, weight packed"


@pytest.fixture(params=["windows", "windows_compiled"])
def two_ranks(request: pytest.FixtureRequest, windows: Outcome, windows_compiled: Outcome) -> Outcome:
    return {"windows": windows, "windows_compiled": windows_compiled}[request.param]


def test_greedy_tokens_are_those_of_one_rank_without_the_plugin(stock: Outcome, two_ranks: Outcome) -> None:
    assert close(two_ranks.answer["greedy"], stock.answer["generation"]["greedy"])


def test_reloaded_weights_are_used(two_ranks: Outcome, folders: Path) -> None:
    assert two_ranks.answer["reloaded"]["tokens"] == greedy_of(folders / "llama_b")


def test_matmuls_and_sums_of_a_step_are_wefts(two_ranks: Outcome) -> None:
    sums = 2 * LAYERS + 1  # two row-parallel linears a layer, and the embedding
    assert two_ranks.answer["counts"] == [{"matmuls": LAYERS * IN_A_LAYER + 1, "sums": sums}] * 2


def test_the_log(two_ranks: Outcome) -> None:
    assert two_ranks.said[:6] == [
        f"replaced 4 RowParallelLinear: matmul_all_reduce through windows, {NATIVE}",
        f"replaced 2 QKVParallelLinear: {NATIVE}",
        f"replaced 1 ParallelLMHead: {NATIVE}",
        f"replaced 2 MergedColumnParallelLinear: {NATIVE}",
        "left alone 1 VocabParallelEmbedding: it looks up rows; packed when a head that is tied to it multiplies",
        "replaced collectives of tp:0: windows in place of gloo, 2 ranks",
    ]


def test_an_adapter(stock: Outcome, windows_kinds: Outcome) -> None:
    assert close(windows_kinds.answer["adapter"], stock.answer["kinds"]["adapter"])
    separate = f"replaced 4 RowParallelLinear: {NATIVE}; adapters come between it and its all-reduce"
    assert separate in windows_kinds.said


def test_embeddings(stock: Outcome, windows_kinds: Outcome) -> None:
    ours, theirs = torch.tensor(windows_kinds.answer["bert"]), torch.tensor(stock.answer["pooling"]["bert"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    blocks = 2  # 587 rows; the fused matmul has a call for each block
    assert [rank["matmuls"] for rank in windows_kinds.answer["bert, counts"]] == [LAYERS * (2 + 2 * blocks)] * 2
