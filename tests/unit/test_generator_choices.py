"""What a request may ask for, against transformers: penalties, processors, log-probabilities, stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from generation_cases import WORDS, alone, lively, prompts_of, spell

import weft

NEW = 14
FAMILIES = ("Llama", "GPT2")


def logits_after(model: Any, tokens: list[int]) -> torch.Tensor:
    """[V], of Hugging Face's own model."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_repetition_penalty_is_that_of_transformers(family: str) -> None:
    plain = lively(family)
    model = weft.pack(plain)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for penalty in (1.6, 0.7):
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        for prompt in prompts_of([3, 20], 1):
            wanted = plain.generate(torch.tensor([prompt]), repetition_penalty=penalty, **options)[0, len(prompt) :]
            got = alone(model, prompt, max_new_tokens=NEW, eos=(), repetition_penalty=penalty)
            assert got.tokens == wanted.tolist()
            assert got.tokens != alone(model, prompt, max_new_tokens=NEW, eos=()).tokens
            same = alone(model, prompt, max_new_tokens=NEW, eos=(), logits_processor=[processor])
            assert same == got
    model.generation_config.repetition_penalty = 1.6  # counts unless the request says another
    prompt = prompts_of([3], 1)[0]
    assert alone(model, prompt, max_new_tokens=NEW, eos=()) != alone(
        model, prompt, max_new_tokens=NEW, eos=(), repetition_penalty=1.0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_presence_and_frequency_penalties(family: str) -> None:
    """As OpenAI and vLLM define them: over the output, once and each time."""
    plain = lively(family)
    model = weft.pack(plain)
    for presence, frequency, repetition in ((9.0, 0.0, 1.0), (0.0, 5.0, 1.0), (-6.0, 0.0, 1.0), (1.0, 1.5, 1.3)):
        changed = 0
        for prompt in prompts_of([2, 15], 2):
            made: list[int] = []
            for _ in range(NEW):
                scores = logits_after(plain, prompt + made)[None]
                scores = transformers.RepetitionPenaltyLogitsProcessor(repetition)(
                    torch.tensor([prompt + made]), scores
                )[0]
                counts = torch.bincount(torch.tensor(made, dtype=torch.int64), minlength=WORDS)
                scores = scores - frequency * counts - presence * (counts > 0)
                made.append(int(scores.argmax()))
            got = alone(
                model, prompt, max_new_tokens=NEW, eos=(), presence_penalty=presence, frequency_penalty=frequency,
                repetition_penalty=repetition,
            )  # fmt: skip
            assert got.tokens == made, (presence, frequency)
            changed += got.tokens != alone(model, prompt, max_new_tokens=NEW, eos=()).tokens
        assert changed, (presence, frequency)


def test_processors_of_transformers() -> None:
    """Those that a generation config cannot ask for here; also a list of them, and with draws."""
    plain = lively("Llama")
    model = weft.pack(plain)
    (prompt,) = prompts_of([6], 3)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    processors = transformers.LogitsProcessorList(
        [transformers.NoRepeatNGramLogitsProcessor(2), transformers.SuppressTokensLogitsProcessor([3, 4, 5])]
    )
    wanted = plain.generate(torch.tensor([prompt]), no_repeat_ngram_size=2, suppress_tokens=[3, 4, 5], **options)
    got = alone(model, prompt, max_new_tokens=NEW, eos=(), logits_processor=processors)
    assert got.tokens == wanted[0, 6:].tolist()
    seen: list[torch.Size] = []

    def only_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape)
        scores[:, 1::2] = -torch.inf  # in place, as some do
        return scores

    drawn = alone(model, prompt, max_new_tokens=NEW, eos=(), temperature=1.5, seed=4, logits_processor=[only_even])
    assert all(token % 2 == 0 for token in drawn.tokens)
    assert seen == [torch.Size([1, 6 + n]) for n in range(NEW)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_log_softmax(family: str) -> None:
    """Of the model's own logits, whatever temperature and penalties say; the most likely first."""
    plain = lively(family)
    model = weft.pack(plain)
    for options in ({}, {"temperature": 2.0, "seed": 5}, {"repetition_penalty": 1.8}):
        for prompt in prompts_of([1, 17], 4):
            got = alone(model, prompt, max_new_tokens=NEW, eos=(), logprobs=4, **options)
            assert got.logprobs is not None
            assert len(got.logprobs) == NEW
            for n, found in enumerate(got.logprobs):
                wanted = torch.log_softmax(logits_after(plain, prompt + got.tokens[:n]), 0)
                assert found.token == got.tokens[n]
                assert found.logprob == pytest.approx(float(wanted[found.token]), abs=2e-4)
                best = wanted.topk(4)
                assert [token for token, _ in found.top] == best.indices.tolist()
                assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=2e-4)
            none = alone(model, prompt, max_new_tokens=NEW, eos=(), **options)
            assert none.logprobs is None
            assert none.tokens == got.tokens  # asking changes nothing
            bare = alone(model, prompt, max_new_tokens=NEW, eos=(), logprobs=0, **options).logprobs
            assert [(t.token, t.logprob, t.top) for t in bare] == [(t.token, t.logprob, ()) for t in got.logprobs]


def test_logprobs_have_the_bits_of_torchs_log_softmax() -> None:
    model = weft.pack(lively("Llama"))
    program = model.weft_program()
    (prompt,) = prompts_of([9], 5)
    got = alone(model, prompt, max_new_tokens=1, eos=(), logprobs=WORDS).logprobs[0]
    from weft.transformer.call import inputs_of

    inputs = inputs_of(torch.tensor(prompt), torch.tensor([9]), torch.tensor([0]), program.transformer)
    row = torch.log_softmax(program.logits(program.run(inputs))[-1:], 1)[0]
    assert dict(got.top) == dict(enumerate(row.tolist()))


def test_draws_follow_from_the_seed() -> None:
    """The same as `weft.generate` of this prompt alone, and nothing else counts."""
    model = weft.pack(lively("Llama"))
    (prompt,) = prompts_of([8], 6)
    found = set()
    for seed in range(4):
        options = {"max_new_tokens": NEW, "eos": (), "temperature": 1.4, "top_k": 30, "seed": seed}
        got = alone(model, prompt, **options).tokens
        assert [got] == weft.generate(model, [prompt], **options)
        found.add(tuple(got))
    assert len(found) == 4
    model.generation_config.update(do_sample=True, temperature=1.4, top_k=30)
    assert tuple(alone(model, prompt, max_new_tokens=NEW, eos=()).tokens) in found


def test_stops() -> None:
    """Texts are cut off where the stop begins; tokens stay, up to the one that completed it."""
    model = weft.pack(lively("Llama"))
    (prompt,) = prompts_of([8], 7)
    whole = alone(model, prompt, max_new_tokens=30, eos=(), tokenizer=spell)
    text = spell(whole.tokens)
    assert (whole.finish, whole.text) == ("length", text)
    for first, size in ((4, 1), (5, 2), (9, 4), (26, 3)):
        stop = text[first : first + size]
        got = alone(model, prompt, max_new_tokens=30, eos=(), tokenizer=spell, stop=["nowhere", stop])
        at = text.index(stop)
        assert (got.finish, got.text, got.tokens) == ("stop", text[:at], whole.tokens[: at + size])
        assert alone(model, prompt, max_new_tokens=30, eos=(), tokenizer=spell, stop=stop) == got
        run = whole.tokens[first : first + size]
        got = alone(model, prompt, max_new_tokens=30, eos=(), tokenizer=spell, stop=[run, [run[0], WORDS - 1, 1]])
        ends = next(n for n in range(31) if whole.tokens[:n][-size:] == run)
        assert (got.finish, got.tokens, got.text) == ("stop", whole.tokens[:ends], text[: ends - size])
    last = whole.tokens[3]
    n = whole.tokens.index(last)
    got = alone(model, prompt, max_new_tokens=30, eos=last, tokenizer=spell, stop=[[last]])
    assert (got.finish, got.tokens, got.text) == ("eos", whole.tokens[: n + 1], text[:n])
    exact = alone(model, prompt, max_new_tokens=n + 1, eos=(), tokenizer=spell, stop=[[last]])
    assert exact.finish == "stop"


class Spelling:
    """What the tokenizers of Hugging Face look like."""

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("this makes tokens, not text")

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return spell(tokens)


def test_a_tokenizer_or_a_function() -> None:
    model = weft.pack(lively("Llama"))
    (prompt,) = prompts_of([8], 7)
    want = alone(model, prompt, max_new_tokens=9, eos=(), tokenizer=spell, stop="a")
    assert alone(model, prompt, max_new_tokens=9, eos=(), tokenizer=Spelling(), stop="a") == want
    assert want.text is not None


def test_the_model_s_own_end() -> None:
    model = weft.pack(lively("GPT2"))
    (prompt,) = prompts_of([8], 8)
    whole = alone(model, prompt, max_new_tokens=20, eos=())
    model.generation_config.eos_token_id = whole.tokens[5]
    got = alone(model, prompt, max_new_tokens=20)
    assert got.finish == "eos"
    assert got.tokens == whole.tokens[: whole.tokens.index(whole.tokens[5]) + 1]
    assert [got.tokens] == weft.generate(model, [prompt], max_new_tokens=20)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_logits_of_gemma_have_a_cap(kind: torch.dtype) -> None:
    """`final_logit_softcapping` leaves the order of words and changes how likely they are. It is followed when it is
    set, and the bits of a request are its own beside others, too."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    plain = transformers.Gemma3ForCausalLM(config).eval()
    for p in plain.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    plain = plain.to(kind)
    model, close = weft.pack(plain), 1e-4 if kind == torch.float32 else 0.05
    prompts = prompts_of([3, 20, 7], 4)
    found = {}
    for cap in (2.0, None, 0.5):
        model.config.final_logit_softcapping = cap
        for prompt in prompts:
            got = alone(model, prompt, max_new_tokens=6, eos=(), logprobs=3)
            assert got.logprobs is not None
            for n, token in enumerate(got.logprobs):
                wanted = logits_after(plain, prompt + got.tokens[:n]).log_softmax(-1)
                assert abs(token.logprob - float(wanted[token.token])) < close
                assert token.logprob >= float(wanted.max()) - close
            found[cap, len(prompt)] = got.logprobs[0].logprob
    assert len(set(found.values())) == len(found)
    generator = weft.Generator(model)
    streams = [generator.submit(p, max_new_tokens=6, eos=(), logprobs=3) for p in prompts]
    generator.run()
    assert [s.result() for s in streams] == [alone(model, p, max_new_tokens=6, eos=(), logprobs=3) for p in prompts]
    greedy = plain.generate(torch.tensor([prompts[0]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    if kind == torch.float32:
        assert weft.generate(model, prompts[:1], max_new_tokens=6, eos=()) == [greedy[0, len(prompts[0]) :].tolist()]
