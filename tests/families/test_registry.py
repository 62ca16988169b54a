"""`attn_implementation="weft"`: any architecture of transformers that goes through its registry, against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import weft  # noqa: E402
from weft.packed import registry  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 3}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED, "Mistral": {**GROUPED, **WINDOW}, "Ministral": {**GROUPED, **WINDOW, "head_dim": 8},
    "Qwen2": {**GROUPED, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "Qwen3": GROUPED,
    "Phi3": GROUPED, "Phi": GROUPED, "Olmo": GROUPED, "Olmo2": GROUPED, "Olmo3": {**GROUPED, **WINDOW},
    "StableLm": GROUPED,
    "Gemma": {**GROUPED, "head_dim": 8}, "Gemma3Text": {**GROUPED, **WINDOW, "head_dim": 8}, "Cohere": GROUPED,
    "Cohere2": {**GROUPED, **WINDOW}, "Starcoder2": {**GROUPED, **WINDOW}, "GPTNeoX": {}, "Granite": GROUPED,
    "SmolLM3": GROUPED, "Glm": {**GROUPED, "head_dim": 8}, "Glm4": {**GROUPED, "head_dim": 8},
    "Exaone4": {**GROUPED, **WINDOW},
    "GPT2": {}, "OPT": {"ffn_dim": 40, "word_embed_proj_dim": 32}, "Nemotron": GROUPED, "Persimmon": {},
    "Helium": {**GROUPED, "head_dim": 8}, "Arcee": GROUPED,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "XLMRoberta": {}, "Camembert": {}, "Electra": {}, "ModernBert": {"local_attention": 4},
    "EuroBert": GROUPED, "Ernie": {}, "RobertaPreLayerNorm": {}, "Data2VecText": {},
}  # fmt: skip


def pair(name: str, head: str = "Model", **options: Any) -> tuple[Any, Any]:
    """The same random model with eager attention and with weft's."""
    weft.register_attention()
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    kind = getattr(transformers, f"{name.removesuffix('Text') if head != 'Model' else name}{head}")
    torch.manual_seed(0)
    eager = kind(config).eval()
    for p in eager.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.2)
    packed = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    packed.set_attn_implementation("weft")
    return eager, packed


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def some_ids(rows: int = 3, columns: int = 9) -> torch.Tensor:
    return torch.randint(3, 60, (rows, columns), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, states: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    states.square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_padded_batches(name: str) -> None:
    eager, packed = pair(name, **{**DECODERS, **ENCODERS}[name])
    ids, lengths = some_ids(), torch.tensor([9, 4, 6])
    right = (torch.arange(9)[None] < lengths[:, None]).long()
    for mask in (None, right, right.flip(1)):
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        want, got = (m(ids, attention_mask=mask)[0][real] for m in (eager, packed))
        close(got, want)
        for a, b in zip(gradients(packed, got), gradients(eager, want), strict=True):
            close(a, b)


@pytest.mark.parametrize("name", DECODERS)
def test_flattened_rows(name: str) -> None:
    _, packed = pair(name, **DECODERS[name])
    texts = [text[None] for text in some_ids(1, 17)[0].split([5, 1, 8, 3])]
    positions = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    want = torch.cat([packed(t)[0] for t in texts], 1)
    got = packed(torch.cat(texts, 1), position_ids=positions, use_cache=False)[0]
    close(got, want)
    for a, b in zip(gradients(packed, got), gradients(packed, want), strict=True):
        close(a, b)
    # Another text leaves the bits of all others.
    other = torch.cat([texts[0], texts[1], texts[2] * 0 + 7, texts[3]], 1)
    again = packed(other, position_ids=positions, use_cache=False)[0]
    assert torch.equal(again[:, :6], got[:, :6])
    assert torch.equal(again[:, 14:], got[:, 14:])
    assert not torch.equal(again[:, 6:14], got[:, 6:14])


@pytest.mark.parametrize("name", ["Bert", "ModernBert", "EuroBert", "Llama"])
def test_offsets_of_a_flattened_row(name: str) -> None:
    _, packed = pair(name, **{**DECODERS, **ENCODERS}[name])
    texts = [text[None] for text in some_ids(1, 17)[0].split([5, 1, 8, 3])]
    positions = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    cu = torch.tensor([0, 5, 6, 14, 17], dtype=torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}
    want = torch.cat([packed(t)[0] for t in texts], 1)
    got = packed(torch.cat(texts, 1), position_ids=positions, **said)[0]
    close(got, want)
    with pytest.raises(ValueError, match="must be the same tensor"):
        packed(torch.cat(texts, 1), position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu + 1)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Gemma3Text", "GPTNeoX", "Cohere2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name: str, cache: str | None) -> None:
    eager, packed = pair(name, "ForCausalLM", **DECODERS[name])
    ids = some_ids()
    mask = (torch.arange(9)[None] < torch.tensor([9, 4, 6])[:, None]).long().flip(1)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    if cache is not None:
        options["cache_implementation"] = cache
        options["disable_compile"] = True
    want, got = (m.generate(ids, **options) for m in (eager, packed))
    assert torch.equal(got, want)


def test_bfloat16_dropout_and_values_of_another_width() -> None:
    eager, packed = pair("Llama", **GROUPED)
    ids = some_ids()
    got, want = (m.to(torch.bfloat16)(ids)[0].float() for m in (packed, eager))
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    _, drops = pair("Llama", attention_dropout=0.5)
    drops.train()
    torch.manual_seed(3)
    first = drops(ids)[0]
    torch.manual_seed(3)
    assert torch.equal(first, drops(ids)[0])
    assert not torch.equal(first, drops(ids)[0])
    for wide in (8, 24):
        q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
        v = torch.randn(2, 2, 5, wide)
        out, _ = registry.registry_attention(torch.nn.Module(), q, k, v, None, is_causal=True)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        close(out, want.transpose(1, 2))


def test_cross_attention() -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    real = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    from transformers.masking_utils import bidirectional_mask_function

    mask = registry.registry_mask(2, 3, 6, mask_function=bidirectional_mask_function, attention_mask=real)
    out, _ = registry.registry_attention(torch.nn.Module(), q, k, v, mask)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
    close(out, want.transpose(1, 2))


def refused(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_what_it_cannot_do_is_refused_by_name() -> None:
    ids = some_ids()
    _, softcap = pair("Gemma2", **GROUPED, head_dim=8)
    refused(lambda: softcap(ids), "has softcap, which is not supported")
    _, sinks = pair("GptOss", **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    refused(lambda: sinks(ids), "has s_aux, which is not supported")
    _, packed = pair("Llama", **GROUPED)
    refused(lambda: packed(ids, attention_mask=torch.zeros(3, 1, 9, 9)), "a mask of 4 dims of your own")
    refused(lambda: packed(ids, output_attentions=True), "has output_attentions")
    refused(lambda: packed.half()(ids), "float32 or bfloat16, got torch.float16")
    packed.float()
    padded = torch.ones(1, 9)
    padded[:, 7:] = 0
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    refused(lambda: packed(ids[:1], attention_mask=padded, cu_seq_lens_q=cu, cu_seq_lens_k=cu), "do not go together")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    refused(
        lambda: packed(ids[:1], position_ids=positions, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu),
        "say different things",
    )
    refused(
        lambda: registry.registry_mask(1, 2, 2, mask_function=lambda b, h, q, k: q == k), "the mask .*lambda.* is not"
    )


def test_packed_and_parallel_models_do_not_mind() -> None:
    eager, packed = pair("Llama", **GROUPED)
    twin = weft.pack(packed)
    with torch.no_grad():
        close(twin(some_ids())[0], eager(some_ids())[0])
    assert registry.is_registered()


def test_the_signature_of_flash_attn() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3, 7], [0, 5, 10]))
    got = weft.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, causal=True, window_size=(2, 0), softmax_scale=0.3)
    for a, b, c, d in ((0, 3, 0, 5), (3, 7, 5, 10)):
        at = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        keys = torch.arange(d - c)[None]
        seen = (keys <= at) & (keys >= at - 2)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d])), attn_mask=seen, scale=0.3, enable_gqa=True
        )
        close(got[a:b], want[0].transpose(0, 1))
    refused(lambda: weft.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 5), "max_seqlen_q is 3, but .* a sequence of 4")
    refused(lambda: weft.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, softcap=1.0), "softcap is not supported")
