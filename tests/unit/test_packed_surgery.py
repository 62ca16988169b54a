"""What users do to the modules of a packed model: it is computed as the model itself would, or refused by name."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

import weft  # noqa: E402
from weft.errors import Unsupported  # noqa: E402
from weft.packed import pack  # noqa: E402

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
IDS, MASK = small.inputs([9, 2, 6])


def states(model, **options):
    return model(IDS, attention_mask=MASK, **options).last_hidden_state


def assert_same(packed, model, grad=(False, True)):
    for each in grad:
        with torch.set_grad_enabled(each):
            got, want = states(packed), states(model) * MASK[..., None]
        torch.testing.assert_close(got, want, **CLOSE)


def changed(packed, model, change):
    """Whether a change of the model matters at all; if it does not, a test of it shows nothing."""
    with torch.no_grad():
        before = states(model)
        states(packed)
        change()
        assert not torch.allclose(states(model), before, atol=1e-3)


def refused(packed, message):
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
            states(packed)


# ---- other modules ---------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.a, self.b = (
            nn.Parameter(torch.randn(2, inner.in_features)),
            nn.Parameter(torch.randn(inner.out_features, 2)),
        )

    def forward(self, x):
        return self.inner(x) + x @ self.a.t() @ self.b.t()


def test_an_adapter_is_refused_and_its_merge_is_seen():
    model = small.build("Bert")
    packed = pack(model)
    attention = model.encoder.layer[1].attention.self
    adapter = Lora(attention.query)
    changed(packed, model, lambda: setattr(attention, "query", adapter))
    refused(packed, r"BertModel.encoder.layer.1.attention.self.query is a .*Lora, which a packed model does not know")
    with torch.no_grad():
        adapter.inner.weight += adapter.b @ adapter.a
    attention.query = adapter.inner
    assert_same(packed, model)


def test_a_subclass_of_linear_is_no_linear():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = small.build("Llama")
    packed = pack(model)
    assert_same(packed, model)
    model.layers[0].mlp.up_proj = Scaled(64, 96, bias=False)
    refused(packed, r"LlamaModel.layers.0.mlp.up_proj is a .*Scaled")
    with pytest.raises(ValueError, match="Scaled"):
        pack(model)


def test_layers_swapped_and_cut():
    model = small.build("Bert")
    packed = pack(model)
    other = small.build("Bert", seed=5)
    changed(packed, model, lambda: model.encoder.layer.__setitem__(1, other.encoder.layer[1]))
    assert_same(packed, model)
    changed(packed, model, lambda: setattr(model.encoder, "layer", model.encoder.layer[:2]))
    assert_same(packed, model)
    model.encoder.layer = model.encoder.layer[:0]
    refused(packed, "the model has no layers, expected at least one")


@pytest.mark.parametrize(("family", "name"), [("Llama", "layers"), ("GPT2", "h"), ("ModernBert", "layers")])
def test_modules_of_the_original_that_the_twin_cannot_see(family, name):
    """The twin has its own list of top modules: a change of the original's would be missed."""
    model = small.build(family)
    packed = pack(model)
    assert_same(packed, model)
    layers = getattr(model, name)
    setattr(model, name, layers[:2])
    refused(packed, "that was packed have been replaced since; pack it again")
    assert_same(pack(model), model)
    setattr(model, name, layers)
    setattr(packed, name, layers[:2])  # in the packed one it is meant for that one
    with torch.no_grad():
        assert not torch.allclose(states(packed), states(model) * MASK[..., None], atol=1e-3)


SETTINGS = {
    "config": copy.deepcopy, "generation_config": copy.deepcopy, "loss_function": lambda loss: lambda **given: 3.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_original_that_the_twin_cannot_see(name):
    model = small.build("Llama", "ForCausalLM")
    packed, own = pack(model), getattr(model, name)
    model.gradient_checkpointing_enable(), model.gradient_checkpointing_disable()  # which its layers say
    weft.generate(packed, [[5, 6]], max_new_tokens=1)
    setattr(model, name, SETTINGS[name](own))
    for call in (lambda: packed(IDS, attention_mask=MASK), lambda: weft.generate(packed, [[5, 6]], max_new_tokens=1)):
        with pytest.raises(Unsupported, match=rf"^settings \({name}\) of the LlamaForCausalLM that was packed"):
            call()
    again = pack(model)
    setattr(again, name, own)  # in the packed one it is meant for that one
    assert torch.isfinite(again(IDS, attention_mask=MASK).logits).all()


@pytest.mark.parametrize("of", ["the head", "the base"])
def test_a_forward_that_was_patched(of):
    """It would run in place of the packed one, on padding."""
    model = small.build("Llama", "ForCausalLM")
    patched = model if of == "the head" else model.model
    patched.forward = patched.forward  # its own, bound: some tools leave it behind
    assert not pack(model)(IDS, attention_mask=MASK).logits[MASK == 0].any()
    own = patched.forward
    patched.forward = lambda *args, **given: own(*args, **given)
    with pytest.raises(Unsupported, match=f"{type(patched).__name__} has another forward than its class came with"):
        pack(model)


def test_a_layer_that_was_made_for_another_attention():
    model, donor = small.build("Bert"), small.build("Bert", seed=1)
    model.set_attn_implementation("sdpa"), donor.set_attn_implementation("eager")
    packed = pack(model)
    packed.encoder.layer[0] = donor.encoder.layer[0]
    refused(packed, "was made for the attention 'eager', and the model for 'sdpa'")


def test_llama_counts_its_layers_by_the_config():
    model = small.build("Llama")
    packed = pack(model)
    changed(packed, model, lambda: setattr(model.config, "num_hidden_layers", 2))
    assert_same(packed, model)


def test_numbers_that_modules_hold():
    model = small.build("Bert")
    packed = pack(model)
    layer = model.encoder.layer[0]
    changed(packed, model, lambda: setattr(layer.attention.self, "scaling", 1.5))
    assert_same(packed, model)
    changed(packed, model, lambda: setattr(layer.output.LayerNorm, "eps", 0.7))
    assert_same(packed, model)
    changed(packed, model, lambda: setattr(layer.intermediate, "intermediate_act_fn", nn.ReLU()))
    assert_same(packed, model)
    layer.intermediate.intermediate_act_fn = nn.Tanh()
    refused(packed, r"the activation Tanh\(\) is not supported")


def test_the_config_is_not_what_modules_compute():
    model = small.build("Bert")
    packed = pack(model)
    model.config.hidden_act, model.config.hidden_dropout_prob = "relu", 0.9
    model.config.attention_probs_dropout_prob = 0.9
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_same(packed, model)
    model.train()
    packed.train()
    assert_same(packed, model)


def test_an_attention_of_the_users():
    def mine(module, query, key, value, attention_mask, **_):
        return value.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("mine", mine)
    transformers.AttentionMaskInterface.register("mine", transformers.masking_utils.eager_mask)
    model = small.build("Bert")
    packed = pack(model)
    assert_same(packed, model)
    model.config._attn_implementation = "mine"
    refused(packed, "the attention implementation 'mine' is not transformers' own")
    model.config._attn_implementation = "eager"
    assert_same(packed, model)


def test_embeddings_with_options():
    model = small.build("Bert")
    packed = pack(model)
    model.embeddings.word_embeddings.max_norm = 0.1
    refused(packed, "max_norm, scale_grad_by_freq and sparse")


def test_matrices_that_do_not_fit_never_reach_the_core():
    model = small.build("Bert")
    packed = pack(model)
    layer = model.encoder.layer[1]
    layer.output.dense = nn.Linear(96, 32)
    refused(packed, r"the last MLP matrix of layer 1 must be \[64, 96\] in all, got \[\[32, 96\]\]")
    layer.output.dense = nn.Linear(96, 64)
    layer.output.LayerNorm.weight = nn.Parameter(torch.randn(64, 2)[:, 0])
    refused(packed, "a norm of layer 1 has strides")
    layer.output.LayerNorm.weight = nn.Parameter(torch.randn(64))
    assert_same(packed, model)
    layer.output.LayerNorm.weight.data = torch.randn(32)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"of shape \[64\] on the CPU, got .* \[32\]|has shape \[32\], expected \[64\]"),
    ):
        states(packed)
    with pytest.raises(ValueError, match="heads of 512, expected 1 to 256"):
        pack(small.build("Bert", hidden_size=1024, num_attention_heads=2, num_hidden_layers=1))


# ---- hooks, patches, parametrizations --------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda *_: None),
    "pre": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_a_layer_is_refused(kind):
    model = small.build("Bert")
    packed = pack(model)
    for place in (
        "encoder.layer.1",
        "encoder.layer.0.attention.self.query",
        "embeddings",
        "encoder.layer.2.output.dropout",
    ):
        assert_same(packed, model)
        handle = HOOKS[kind](model.get_submodule(place))
        refused(packed, rf"BertModel.{place} has a hook \(.*lambda.*\), but a packed model does not run the code")
        with pytest.raises(ValueError, match="has a hook"):
            pack(model)
        handle.remove()
    assert_same(packed, model)


def test_hooks_that_run():
    model = small.build("Bert", "ForTokenClassification")
    packed = pack(model)
    seen = []
    packed.register_forward_hook(lambda m, a, o: seen.append(tuple(o.logits.shape)))
    packed.bert.register_forward_hook(lambda *_: seen.append("base"))
    packed.classifier.register_forward_hook(lambda m, a, o: seen.append(tuple(o.shape)))
    packed(IDS, attention_mask=MASK)
    assert seen == ["base", (1, 17, 2), (3, 9, 2)]
    pooled = pack(small.build("Bert"))
    pooled.pooler.dense.register_forward_hook(lambda m, a, o: seen.append("pooler"))
    states(pooled)
    assert seen[-1] == "pooler"


def test_a_hook_for_all_modules_is_refused():
    model = small.build("Bert")
    packed = pack(model)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        refused(packed, "a hook for all modules is registered")
    finally:
        handle.remove()
    assert_same(packed, model)


def test_hugging_faces_own_hooks_are_no_matter():
    model = small.build("Bert")
    packed = pack(model)
    states(model, output_hidden_states=True)  # leaves a hook on every layer
    assert any(m._forward_hooks for m in model.encoder.modules())
    assert_same(packed, model)


def test_another_forward():
    model = small.build("Bert")
    packed = pack(model)
    attention = model.encoder.layer[0].attention
    own = attention.forward
    attention.forward = lambda *a, **k: (own(*a, **k)[0] * 2, None)
    refused(packed, "BertModel.encoder.layer.0.attention has another forward than its class came with")
    del attention.forward
    assert_same(packed, model)
    kind = type(attention)
    stock = kind.forward
    try:
        kind.forward = functools.wraps(stock)(lambda self, *a, **k: (stock(self, *a, **k)[0] * 2, None))
        refused(packed, "BertModel.encoder.layer.0.attention has another forward")
    finally:
        kind.forward = stock
    assert_same(packed, model)


@pytest.mark.parametrize(
    ("apply", "undo"),
    [
        (parametrizations.weight_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (lambda m: prune.l1_unstructured(m, "weight", amount=0.5), lambda m: prune.remove(m, "weight")),
    ],
    ids=["weight_norm", "old weight_norm", "prune"],
)
def test_parametrizations(apply, undo):
    model = small.build("Bert")
    packed = pack(model)
    dense = model.encoder.layer[0].output.dense
    apply(dense)
    refused(packed, r"BertModel.encoder.layer.0.output.dense (is a .*Parametrized|has a hook)")
    undo(dense)
    assert_same(packed, model)
