"""`weft.Generator` where ranks share the model: requests as alone, the same on all ranks; who differs is told before
anything moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import WORDS, both, build, checks, mesh
from test_parallel_inference import prompts, same_everywhere
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from weft.errors import ModelChanged, PeerMismatch, Unsupported


def alone(model: Any, prompt: list[int], **options: Any) -> Any:
    return weft.Generator(model, slots=1, prefill_tokens=1000).submit(prompt, **options).result()


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": 3},
    {"max_new_tokens": 12, "temperature": 1.2, "top_k": 9, "seed": 4},
    {"max_new_tokens": 7, "repetition_penalty": 1.5, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"max_new_tokens": 5, "logprobs": 0, "stop": [[7], [8]], "top_p": 0.7, "temperature": 0.9},
]


def arrivals(size: int) -> None:
    """In chunks, joining at random steps: as alone, to the last bit of the log-probabilities."""
    for family in ("Llama", "GPT2"):
        shared, rng = weft.parallelize(build(family).eval(), mesh()), random.Random(7)
        given = [(p, {**rng.choice(OPTIONS), "eos": ()}) for p in prompts([rng.randint(1, 40) for _ in range(12)])]
        generator = weft.Generator(shared, slots=4, prefill_tokens=11)
        streams: list[Any] = []
        while len(streams) < len(given):
            for prompt, options in given[len(streams) : len(streams) + rng.randint(0, 3)]:
                streams.append(generator.submit(prompt, **options))
            for _ in range(rng.randint(0, 4)):
                generator.step()
        assert list(streams[3]) == streams[3].tokens
        found = [stream.result() for stream in streams]
        assert found == [alone(shared, p, **o) for p, o in given]
        assert [f.tokens for f in found] == [
            alone(weft.pack(build(family).eval()), p, **o).tokens for p, o in given
        ]  # one rank without a group says the same
        same_everywhere([(f.tokens, f.logprobs) for f in found])


def as_packed(size: int) -> None:
    """A parallel model of one rank and a packed one: the same bits."""
    if size > 1:
        return
    for family in ("Llama", "GPT2"):
        plain = build(family).eval()
        shared, packed = weft.parallelize(build(family).eval(), mesh()), weft.pack(plain)
        given = prompts()
        assert weft.generate(shared, given, max_new_tokens=9) == weft.generate(packed, given, max_new_tokens=9)
        for prompt in given:
            options = {"max_new_tokens": 9, "logprobs": WORDS, "eos": ()}
            assert alone(shared, prompt, **options) == alone(packed, prompt, **options)


def who_differs(size: int) -> None:
    """Told before anything moves: ranks go on when the odd request is taken back."""
    shared = weft.parallelize(build("Llama").eval(), mesh())
    generator, rank = weft.Generator(shared), dist.get_rank()
    first = generator.submit([5, 6, 7], max_new_tokens=6, eos=())
    generator.step()
    before = first.tokens
    if size > 1:
        for odd in (
            lambda: generator.submit([5, 6 + rank], max_new_tokens=3),
            lambda: generator.submit([5], max_new_tokens=3 + rank),
            lambda: generator.submit([5], max_new_tokens=3, temperature=1.0, seed=rank),
            lambda: generator.submit([5], max_new_tokens=3, stop=[[7 + rank]]),
            lambda: generator.submit([5], max_new_tokens=3, presence_penalty=float(rank)),
        ):
            stream = odd()
            with pytest.raises(PeerMismatch, match=r"rank 0: (.|\n)*rank 1: "):
                generator.step()
            assert first.tokens == before
            stream.cancel()
        if rank:
            extra = generator.submit([5], max_new_tokens=3)
        with pytest.raises(PeerMismatch, match="a step of 1 of 1 requests"):
            generator.step()
        if rank:
            extra.cancel()
        with pytest.raises(Unsupported, match="all of them make steps at the same places"):
            generator.__enter__()
        with pytest.raises(Unsupported, match="logits_processor: where ranks share the model"):
            generator.submit([5], max_new_tokens=3, logits_processor=[lambda ids, scores: scores])
    assert first.result().tokens == weft.generate(shared, [[5, 6, 7]], max_new_tokens=6, eos=())[0]
    same_everywhere(first.tokens)


def changes(size: int) -> None:
    """One rank's weights are written to: all end what has begun, and what waits runs on the new ones."""
    whole, shared = both("Llama")
    whole.eval(), shared.eval()
    generator = weft.Generator(shared, slots=1)
    begun = generator.submit([5, 6, 7], max_new_tokens=6, eos=())
    waiting = generator.submit([9, 8], max_new_tokens=6, eos=())
    generator.step()
    with torch.no_grad():
        if dist.get_rank() == size - 1:
            shared.lm_head.weight.to_local().neg_()
    with pytest.raises(ModelChanged):
        begun.result()
    assert waiting.result() == alone(shared, [9, 8], max_new_tokens=6, eos=())
    same_everywhere(waiting.tokens)
    grid = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "tp"))
    sharded = weft.parallelize(build("Llama").eval(), grid["tp"])
    fully_shard(sharded, mesh=grid["data"])
    with pytest.raises(Unsupported, match="does not take a model that was given to fully_shard"):
        weft.Generator(sharded)
    with pytest.raises(ValueError, match="BertForMaskedLM is no decoder"):
        weft.Generator(weft.parallelize(build("Bert").eval(), mesh()))


CASES = [arrivals, as_packed, who_differs, changes]


@pytest.fixture(scope="module", params=[1, 2])
def outcome(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_requests_on_ranks(outcome: dict[str, str | None], case: str) -> None:
    assert outcome[case] is None, outcome[case]
