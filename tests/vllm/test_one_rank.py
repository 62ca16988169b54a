"""vLLM on one rank, with the plugin and without: the same answers, by weft's matmuls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from outcome import Outcome
from references import close, greedy_of

pytestmark = pytest.mark.timeout(1800)  # the first to ask waits for all the processes

LAYERS, IN_A_LAYER = 2, 4  # linears: query, key and value in one; output; up and gate in one; down


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("generation", "greedy"),  # prompts of 1 to 520 tokens, in chunks of 64
        ("generation", "again"),  # with what is cached of them
        ("generation", "second"),  # another engine in the same process
        ("generation", "first, beside a second"),
        ("generation", "reloaded"),  # `reload_weights` with the second's weights
        ("weights", "tied"),
        ("kinds", "without adapter"),
        ("kinds", "adapter"),
        ("kinds", "mixed"),  # requests with it and without in one batch
        ("kinds", "int8"),
        ("kinds", "bfloat16"),
        ("kinds", "float16"),
    ],
)
def test_greedy_tokens_and_logprobs_are_those_without_the_plugin(
    stock: Outcome, plugin: Outcome, program: str, answer: str
) -> None:
    assert close(plugin.answer[program][answer], stock.answer[program][answer])


@pytest.mark.parametrize("answer", ["sampled", "beams"])
def test_seeds_and_beams_give_the_same_tokens(stock: Outcome, plugin: Outcome, answer: str) -> None:
    assert plugin.answer["generation"][answer] == stock.answer["generation"][answer]


def test_logprobs_of_the_prompt_are_the_same(stock: Outcome, plugin: Outcome) -> None:
    ours, theirs = (outcome.answer["generation"]["prompt_logprobs"] for outcome in (plugin, stock))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-4)


def test_an_adapter_changes_the_tokens_and_other_weights_too(plugin: Outcome) -> None:
    kinds, generation = plugin.answer["kinds"], plugin.answer["generation"]
    assert kinds["adapter"]["tokens"] != kinds["without adapter"]["tokens"]
    assert generation["reloaded"]["tokens"] == generation["second"]["tokens"] != generation["greedy"]["tokens"]


# A head that is tied to the embedding: vLLM's own matmuls go on with the copy that they packed when it was loaded.


@pytest.mark.parametrize(
    ("answer", "folder", "scaled"),
    [
        ("tied", "tied", False),
        ("tied, reloaded", "tied_b", False),
        ("tied, written to", "tied_b", True),  # through `.data`, which torch does not count
        ("tied, after a sleep", "tied_b", True),  # which vLLM ignores on a CPU
    ],
)
def test_a_tied_head_follows_its_embedding(
    plugin: Outcome, folders: Path, answer: str, folder: str, scaled: bool
) -> None:
    assert plugin.answer["weights"][answer]["tokens"] == greedy_of(folders / folder, scaled=scaled)


def test_weights_that_are_loaded_past_vllm_are_refused_as_without_the_plugin(stock: Outcome, plugin: Outcome) -> None:
    refused = stock.answer["weights"]["loaded past vLLM"]
    assert plugin.answer["weights"]["loaded past vLLM"] == refused != "taken"


# Pooling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "classifier", "bert in float16"])
def test_embeddings_and_classes_are_those_without_the_plugin(stock: Outcome, plugin: Outcome, name: str) -> None:
    ours, theirs = (torch.tensor(outcome.answer["pooling"][name]) for outcome in (plugin, stock))
    assert len({tuple(row) for row in ours.tolist()}) == len(ours)  # no two texts have the same
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# Does weft compute at all? In float32 both matmuls add up the products in the same order as long as a row is short, so
# that equal bits say nothing about it.


@pytest.mark.parametrize(
    ("program", "answer", "matmuls"),
    [
        ("generation", "counts", LAYERS * IN_A_LAYER + 1),  # and the head, in the one step of a one-token answer
        ("kinds", "adapter, counts", LAYERS * IN_A_LAYER + 1),
        ("pooling", "bert, counts", LAYERS * IN_A_LAYER),
        ("pooling", "modernbert, counts", LAYERS * IN_A_LAYER),
        ("pooling", "llama, counts", LAYERS * IN_A_LAYER),
        ("pooling", "bert in float16, counts", 0),
    ],
)
def test_replaced_layers_run(stock: Outcome, plugin: Outcome, program: str, answer: str, matmuls: int) -> None:
    def count(outcome: Outcome) -> list[int]:
        ranks: list[dict[str, Any]] = outcome.answer[program][answer]
        return [rank.get("matmuls", 0) for rank in ranks]

    assert (count(plugin), count(stock)) == ([matmuls], [0])


# The log --------------------------------------------------------------------------------------------------------

NATIVE = "native matmul, weight packed"
LOOK_UP = "it looks up rows; packed when a head that is tied to it multiplies"


def test_the_log_of_one_rank(plugin: Outcome) -> None:
    assert plugin.said[:6] == [
        f"replaced 4 RowParallelLinear: {NATIVE}",
        f"replaced 2 QKVParallelLinear: {NATIVE}",
        f"replaced 1 ParallelLMHead: {NATIVE}",
        f"replaced 2 MergedColumnParallelLinear: {NATIVE}",
        f"left alone 1 VocabParallelEmbedding: {LOOK_UP}",
        "left alone collectives of tp:0: it has one rank",
    ]


def test_the_log_says_where_nothing_was_replaced(plugin: Outcome) -> None:
    float16 = "its weight is float16, expected float32 or bfloat16"
    end = plugin.said[-6:]  # BERT in float16 is the last
    assert f"left alone 2 ColumnParallelLinear: {float16}" in end
    assert end[-1] == "nothing was replaced in this model: it runs as without WEFT_VLLM=1"


def test_quantised_layers_are_left_alone_by_name(plugin: Outcome) -> None:
    assert "left alone 4 RowParallelLinear: it is quantised (CompressedTensorsLinearMethod)" in plugin.said


def test_without_the_variable_the_log_has_nothing_of_weft(stock: Outcome) -> None:
    assert stock.said == []
