"""What a description computes by itself, and what it refuses: `weft.models.spec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    MistralConfig,
    MistralForCausalLM,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

import weft
from weft.errors import Unsupported
from weft.models.families import GEMMA3, T5
from weft.models.fit import check_model
from weft.models.spec import Norm, NormKind, NormOrder, RelativeBias, Transformer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}


def gemma(**options: Any) -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, pad_token_id=0, **options)
    return Gemma3TextModel(config).eval()


def t5(**options: Any) -> Any:
    torch.manual_seed(0)
    config = T5Config(d_model=24, d_kv=8, num_heads=3, d_ff=40, num_layers=2, vocab_size=50, **options)
    return T5EncoderModel(config).eval()


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (6, 9), (64, 500), (33, 77)])
def test_buckets_are_those_of_t5(buckets: int, farthest: int) -> None:
    distance = torch.arange(-farthest, farthest + 1)
    heads = 3
    table = torch.randn(buckets, heads)
    rows = T5Attention._relative_position_bucket(distance, num_buckets=buckets, max_distance=farthest)
    assert torch.equal(RelativeBias(table, buckets, farthest).by_distance(), table[rows].t())
    # What is farther gets what the farthest gets.
    beyond = torch.tensor([-7 * farthest, 7 * farthest])
    ends = T5Attention._relative_position_bucket(beyond, num_buckets=buckets, max_distance=farthest)
    assert ends.tolist() == [int(rows[0]), int(rows[-1])]


def test_buckets_are_those_of_mpnet() -> None:
    distance = torch.arange(-128, 129)
    table = torch.randn(32, 2)
    want = table[MPNetEncoder.relative_position_bucket(distance)].t()
    assert torch.equal(RelativeBias(table, 32, 128).by_distance(), want)


def test_a_longer_text_than_the_bias_reaches() -> None:
    model = t5(relative_attention_num_buckets=8, relative_attention_max_distance=12)
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_()
    ids = torch.randint(2, 50, (2, 61))
    with torch.no_grad():
        want = model(input_ids=ids).last_hidden_state
        got = weft.pack(model)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_number_in_gemmas_buffer_counts() -> None:
    """Not the width, from which it was once made: somebody may have written to it."""
    model = gemma()
    packed, ids = weft.pack(model), torch.randint(2, 50, (1, 9))
    with torch.no_grad():
        first = packed(input_ids=ids).last_hidden_state
        model.embed_tokens.embed_scale.fill_(0.75)
        want, got = model(input_ids=ids).last_hidden_state, packed(input_ids=ids).last_hidden_state
    assert (first - got).abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_vectors_are_not_scaled() -> None:
    model, vectors = gemma(), torch.randn(2, 5, 32)
    with torch.no_grad():
        want, got = model(inputs_embeds=vectors), weft.pack(model)(inputs_embeds=vectors)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, atol=1e-5, rtol=1e-5)


def test_factors_are_shifted() -> None:
    norm = Norm(torch.tensor([0.5, -1.0]), None, 1e-6, NormKind.RMS, shift=1.0)
    assert norm.factors().tolist() == [1.5, 0.0]  # type: ignore[union-attr]


def described() -> Transformer:
    return GEMMA3.read(gemma())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q_norm": replace(a.q_norm, weight=torch.ones(9))}, "a norm of the heads of layer 0"),
        (lambda a: {"bias": RelativeBias(torch.ones(32, 3), 32, 128)}, "the relative bias of layer 0"),
        (lambda a: {"bias": RelativeBias(torch.ones(30, 4), 32, 128)}, "expected a row for each"),
        (lambda a: {"bias": RelativeBias(torch.ones(32, 4), 32, 8)}, "a longer distance"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, message: str) -> None:
    model = described()
    layer = model.layers[0]
    broken = replace(layer, attention=replace(layer.attention, **change(layer.attention)))
    with pytest.raises(Unsupported, match=message):
        check_model(replace(model, layers=(broken, *model.layers[1:])))


def test_norms_on_both_sides_of_a_residual_are_refused() -> None:
    model = described()
    broken = tuple(replace(layer, order=NormOrder.POST) for layer in model.layers)
    with pytest.raises(Unsupported, match="expected one of these"):
        check_model(replace(model, layers=broken))


def test_a_mask_with_holes_is_refused_where_distances_count() -> None:
    ids, mask = torch.randint(2, 50, (1, 6)), torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(Unsupported, match="holes and the model has a relative bias"):
        weft.pack(t5())(input_ids=ids, attention_mask=mask)


def test_training_after_inference_mode() -> None:
    """What is kept of the bias belongs to no mode."""
    model = t5(relative_attention_num_buckets=10, relative_attention_max_distance=21)  # that nobody asked for before
    packed, ids = weft.pack(model), torch.randint(2, 50, (2, 9))
    with torch.inference_mode():
        packed(input_ids=ids)
    packed(input_ids=ids).last_hidden_state.sum().backward()
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0


def mistral(window: int) -> Any:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window, eos_token_id=None)
    return MistralForCausalLM(config).eval()


def test_generate_refuses_a_mask_with_holes_where_windows_count() -> None:
    prompts = {"input_ids": torch.arange(3, 10)[None], "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 1, 1]])}
    with pytest.raises(Unsupported, match="holes and the model has sliding windows"):
        weft.generate(weft.pack(mistral(3)), prompts, max_new_tokens=2)


def test_a_window_of_one_and_a_cache() -> None:
    """transformers' own cache keeps everything there, so that its tokens are not those of the model."""
    model, ids = mistral(1), torch.arange(3, 10)[None]
    packed = weft.pack(model)
    with torch.no_grad():
        assert packed(input_ids=ids).past_key_values is None
        with pytest.raises(Unsupported, match="a sliding window of 1"):
            packed(input_ids=ids, use_cache=True)
    want = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)[0, 7:].tolist()
    assert weft.generate(packed, ids, max_new_tokens=6) == [want]
    found = packed.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)
    assert found[0, 7:].tolist() == want


def test_mpnets_bias_is_trained() -> None:
    torch.manual_seed(0)
    config = MPNetConfig(**SIZES, max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = MPNetModel(config)
    ids = torch.randint(2, 50, (2, 30))
    weights = torch.randn(2, 30, 32)
    table = model.encoder.relative_attention_bias.weight
    (want,) = torch.autograd.grad((model(ids).last_hidden_state * weights).sum(), table)
    (got,) = torch.autograd.grad((weft.pack(model)(ids).last_hidden_state * weights).sum(), table)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert want.abs().max() > 1e-3


def test_a_decoder_of_t5_is_refused() -> None:
    model = t5()
    model.encoder.is_decoder = True
    with pytest.raises(Unsupported, match="expected an encoder"):
        T5.read(model)
