"""`weft.Generator` while weights change, steps or the caller's code fail, and threads submit: nothing is mixed up."""

from __future__ import annotations

import copy
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from generation_cases import PHRASES, alone, lively, prompts_of

import weft
from weft.errors import ModelChanged, Unsupported

FAMILIES = ("Llama", "GPT2")


# Weights that change, steps that fail ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_change_are_never_mixed(family: str) -> None:
    """Requests that have begun end by name, those that wait get the new model's tokens; whoever changes what."""
    plain = lively(family)
    model, other = weft.pack(plain), lively(family, seed=5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    def train() -> None:
        plain(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        optimizer.step()

    changes = {
        "load": lambda: plain.load_state_dict(other.state_dict()),
        "one in place": lambda: plain.get_input_embeddings().weight.data.mul_(1.5),
        "the head past the counters": lambda: plain.lm_head.weight.data.neg_(),
        "an optimiser": train,
        "a module": lambda: setattr(model, "lm_head", copy.deepcopy(model.lm_head)),
    }
    for name, change in changes.items():
        generator = weft.Generator(model, slots=2, prefill_tokens=6)
        prompts = prompts_of([4, 30, 5, 6], 2)
        short = generator.submit(prompts[0], max_new_tokens=1, eos=())
        begun = [generator.submit(p, max_new_tokens=9, eos=()) for p in prompts[:2]]
        generator.step(), generator.step()
        waiting = [generator.submit(p, max_new_tokens=9, eos=()) for p in prompts[2:]]
        assert short.is_done
        done = short.result()
        with torch.no_grad():
            torch.set_grad_enabled(name == "an optimiser")
            change()
        torch.set_grad_enabled(True)
        for stream in begun:
            with pytest.raises(ModelChanged, match="have changed since this request began"):
                stream.result()
            with pytest.raises(ModelChanged):
                list(stream)
        assert short.result() == done
        got = [stream.result() for stream in waiting]
        assert got == [alone(model, p, max_new_tokens=9, eos=()) for p in prompts[2:]], name


def test_a_step_that_fails_ends_what_has_begun() -> None:
    model = weft.pack(lively("Llama"))
    program = model.weft_program()
    generator = weft.Generator(program, slots=2)
    prompts = prompts_of([5, 6, 7], 9)
    streams = [generator.submit(p, max_new_tokens=6, eos=()) for p in prompts]
    generator.step()
    real, calls = program.run, []

    def run(*args: Any, **options: Any) -> torch.Tensor:
        if not calls:
            calls.append(1)
            raise MemoryError("no room")
        return real(*args, **options)

    program.run = run  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room"):
        generator.step()
    for stream in streams[:2]:
        with pytest.raises(MemoryError, match="no room"):
            stream.result()
    assert streams[2].result().tokens == weft.generate(model, prompts[2:], max_new_tokens=6, eos=())[0]


def test_code_of_the_caller_that_fails_ends_its_own_request() -> None:
    model = weft.pack(lively("Llama"))

    def odd(tokens: list[int]) -> str:
        if len(tokens) > 3:
            raise KeyError("no such token")
        return ""

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :-1] if ids.shape[1] > 6 else scores

    generator = weft.Generator(model, tokenizer=odd)
    prompts = prompts_of([5, 6, 7], 9)
    fine = generator.submit(prompts[0], max_new_tokens=6, eos=())
    options = [
        {"stop": "x"}, {"logits_processor": [broken]}, {"logits_processor": [lambda ids, scores: scores - torch.inf]},
        {"logits_processor": [lambda ids, scores: generator.step()]},
    ]  # fmt: skip
    bad = [generator.submit(prompts[1], max_new_tokens=6, eos=(), **o) for o in options]
    generator.run()
    assert fine.tokens == weft.generate(model, prompts[:1], max_new_tokens=6, eos=())[0]
    errors = [(KeyError, "no such token"), (ValueError, r"a logits processor gave torch.float32 \[1, 98\], expected")]
    errors += [(ValueError, "logits are not numbers"), (RuntimeError, "asked for inside of one")]
    for stream, (kind, message) in zip(bad, errors, strict=True):
        with pytest.raises(kind, match=message):
            stream.result()
    assert [len(stream.tokens) for stream in bad] == [4, 1, 0, 0]


# Threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_threads_submit_while_steps_run(background: bool) -> None:
    """One thread makes the steps, or each that waits; every request is as alone."""
    model = weft.pack(lively("Llama"))
    wanted = {n: alone(model, p, max_new_tokens=n + 1, eos=(), temperature=1.0, seed=n) for n, p in PHRASES.items()}
    generator = weft.Generator(model, slots=3, prefill_tokens=5)
    wrong: list[int] = []

    def work(numbers: list[int]) -> None:
        for n in numbers:
            stream = generator.submit(PHRASES[n], max_new_tokens=n + 1, eos=(), temperature=1.0, seed=n)
            if (list(stream) if n % 2 else stream.result().tokens) != wanted[n].tokens:
                wrong.append(n)

    def all_at_once() -> None:
        numbers = list(PHRASES)
        workers = [threading.Thread(target=work, args=(numbers[i::4],)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    if background:
        with generator:
            all_at_once()
            last = generator.submit(PHRASES[3], max_new_tokens=4, eos=())
        assert last.is_done  # leaving waits for it
        with suppress(KeyError), generator:
            last = generator.submit(PHRASES[3], max_new_tokens=60, eos=())
            raise KeyError
        assert last.result().finish == "cancelled"
    else:
        all_at_once()
    assert not wrong
    assert generator.submit(PHRASES[2], max_new_tokens=3, eos=()).result() == alone(
        model, PHRASES[2], max_new_tokens=3, eos=()
    )


def test_a_thread_tells_of_errors() -> None:
    model = weft.pack(lively("Llama"))
    with weft.Generator(model) as generator:
        with pytest.raises(RuntimeError, match="a thread makes the steps of this Generator already"):
            generator.__enter__()
        model.model.layers[0].register_forward_hook(lambda *a: None)
        with pytest.raises(Unsupported, match="has a hook"):
            generator.submit([5], max_new_tokens=3).result()
        model.model.layers[0]._forward_hooks.clear()
        assert len(generator.submit([5], max_new_tokens=3, eos=()).result(timeout=60).tokens) == 3
        slow = generator.submit([5], max_new_tokens=70, eos=())
        with pytest.raises(TimeoutError, match="waited 1e-06 s for a request, which goes on"):
            slow.result(timeout=1e-6)
        slow.cancel()
        assert slow.result().finish == "cancelled"
