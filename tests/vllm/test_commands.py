"""The commands of docs/vllm.md as they stand there: the servers are asked over HTTP, the benchmark has one round."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from commands import documented
from outcome import Outcome

pytestmark = pytest.mark.timeout(1800)  # the first to ask waits for all the processes


@pytest.mark.parametrize("name", ["server", "server_two_ranks"])
def test_it_answers_as_without_the_plugin(
    request: pytest.FixtureRequest, server: Outcome, server_two_ranks: Outcome, server_stock: Outcome, name: str
) -> None:
    outcome: Outcome = request.getfixturevalue(name)
    assert 1 <= len(outcome.answer["page"][0]["text"].split()) <= 16
    for asked in ("text", "several"):
        for ours, theirs in zip(outcome.answer[asked], server_stock.answer[asked], strict=True):
            assert len(ours["text"].split()) == 8
            assert ours["text"] == theirs["text"]
            torch.testing.assert_close(torch.tensor(ours["logprobs"]), torch.tensor(theirs["logprobs"]))


def test_the_logs_say_which_has_the_plugin(server: Outcome, server_two_ranks: Outcome, server_stock: Outcome) -> None:
    assert "replaced 4 RowParallelLinear: native matmul, weight packed" in server.said
    assert any(line.startswith("replaced 4 RowParallelLinear:") for line in server_two_ranks.said)
    assert server_stock.said == []


def test_the_benchmark_compares_equal_tokens(benchmark: Outcome) -> None:
    assert [(row["ranks"], row["plugin"]) for row in benchmark.answer["rows"]] == [(1, False), (2, False), (2, True)]
    assert all(row["tokens_equal"] for row in benchmark.answer["rows"])
    assert benchmark.answer["summary"]["vllm_plugin_decode"] > 0


def test_the_page_has_no_other_command() -> None:
    known = ["make setup-vllm", ". .venv-vllm/bin/activate", "curl ", "make test-vllm"]  # this run is the last of them
    others = [line for line in documented("") if line and not line.startswith(tuple(known))]
    assert others == [line for part in ("api_server", "systems.vllm") for line in documented(part)]
