"""`weft.Generator` on one rank: requests that come and go get what they get alone, bit by bit."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from generation_cases import WORDS, alone, lively, prompts_of, spell
from packed_models import build

import weft
from weft.errors import Unsupported
from weft.transformer.call import inputs_of

FAMILIES = ("Llama", "GPT2")


def random_options(rng: random.Random) -> dict[str, Any]:
    """Of every kind, mixed."""
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 14), "eos": rng.choice([(), (), 7, [3, 50, 51]])}
    if rng.random() < 0.5:
        options |= {"temperature": rng.choice([0.7, 1.3]), "seed": rng.randint(0, 9)}
        options |= rng.choice([{}, {"top_k": 12}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}])
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.4, "presence_penalty": rng.choice([0.0, 0.7]), "frequency_penalty": 0.3}
    if rng.random() < 0.4:
        options["logprobs"] = rng.choice([0, 1, 5])
    if rng.random() < 0.3:
        options["stop"] = [rng.choice("abcdefgh"), [rng.randrange(WORDS)], "zz"]
    return options


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_are_as_alone(family: str, seed: int) -> None:
    """Requests of all kinds join at random steps, in few slots and small chunks; some are cancelled on their way."""
    rng = random.Random(seed)
    model = weft.pack(lively(family))
    wanted = [(prompt, random_options(rng)) for prompt in prompts_of([rng.randint(1, 40) for _ in range(16)], seed)]
    slots, chunk = rng.randint(2, 6), rng.choice([1, 3, 17, 64])
    generator = weft.Generator(model, tokenizer=spell, slots=slots, prefill_tokens=chunk)
    streams: list[Any] = []
    while len(streams) < len(wanted):
        for prompt, options in wanted[len(streams) : len(streams) + rng.randint(0, 3)]:
            streams.append(generator.submit(prompt, **options))
        for _ in range(rng.randint(0, 6)):
            generator.step()
        if streams and rng.random() < 0.2:
            rng.choice(streams).cancel()
    generator.run()
    assert all(stream.is_done for stream in streams)
    finishes = set()
    for stream, (prompt, options) in zip(streams, wanted, strict=True):
        got, want = stream.result(), alone(model, prompt, tokenizer=spell, **options)
        finishes.add(got.finish)
        if got.finish == "cancelled":
            assert got.tokens == want.tokens[: len(got.tokens)]
            assert len(got.tokens) < len(want.tokens)
            continue
        assert got == want, options  # log-probabilities too, to the last bit
        assert list(stream) == stream.tokens == got.tokens
    assert {"length"} < finishes
    assert generator._batch._cache is not None
    assert generator._batch._cache.slots <= max(slots, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_have_the_bits_of_a_whole_prompt(family: str, dtype: torch.dtype) -> None:
    """Hidden states and logits, whatever pieces come, beside others that decode."""
    program = weft.pack(lively(family).to(dtype)).weft_program()
    tokens = [torch.tensor(p) for p in prompts_of([57, 40, 33], 3)]
    whole = []
    for t in tokens:
        empty = torch.zeros(1, dtype=torch.int64)
        whole.append(program.run(inputs_of(t, torch.tensor([t.numel()]), empty, program.transformer)))
    for sizes in ([1, 1, 1], [7, 1, 3], [16, 33, 1], [57, 2, 5], [20, 40, 33]):
        cache = program.cache(slots=5, capacity=2)
        slots, done = torch.tensor([3, 0, 4]), [0, 0, 0]
        while any(d < t.numel() for d, t in zip(done, tokens, strict=True)):
            new = [t[d : d + n] for t, d, n in zip(tokens, done, sizes, strict=True)]
            some = [i for i in range(3) if new[i].numel()]
            lengths = torch.tensor([new[i].numel() for i in some])
            held = cache.lengths[slots[some]]
            inputs = inputs_of(torch.cat([new[i] for i in some]), lengths, held, program.transformer)
            before = copy.deepcopy(cache)
            hidden = program.run(inputs, cache=cache, slots=slots[some])
            last = inputs.cu_seqlens[1:].to(torch.int64) - 1
            assert torch.equal(program.run(inputs, cache=before, slots=slots[some], rows=last), hidden[last])
            for i, rows in zip(some, hidden.split(lengths.tolist()), strict=True):
                want = whole[i][done[i] : done[i] + rows.shape[0]]
                assert torch.equal(rows, want), sizes
                assert torch.equal(program.logits(rows), program.logits(want))
                done[i] += rows.shape[0]


def test_a_chunk_that_ends_no_prompt() -> None:
    """Steps from which no token follows: no row of the last layer is asked for."""
    model = weft.pack(lively("Llama"))
    (prompt,) = prompts_of([30], 1)
    generator = weft.Generator(model, prefill_tokens=7)
    stream = generator.submit(prompt, max_new_tokens=3, eos=())
    for _ in range(4):
        assert generator.step()
        assert stream.tokens == []
    assert generator.step()
    assert len(stream.tokens) == 1
    assert stream.result().tokens == weft.generate(model, [prompt], max_new_tokens=3, eos=())[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_takes_a_packed_model(family: str) -> None:
    """Hugging Face's own tokens, whatever mode it is in, also of copies; those of the new weights after a change."""
    plain = lively(family)
    model, prompts = weft.pack(plain), prompts_of([1, 9, 30], 4)

    def wanted() -> list[list[int]]:
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return [plain.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]

    first = wanted()
    twins = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert weft.generate(twin, prompts, max_new_tokens=8, eos=()) == first
    assert weft.generate(model.train(), prompts, max_new_tokens=8, eos=()) == first
    model.eval()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(1.3)
    assert wanted() != first
    assert weft.generate(model, prompts, max_new_tokens=8, eos=()) == wanted()
    plain.lm_head.weight.data.neg_()  # past the counters, the head alone where it is not tied
    assert weft.generate(model, prompts, max_new_tokens=8, eos=()) == wanted()
    assert weft.generate(twins[1], prompts, max_new_tokens=8, eos=()) == first
    before = model.weft_program()
    assert model.weft_program() is before  # kept while nothing changes
    with torch.no_grad():  # calls of the model itself share the layers with it
        model(torch.tensor([prompts[1]]))
    assert model.model.weft_engine().program().work.layers is before.work.layers if family == "Llama" else True


def test_what_generate_and_a_generator_refuse() -> None:
    plain = lively("Llama")
    for given in (plain, torch.nn.Linear(2, 2), weft.pack(build("Bert"))):
        for make in (weft.Generator, lambda m: weft.generate(m, [[1]], max_new_tokens=1)):
            with pytest.raises(ValueError, match=rf"got a {type(given).__name__}, expected a decoder with a language"):
                make(given)
    model = weft.pack(plain)
    with pytest.raises(ValueError, match="got a LlamaForCausalLM, expected a decoder"):  # packed in name only
        weft.generate(type(model)(model.config), [[1]], max_new_tokens=1)
    plain.model.norm = copy.deepcopy(plain.model.norm)  # which the packed one does not see
    with pytest.raises(Unsupported, match="LlamaModel that was packed have been replaced since"):
        weft.generate(model, [[1]], max_new_tokens=1)
    model = weft.pack(plain)
    model.model.register_forward_hook(lambda *a: None)  # runs in a call, but not here
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM\.model has a hook"):
        weft.generate(model, [[1]], max_new_tokens=1)
    model.model._forward_hooks.clear()
    plain.lm_head.register_forward_hook(lambda *a: None)
    with pytest.raises(Unsupported, match="lm_head has a hook"):
        weft.generate(model, [[1]], max_new_tokens=1)
    model = weft.pack(lively("Llama"))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(Unsupported, match=r"expected a torch\.nn\.Linear"):
        weft.Generator(model)
    model.lm_head = torch.nn.Linear(64, WORDS + 1, bias=False)
    with pytest.raises(Unsupported, match=f"the embedding has {WORDS} words and the head {WORDS + 1}"):
        weft.generate(model, [[1]], max_new_tokens=1)
    for options, message in (({"slots": 0}, "slots is 0"), ({"prefill_tokens": True}, "prefill_tokens is True")):
        with pytest.raises(ValueError, match=message):
            weft.Generator(weft.pack(lively("Llama")), **options)
    with pytest.raises(ValueError, match="tokenizer is a int"):
        weft.Generator(weft.pack(lively("Llama")), tokenizer=5)


def test_refused_submits_disturb_nobody() -> None:
    model = weft.pack(lively("Llama"))
    (prompt,) = prompts_of([12], 5)
    generator = weft.Generator(model)
    stream = generator.submit(prompt, max_new_tokens=9, eos=())
    for given, options, message in [
        ([], {}, "the prompt is empty"),
        ([WORDS], {}, f"the prompt has tokens from {WORDS} to {WORDS}"),
        ("text", {}, "the prompt is 'text', expected token numbers"),
        (5, {}, "the prompt is 5"),
        ([1] * 75, {"max_new_tokens": 6}, "has 75 tokens and 6 are to follow, but the model's limit is 80"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"seed": 1.5}, "seed is 1.5"),
        ([1], {"eos": WORDS}, "eos has the tokens"),
        ([1], {"stop": "end"}, "stop has texts, but the generator has no tokenizer"),
        ([1], {"stop": [5, 6]}, r"stop has 5, expected texts, or lists of tokens such as \[\[5, 6\]\]"),
        ([1], {"stop": [[]]}, "stop has an empty text or list"),
        ([1], {"stop": [[WORDS]]}, rf"stop has the tokens \[{WORDS}\]"),
        ([1], {"logprobs": -1}, "logprobs is -1"),
        ([1], {"logprobs": True}, "logprobs is True"),
        ([1], {"logprobs": WORDS + 1}, f"up to {WORDS}"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected a number above 0"),
        ([1], {"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ([1], {"frequency_penalty": "a"}, "frequency_penalty is 'a'"),
        ([1], {"logits_processor": 5}, "logits_processor is 5, expected a list of functions"),
        ([1], {"logits_processor": [5]}, r"logits_processor is \[5\], expected a list of functions"),
    ]:
        with pytest.raises(ValueError, match=message):
            generator.submit(given, **({"max_new_tokens": 2} | options))
        generator.step()
    assert stream.result() == alone(model, prompt, max_new_tokens=9, eos=())
    assert generator.submit([1], max_new_tokens=0).result().finish == "length"
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="generation_config sets no_repeat_ngram_size=2"):
        generator.submit([1], max_new_tokens=1)


def test_prompts_that_the_caller_writes_to_later() -> None:
    model = weft.pack(lively("Llama"))
    prompt = torch.tensor(prompts_of([9], 6)[0])
    generator = weft.Generator(model)
    stream = generator.submit(prompt, max_new_tokens=5, eos=())
    wanted = alone(model, prompt.clone(), max_new_tokens=5, eos=())
    prompt.zero_()
    assert stream.result() == wanted


def test_slots_are_used_again_and_the_cache_grows() -> None:
    model = weft.pack(lively("GPT2"))
    generator = weft.Generator(model, slots=20)
    first = generator.submit([5, 6], max_new_tokens=60, eos=())
    generator.step()
    cache = generator._batch._cache
    assert cache is not None
    assert cache.slots == 8
    others = [generator.submit(p, max_new_tokens=3, eos=()) for p in prompts_of([4] * 30, 7)]
    generator.step()
    assert cache.slots >= 20
    assert sorted(s.slot for s in generator._batch._running) == list(range(20))
    generator.run()
    assert generator._batch._cache is cache
    assert first.result() == alone(model, [5, 6], max_new_tokens=60, eos=())
    wanted = [alone(model, p, max_new_tokens=3, eos=()) for p in prompts_of([4] * 30, 7)]
    assert [s.result() for s in others] == wanted
    small = weft.Generator(model)
    small._batch._first = (1, 2)  # the cache starts with room for next to nothing
    streams = [small.submit(p, max_new_tokens=9, eos=()) for p in prompts_of([30, 3, 40], 8)]
    wanted = [alone(model, p, max_new_tokens=9, eos=()) for p in prompts_of([30, 3, 40], 8)]
    assert [s.result() for s in streams] == wanted
