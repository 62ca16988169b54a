"""vLLM itself, with and without the plugin: the same greedy tokens, and a log that says what was replaced."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch

from weft.bench.end_to_end_vllm_engine import Engine, Setup

VOCABULARY, NEW_TOKENS = 512, 12
SETUPS = {
    "1 rank": Setup("1 rank", ranks=1),
    "1 rank, plugin": Setup("1 rank, plugin", ranks=1, plugin=True),
    "2 ranks": Setup("2 ranks", ranks=2),
    "2 ranks, plugin": Setup("2 ranks, plugin", ranks=2, plugin=True),
    "2 ranks, plugin, compiled": Setup("2 ranks, plugin, compiled", ranks=2, plugin=True, eager=False),
}
pytestmark = pytest.mark.timeout(1500)  # an engine imports and loads for half a minute on a machine at rest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                Engine(setup, model, python=Path(sys.executable), max_length=1024, max_tokens=2048)
            )
            for name, setup in SETUPS.items()
        }
        for engine in started.values():
            engine.wait_until_ready()
        yield started


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 3, 16, 40, 520, 7]  # in one step more rows than a block of the fused matmul
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "1 rank"])
def test_greedy_tokens_are_those_of_one_rank_without_the_plugin(engines: dict[str, Engine], name: str) -> None:
    expected = engines["1 rank"].generate(_prompts(), NEW_TOKENS).tokens
    assert [len(tokens) for tokens in expected] == [NEW_TOKENS] * len(_prompts())
    assert engines[name].generate(_prompts(), NEW_TOKENS).tokens == expected


def _lines(engine: Engine) -> list[str]:
    return sorted(re.findall(r"weft: (.*)", engine.log))


NATIVE = "native matmul, weight packed"
LOOK_UP = "left alone 1 VocabParallelEmbedding: it looks up rows; packed when a head that is tied to it multiplies"


def test_the_log_of_one_rank(engines: dict[str, Engine]) -> None:
    assert _lines(engines["1 rank, plugin"]) == [
        LOOK_UP,
        "left alone collectives of tp:0: it has one rank",
        f"replaced 1 ParallelLMHead: {NATIVE}",
        f"replaced 2 MergedColumnParallelLinear: {NATIVE}",
        f"replaced 2 QKVParallelLinear: {NATIVE}",
        f"replaced 4 RowParallelLinear: {NATIVE}",
    ]


@pytest.mark.parametrize("name", ["2 ranks, plugin", "2 ranks, plugin, compiled"])
def test_the_log_of_two_ranks(engines: dict[str, Engine], name: str) -> None:
    assert _lines(engines[name]) == [
        LOOK_UP,
        f"replaced 1 ParallelLMHead: {NATIVE}",
        f"replaced 2 MergedColumnParallelLinear: {NATIVE}",
        f"replaced 2 QKVParallelLinear: {NATIVE}",
        f"replaced 4 RowParallelLinear: matmul_all_reduce through windows, {NATIVE}",
        "replaced collectives of tp:0: windows in place of gloo, 2 ranks",
    ]


@pytest.mark.parametrize("name", ["1 rank", "2 ranks"])
def test_without_the_variable_nothing_is_replaced(engines: dict[str, Engine], name: str) -> None:
    assert "weft: " not in engines[name].log
