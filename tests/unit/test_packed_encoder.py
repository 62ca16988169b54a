"""Packed models in generation, and torch's own encoder."""

import packed_models as small
import pytest
import torch
from test_packed_tools import CLOSE
from torch import nn

from weft.errors import Unsupported
from weft.packed import pack

# ---- generation


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"do_sample": True, "top_k": 5}], ids=str)
@pytest.mark.parametrize("family", small.CAUSAL)
def test_other_ways_to_generate(family, options):
    rows = slice(0, 1) if "prompt_lookup_num_tokens" in options else slice(None)
    ids, mask = small.inputs([9, 2, 6], side="left")
    model = small.build(family, small.LANGUAGE_HEADS[family])
    found = []
    for each in (model, pack(model)):
        torch.manual_seed(3)
        found.append(
            each.generate(ids[rows], attention_mask=mask[rows], max_new_tokens=8, eos_token_id=None,
                          **{"do_sample": False, **options})
        )  # fmt: skip
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("Llama", "a mask of 4 dims"),
        ("Qwen2", r"a mask for each kind of layers \(full_attention\)"),
        ("Qwen3", r"a mask for each kind of layers \(full_attention\)"),
        ("Gemma3", r"a mask for each kind of layers \(.*sliding_attention.*\)"),
    ],
)
def test_a_static_cache_is_refused(family, says):
    ids, mask = small.inputs([9, 2, 6], side="left")
    packed = pack(small.build(family, "ForCausalLM"))
    with pytest.raises(Unsupported, match=rf"{says} is not supported.*for a static cache: use the default one"):
        packed.generate(ids, attention_mask=mask, max_new_tokens=4, cache_implementation="static")


@pytest.mark.parametrize("first", ["model", "packed"])
@pytest.mark.parametrize("family", small.CAUSAL)
def test_hidden_states_are_recorded_once(family, first):
    """Layers that two models share have the hooks of transformers once, whichever of them asks first."""
    ids, mask = small.inputs([9, 2, 6], side="left")
    model = small.build(family, small.LANGUAGE_HEADS[family])
    packed, other = pack(model), pack(model)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    order = [model, packed] if first == "model" else [packed, model]
    found = [m.generate(ids, attention_mask=mask, output_hidden_states=True, **options) for m in [*order, other, model]]
    assert all(len(states) == 4 for each in found for states in each.hidden_states)
    for each in found[1:]:
        for step, wanted in zip(each.hidden_states, found[0].hidden_states, strict=True):
            for got, want in zip(step, wanted, strict=True):
                torch.testing.assert_close(got[:, -1], want[:, -1], atol=1e-4, rtol=0)


# ---- torch's encoder


def encoder_of(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_encoder_masks_mean_what_they_mean_in_torch():
    encoder = encoder_of()
    packed, src = pack(encoder), torch.randn(3, 6, 32)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.tensor([[False] * 6, [False] * 2 + [True] * 4, [True] * 6])
    additive = torch.zeros(3, 6).masked_fill(padding, float("-inf"))
    with torch.no_grad():
        for options in (
            {"mask": causal, "is_causal": False},  # a hint, which changes nothing
            {"mask": causal},
            {"mask": causal == float("-inf"), "is_causal": True},
            {"mask": torch.zeros(6, 6)},
            {"mask": torch.zeros(6, 6), "is_causal": False},
            {},
        ):
            for hidden in (None, padding, additive):
                got = packed(src, src_key_padding_mask=hidden, **options)
                want = encoder(src, src_key_padding_mask=None if hidden is None else padding, **{
                    **options, **({"mask": options["mask"] == float("-inf")} if "mask" in options and
                                  options["mask"].is_floating_point() else {})})  # fmt: skip
                real = torch.ones(3, 6, dtype=torch.bool) if hidden is None else ~padding
                torch.testing.assert_close(got[real], want[real], **CLOSE)
                assert not got[~real].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_causal": True}, "a hint about the mask, and there is none"),
        ({"mask": torch.zeros(6, 6), "is_causal": True}, "a hint about the mask, but this one hides nothing"),
        ({"mask": torch.zeros(6, 6, dtype=torch.bool), "is_causal": True}, "or is_causal=False"),
        ({"mask": torch.randn(6, 6)}, "only a causal mask"),
        ({"mask": torch.zeros(12, 6, 6)}, "only a causal mask"),
        ({"mask": torch.zeros(5, 5)}, "for the length of src"),
        ({"src_key_padding_mask": torch.zeros(3, 6).fill_(-0.5)}, "other numbers would be added"),
        ({"src_key_padding_mask": torch.ones(3, 6, dtype=torch.int64)}, "must be boolean, or 0 and -inf"),
        ({"src": torch.randn(3, 6, 16)}, "src has 16 features, the encoder 32"),
        ({"src": torch.randn(3, 6, 32).bfloat16()}, "inputs_embeds are torch.bfloat16"),
        ({"src": torch.nested.nested_tensor([torch.randn(3, 32)], layout=torch.jagged)}, "not a nested one"),
    ],
)
def test_what_an_encoder_refuses(arguments, message):
    packed = pack(encoder_of())
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
            packed(**{"src": torch.randn(3, 6, 32), **arguments})


def test_surgery_on_an_encoder():
    encoder = encoder_of().eval()
    packed, src = pack(encoder), torch.randn(3, 6, 32)

    def same():
        torch.testing.assert_close(packed(src), encoder(src), **CLOSE)

    same()
    encoder.layers[0].activation = torch.nn.functional.gelu
    encoder.layers[1].norm1.eps = 0.5
    same()
    handle = encoder.layers[1].self_attn.out_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"TransformerEncoder.layers.1.self_attn.out_proj has a hook"):
        packed(src)
    handle.remove()
    encoder.layers[1].self_attn.batch_first = False
    with pytest.raises(ValueError, match="some layers have batch_first"):
        packed(src)
    encoder.layers[1].self_attn.batch_first = True
    encoder.layers[1].self_attn = nn.Identity()
    with pytest.raises(ValueError, match=r"expected torch\.nn\.MultiheadAttention, got Identity"):
        packed(src)
    with pytest.raises(ValueError, match="has no layers"):
        pack(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48), 0))
