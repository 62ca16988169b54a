"""`weft.generate` and a model's generation config: settings are followed, without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from harness import run_ranks
from parallel_cases import build, mesh

import weft
from weft.transformer.sampling import _KNOWN, _NEUTRAL, _OF_DRAWS, Rules, sampling_of

PROMPTS = [[5, 6, 7, 5, 6], [9], [11, 12, 13, 14, 15, 16, 17]]
NEW = 12
# What may be set: greedy tokens are those of transformers.
FOLLOWED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"min_new_tokens": 5},
    {"min_length": 9},
    {"min_length": 30, "min_new_tokens": 2},  # the latter counts
    {"suppress_tokens": list(range(3, 60))},
    {"begin_suppress_tokens": list(range(40, 97))},
    {"repetition_penalty": 1.3, "min_new_tokens": 6, "suppress_tokens": [7, 50], "begin_suppress_tokens": [8, 90]},
]
REFUSED: dict[str, Any] = {
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 4,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "sequence_bias": [[[5], 2.0]],
    "guidance_scale": 1.5,
    "num_beams": 2,
    "num_return_sequences": 2,
    "exponential_decay_length_penalty": (3, 1.5),
    "stop_strings": ["x"],
    "max_time": 1.0,
    "token_healing": True,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "unheard_of": 3,
}


def follow() -> None:
    for family in ("Llama", "GPT2"):
        alone, shared = build(family).eval(), weft.parallelize(build(family).eval(), mesh())

        def greedy(prompt: list[int], end: list[int], alone: Any = alone) -> list[int]:
            options = {"eos_token_id": end or None, "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
            found: list[int] = alone.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
            return found

        plain = [greedy(prompt, []) for prompt in PROMPTS]
        assert weft.generate(shared, PROMPTS, max_new_tokens=NEW, eos=()) == plain
        ends = [plain[0][1], plain[1][0], plain[2][2]]  # they would end early
        unset = [[greedy(prompt, end) for prompt in PROMPTS] for end in ([], ends)]
        for settings in FOLLOWED:
            for config in (alone.generation_config, shared.generation_config):
                config.update(**settings)
            wanted = [[greedy(prompt, end) for prompt in PROMPTS] for end in ([], ends)]
            assert wanted != unset, settings  # or nothing would be tested
            got = [weft.generate(shared, PROMPTS, max_new_tokens=NEW, eos=end) for end in ([], ends)]
            assert got == wanted, settings
            for config in (alone.generation_config, shared.generation_config):
                config.update(**dict.fromkeys(settings))


def draw() -> None:
    shared = weft.parallelize(build("Llama").eval(), mesh())

    def run(**options: Any) -> list[list[int]]:
        return weft.generate(shared, PROMPTS, max_new_tokens=NEW, eos=(), **options)

    greedy, config = run(), shared.generation_config
    config.update(do_sample=True, temperature=1.5, top_k=20, top_p=0.9)
    assert run() == run(temperature=1.5, top_k=20, top_p=0.9) != greedy
    assert run(top_k=5) == run(temperature=1.5, top_k=5, top_p=0.9)
    assert run(temperature=0.0) == greedy
    config.update(temperature=None, top_k=None, top_p=None)
    assert run() == run(temperature=1.0, top_k=50)
    config.update(top_k=0, top_p=1.0)
    assert run() == run(temperature=1.0)
    for name, value in {"min_p": 0.1, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5}.items():
        config.update(**{name: value})
        with pytest.raises(ValueError, match=rf"generation_config sets {name}={value}, which"):
            run()
        assert run(temperature=0.0) == greedy  # the caller's own sampling
        config.update(**{name: None})


def refuse() -> None:
    shared = weft.parallelize(build("Llama").eval(), mesh())
    config = shared.generation_config
    wanted = weft.generate(shared, PROMPTS, max_new_tokens=3)
    for name, value in REFUSED.items():
        setattr(config, name, value)
        with pytest.raises(ValueError, match=rf"generation_config sets {name}=.*; set None there, or call model\.gen"):
            weft.generate(shared, PROMPTS, max_new_tokens=3)
        setattr(config, name, None)
    config.num_beams, config.max_time = 3, 2.0
    with pytest.raises(ValueError, match=r"(max_time=2\.0|num_beams=3), (max_time=2\.0|num_beams=3), which"):
        weft.generate(shared, PROMPTS, max_new_tokens=3)
    config.num_beams = config.max_time = None
    for name, value in {**_NEUTRAL, "max_length": 5, "length_penalty": 2.0, "output_scores": True}.items():
        setattr(config, name, value)
    assert weft.generate(shared, PROMPTS, max_new_tokens=3) == wanted


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("check", [follow, draw, refuse])
def test_the_generation_config(check: Any, size: int) -> None:
    run_ranks(check, size, timeout=120.0)


def test_every_setting_of_transformers_is_known_or_refused() -> None:
    """A setting that a new transformers brings is refused until somebody has looked at it."""
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith(("_", "output_", "cache_"))}
    decided = _KNOWN | _NEUTRAL.keys() | set(_OF_DRAWS)
    assert names - decided == {
        "assistant_ensemble_weight", "bad_words_ids", "constraints", "dola_layers", "exponential_decay_length_penalty",
        "force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "max_time", "sequence_bias",
        "speculation_type", "stop_strings", "watermarking_config",
    }  # fmt: skip
    odd = transformers.GenerationConfig()
    odd.future = False
    with pytest.raises(ValueError, match="sets future=False"):
        Rules.of(odd, drawn=False)
    assert Rules.of(transformers.GenerationConfig(), drawn=True) == Rules() == Rules.of(None, drawn=True)
    assert sampling_of(transformers.GenerationConfig(), None, 5, None).temperature == 0.0
