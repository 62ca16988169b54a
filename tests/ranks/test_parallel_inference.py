"""Prefill and decoding on 1, 2 and 3 ranks: the unsharded model's tokens, and bits that depend on nothing else."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel_cases import WORDS, batch, both, build, checks, mesh
from whole_weights import cut_model

import weft
from weft.errors import PeerMismatch
from weft.models.families.llama import describe_llama
from weft.models.family import linear
from weft.packed import PackedBatch
from weft.transformer import network as network_module
from weft.transformer.call import inputs_of
from weft.transformer.generation import generate
from weft.transformer.program import RankProgram

LENGTHS = [1, 7, 30, 12]
NEW = 8


def prompts(lengths: list[int] = LENGTHS, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, WORDS, (n,), generator=generator).tolist() for n in lengths]


def greedy_of(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """What Hugging Face's own model says, a prompt at a time."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW} | options
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def same_everywhere(value: object) -> None:
    said: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    assert all(other == value for other in said)


def greedy(size: int) -> None:
    """Mixed lengths without padding, also with heads that the ranks cannot share evenly and with tied embeddings."""
    options = [("Llama", {}), ("Llama", {"heads": 10, "kv_heads": 5, "tie_word_embeddings": True}), ("GPT2", {})]
    for family, given in options:
        alone, shared = both(family, **given)
        alone.eval(), shared.eval()
        got = weft.generate(shared, prompts(), max_new_tokens=NEW, eos=())
        assert got == [greedy_of(alone, p) for p in prompts()], family
        same_everywhere(got)
        assert [weft.generate(shared, [p], max_new_tokens=NEW, eos=())[0] for p in prompts()] == got


def hugging_face(size: int) -> None:
    """`model.generate()` on batches that are padded on the left; beams; plain calls that go on with the cache."""
    for family in ("Llama", "GPT2"):
        alone, shared = both(family)
        alone.eval(), shared.eval()
        ids, mask, _ = batch([9, 4, 17], side="left")
        options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        for way in (
            {"do_sample": False},
            {"do_sample": False, "num_beams": 3},
            {"do_sample": False, "use_cache": False},
        ):
            assert torch.equal(shared.generate(ids, **options, **way), alone.generate(ids, **options, **way)), way
        with torch.no_grad():
            first, wanted = shared(ids, attention_mask=mask), alone(ids, attention_mask=mask)
            real = mask.bool()
            torch.testing.assert_close(first.logits[real], wanted.logits[real], rtol=2e-4, atol=2e-5)
            more, longer = torch.tensor([[5, 6], [7, 8], [9, 3]]), torch.nn.functional.pad(mask, (0, 2), value=1)
            got = shared(more, attention_mask=longer, past_key_values=first.past_key_values)
            want = alone(more, attention_mask=longer, past_key_values=wanted.past_key_values)
            torch.testing.assert_close(got.logits, want.logits, rtol=2e-4, atol=2e-5)
            with pytest.raises(ValueError, match="goes on with its own cache"):
                shared(more, attention_mask=longer, past_key_values=wanted.past_key_values)
            with pytest.raises(ValueError, match=r"attention_mask has shape \[3, 19\], expected \[batch, 21\]"):
                shared(more, attention_mask=longer, past_key_values=first.past_key_values)


def program_of(model: Any, *, network: bool = False, group: dist.ProcessGroup | None = None) -> RankProgram:
    """A Llama on all ranks; `network`: as if each were on a host of its own."""
    group = group or dist.group.WORLD
    assert group is not None
    part = cut_model(describe_llama(model.model), group, head=linear(model.lm_head))
    apart = tuple(range(group.size()))
    hosts = apart if network else (0,) * len(apart)
    with torch.no_grad(), mock.patch.object(network_module, "hosts_of", return_value=hosts):
        return RankProgram(part)


def logits_of(program: RankProgram, tokens: list[list[int]], pieces: int = 1) -> list[torch.Tensor]:
    """This rank's logits of all tokens of each sequence, taken in at once or in pieces, through a cache."""
    cache = program.cache(slots=len(tokens), capacity=4)
    made: list[list[torch.Tensor]] = [[] for _ in tokens]
    for piece in range(pieces):
        new = [t[piece * len(t) // pieces : (piece + 1) * len(t) // pieces] for t in tokens]
        some = [i for i, t in enumerate(new) if t]
        lengths, slots = torch.tensor([len(new[i]) for i in some]), torch.tensor(some)
        flat = torch.tensor([token for i in some for token in new[i]])
        hidden = program.run(
            inputs_of(flat, lengths, cache.lengths[slots], program.transformer), cache=cache, slots=slots
        )
        for i, rows in zip(some, program.logits(hidden).split(lengths.tolist()), strict=True):
            made[i].append(rows)
    return [torch.cat(rows) for rows in made]


def same_bits(size: int) -> None:
    """Alone or in a batch, at once or by tokens, through shared memory or messages, split or not; all rows or some."""
    model = build("Llama").eval()
    program, network = program_of(model), program_of(model, network=True)
    tokens = prompts([40, 3, 64, 9, 1])
    wanted = [logits_of(program, [t])[0] for t in tokens]
    ways = [(program, 1), (program, 5), (program, 64), (network, 1), (network, 5), (network, 64)]
    for used, pieces in ways:
        for got, want in zip(logits_of(used, tokens, pieces), wanted, strict=True):
            assert torch.equal(got, want), (type(used.wire).__name__, pieces)
    batch_ = PackedBatch.from_list([torch.tensor(t) for t in tokens])
    rows = torch.tensor([0, 39, 41, 42, 100, 116])
    for used in (program, network):
        inputs = inputs_of(batch_.values, batch_.lengths, torch.zeros(5, dtype=torch.int64), used.transformer)
        assert torch.equal(used.logits(used.run(inputs, rows=rows)), torch.cat(wanted)[rows])


def as_packed(size: int) -> None:
    """One rank computes what a packed model does, bit by bit: one program runs both."""
    if size > 1:
        return
    ids, mask, _ = batch([9, 4, 17])
    for family in ("Bert", "Roberta", "DistilBert", "ModernBert", "GPT2", "Llama"):
        for dtype in (torch.float32, torch.bfloat16):
            alone, shared = (m.eval().to(dtype) for m in both(family, "Model"))
            with torch.no_grad():
                want, got = (m(ids, attention_mask=mask, output_hidden_states=True) for m in (weft.pack(alone), shared))
            assert torch.equal(got.last_hidden_state, want.last_hidden_state), (family, dtype)
            assert all(map(torch.equal, got.hidden_states, want.hidden_states)), (family, dtype)


def sampling(size: int) -> None:
    """The same on all ranks and in any company; of as few tokens as was asked for."""
    shared = weft.parallelize(build("Llama").eval(), mesh())

    def drawn(of: list[list[int]], **options: Any) -> list[list[int]]:
        return generate(shared, of, **({"max_new_tokens": NEW, "temperature": 1.5, "seed": 3, "eos": ()} | options))

    for options in ({}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}):
        got = drawn(prompts(), **options)
        same_everywhere(got)
        assert got == drawn(prompts(), **options)
        assert got[:2] == drawn(prompts()[:2], **options)
        assert got != drawn(prompts(), seed=4, **options)
    greedy_tokens = drawn(prompts(), temperature=0.0)
    assert drawn(prompts(), top_k=1) == drawn(prompts(), top_p=1e-9) == greedy_tokens
    first = greedy_tokens[2][0]
    ended = drawn(prompts(), temperature=0.0, eos=first)
    assert ended[2] == [first]
    for cut_off, whole in zip(ended, greedy_tokens, strict=True):
        end = whole.index(first) + 1 if first in whole else NEW
        assert cut_off == whole[:end]


def changed_weights(size: int) -> None:
    """A model that was trained further, or loaded again, generates with its new weights; training still works."""
    alone, shared = both("Llama")
    ids, mask, labels = batch([19, 7])
    for _ in range(2):
        for model in (alone, shared):
            model.eval()
        assert weft.generate(shared, prompts(), max_new_tokens=4, eos=()) == [
            greedy_of(alone, p, max_new_tokens=4) for p in prompts()
        ]
        for model in (alone, shared):
            model.train()
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            torch.optim.SGD(model.parameters(), lr=2.0).step()
            model.zero_grad()


def modes(size: int) -> None:
    """What was made in inference mode serves outside of it, and what comes out meets gradients and in-place writes."""
    alone, shared = both("Llama")
    alone.eval(), shared.eval()
    ids = torch.tensor(prompts([9, 9]))
    with torch.inference_mode():
        first = shared(ids)
    with torch.no_grad():
        out = shared(ids[:, :2], past_key_values=first.past_key_values)
        out.logits += 1.0
        assert torch.equal(shared(ids).logits, first.logits)
    group = dist.new_group()
    with torch.inference_mode():
        network = program_of(build("Llama").eval(), network=True, group=group)
        assert torch.equal(
            logits_of(network, prompts([40]))[0], logits_of(program_of(build("Llama").eval()), prompts([40]))[0]
        )
    x, w = torch.ones(40, 5), torch.ones(3, 5)
    assert torch.equal(weft.matmul_all_reduce(x, w, group=group), torch.full((40, 3), 5.0 * size))
    alone, shared = both("Bert", "Model")
    shared.eval().requires_grad_(False)
    head = torch.nn.Linear(alone.config.hidden_size, 1)
    head(shared(ids).last_hidden_state).sum().backward()
    torch.testing.assert_close(shared(ids).last_hidden_state, alone.eval()(ids).last_hidden_state, rtol=2e-4, atol=2e-5)


def refusals(size: int) -> None:
    """Clear, before anything is sent: the ranks are still in step at the end."""
    shared = weft.parallelize(build("Llama").eval(), mesh())
    for given, options, message in [
        ([[1, 2], []], {}, "prompt 1 is empty"),
        ([[1, WORDS]], {}, "prompt 0 has tokens from 1 to 97, expected 0 to 96"),
        ([[-1]], {}, "prompt 0 has tokens from -1"),
        ([[1] * 60], {}, "prompt 0 has 60 tokens and 8 are to follow, but the model's limit is 64"),
        ([torch.ones(1, 3)], {}, r"prompt 0 is torch.float32 \[1, 3\], expected token numbers"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
        ([[1]], {"top_p": 1.5}, "top_p is 1.5"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens is 2.0, expected a whole number"),
        ([[1]], {"temperature": 1e-9}, "temperature is 1e-09, expected 0"),
        ([[1]], {"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ([[1]], {"top_k": 2.5}, "top_k is 2.5, expected a whole number"),
        ([[1]], {"top_p": float("nan")}, "top_p is nan"),
        ([[1]], {"seed": None}, "seed is None, expected a whole number"),
        ([[1]], {"eos": WORDS}, r"eos has the tokens \[97\], expected 0 to 96"),
        ([[1]], {"eos": [1.5]}, r"eos is \[1.5\], expected a token number"),
        ([1, 2], {}, "prompt 0 is 1, expected token numbers: a list or tensor of them for each prompt"),
        ("text", {}, "prompts are a str, expected a list of prompts"),
        (["text"], {}, "prompt 0 is 'text', expected token numbers"),
        ([[1.5]], {}, r"prompt 0 is \[1.5\], expected a list of token numbers"),
        ([[2**70]], {}, "expected a list of token numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            weft.generate(shared, given, **({"max_new_tokens": 8} | options))
    with pytest.raises(ValueError, match="got a Linear, expected a decoder"):
        weft.generate(torch.nn.Linear(2, 2), [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="is no decoder"):
        weft.generate(weft.parallelize(build("Bert").eval(), mesh()), [[1]], max_new_tokens=1)
    assert weft.generate(shared, [], max_new_tokens=3) == []
    tokens = torch.tensor([[7, 5]], dtype=torch.int32)
    assert weft.generate(shared, tokens, max_new_tokens=3) == weft.generate(shared, [[7, 5]], max_new_tokens=3)
    ends = torch.tensor([weft.generate(shared, tokens, max_new_tokens=3, eos=())[0][0]])
    assert weft.generate(shared, tokens, max_new_tokens=3, eos=ends) == [ends.tolist()]
    with torch.no_grad():
        kept = shared.model.norm.weight.clone()
        shared.model.norm.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="logits are not numbers"):
            weft.generate(shared, [[1]], max_new_tokens=1)
        shared.model.norm.weight.copy_(kept)
    assert weft.generate(shared, [[1]], max_new_tokens=0) == [[]]
    same_everywhere(weft.generate(shared, [[1, 2]], max_new_tokens=3))
    if size > 1:  # found before anything moves, so that the ranks stay in step
        rank = dist.get_rank()
        ids = torch.tensor([[1, 2, 3 + rank]])
        for asks in (
            lambda: weft.generate(shared, [[1, 2 + rank]], max_new_tokens=3),
            lambda: weft.generate(shared, [[1, 2]], max_new_tokens=1, temperature=1.0, seed=rank),
            lambda: weft.generate(shared, [[1, 2]], max_new_tokens=1 + rank),
            lambda: weft.generate(shared, [[1, 2]], max_new_tokens=3, eos=3 + rank),
            lambda: shared.generate(ids, max_new_tokens=3),
        ):
            with pytest.raises(PeerMismatch, match=r"rank 0: (.|\n)*rank 1: "):
                asks()
        same_everywhere(weft.generate(shared, [[1, 2]], max_new_tokens=3))


CASES = [greedy, hugging_face, same_bits, as_packed, sampling, changed_weights, modes, refusals]


@pytest.fixture(scope="module", params=[1, 2, 3])
def outcome(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_inference(outcome: dict[str, str | None], case: str) -> None:
    assert outcome[case] is None, outcome[case]
