"""What users do to the modules of a packed model: it is computed as the model itself would, or refused by name."""

import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

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


# ---- modes and dropout -----------------------------------------------------------------------------------------------


def dropouts(model, p):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
    return model


@pytest.mark.parametrize("family", small.FAMILIES)
def test_dropout_is_what_the_modules_say(family):
    """The config said 0.1 when the model was made; the modules say otherwise now."""
    model = small.build(family)
    packed = pack(model)
    model.train()
    packed.train()
    assert_same(pack(dropouts(model, 0.0)), model)
    assert_same(packed, model)
    dropouts(model, 0.4)
    with torch.no_grad():
        drops = states(packed)
        assert (states(packed) - drops).abs().max() > 1e-2
    dropouts(model, 0.0)
    assert_same(packed, model)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_submodules_in_eval_mode_drop_nothing(family):
    model = dropouts(small.build(family), 0.4).train()
    packed = pack(model)
    with torch.no_grad():
        once = states(packed)
        assert (states(packed) - once).abs().max() > 1e-2
    for module in model.modules():
        if module is not model:
            module.eval()
    assert packed.training
    assert_same(packed, model)
    model.eval()
    packed.eval()
    assert_same(packed, model)
    for module in model.modules():  # dropout at test time
        if isinstance(module, nn.Dropout) or "Attention" in type(module).__name__:
            module.train()
    with torch.no_grad():
        once = states(packed)
        assert (states(packed) - once).abs().max() > 1e-2


def test_one_dropout_in_training_mode():
    """What drops is exactly the one module: its rows are zeros or doubled, and nothing else is drawn."""
    model = dropouts(small.build("DistilBert", n_layers=1), 0.5)
    packed = pack(model)
    assert_same(packed, model)
    model.embeddings.dropout.train()
    with torch.no_grad():
        first = packed(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states[0][MASK.bool()]
        plain = model.eval()(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states[0][MASK.bool()]
    kept = first != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(first[kept], 2 * plain[kept], **CLOSE)


def test_identity_in_the_place_of_dropout():
    model = dropouts(small.build("GPT2"), 0.3).train()
    packed = pack(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout) and name != "attn_dropout" and module is not model:
                setattr(module, name, nn.Identity())
    for block in model.h:
        block.attn.attn_dropout.p = 0.0
    model.drop.p = 0.0
    assert_same(packed, model)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_types_and_sizes_between_calls():
    model = small.build("Llama")
    packed = pack(model)
    assert_same(packed, model)
    packed.half()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"weft computes in float32 and bfloat16 on cpu, got torch\.float16"),
    ):
        states(packed)
    packed.double()
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        states(packed)
    packed.float()
    assert_same(packed, model)
    model.layers[0].mlp.up_proj.bfloat16()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"one type on one device, got torch.bfloat16 on cpu, torch.float32"),
    ):
        states(packed)
    model.layers[0].mlp.up_proj.float()
    assert_same(packed, model)
    packed.bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(states(packed).float(), states(model.float()) * MASK[..., None], atol=0.1, rtol=0.1)


def test_bfloat16_with_float32_frequencies():
    """As from_pretrained(dtype=bfloat16) makes it."""
    model = small.build("Llama").bfloat16()
    model.rotary_emb.inv_freq = small.build("Llama").rotary_emb.inv_freq
    with torch.no_grad():
        got, want = states(pack(model)).float(), states(small.build("Llama")) * MASK[..., None]
    torch.testing.assert_close(got, want, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["Bert", "GPT2", "Llama"])
def test_resized_embeddings(family):
    model = small.build(family, small.LANGUAGE_HEADS.get(family, "ForMaskedLM"))
    packed = pack(model)
    packed(IDS)
    packed.resize_token_embeddings(110, mean_resizing=False)
    ids = IDS.clone()
    ids[0, 0] = 105
    with torch.no_grad():
        logits = packed(ids, attention_mask=MASK).logits
    assert logits.shape == (3, 9, 110)
    model = small.build(family, small.LANGUAGE_HEADS.get(family, "ForMaskedLM"))
    model.resize_token_embeddings(110, mean_resizing=False)
    model.load_state_dict(packed.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids, attention_mask=MASK).logits * MASK[..., None], **CLOSE)


def test_requires_grad_toggled():
    model = small.build("Bert")
    packed = pack(model)
    model.requires_grad_(False)
    assert not states(packed).requires_grad
    assert_same(packed, model)
    model.encoder.layer[2].requires_grad_(True)
    states(packed).square().sum().backward()
    assert [n for n, p in packed.named_parameters() if p.grad is not None and "layer.2" not in n] == []
    assert model.encoder.layer[2].output.dense.weight.grad.abs().sum() > 0


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = small.build("Bert")
        packed = pack(model)
        torch.testing.assert_close(states(packed), states(model) * MASK[..., None], **CLOSE)
        model.encoder.layer[0].output.dense.weight.data = torch.randn(64, 96)
        torch.testing.assert_close(states(packed), states(model) * MASK[..., None], **CLOSE)


def test_other_tensors_are_refused():
    class Odd(torch.Tensor):
        pass

    model = small.build("Bert")
    packed = pack(model)
    dense = model.encoder.layer[0].output.dense
    dense._parameters["weight"] = dense.weight.detach().as_subclass(Odd)
    refused(packed, "a weight is a Odd")


# ---- calls side by side ----------------------------------------------------------------------------------------------


def test_two_threads():
    packed = pack(small.build("Bert"))
    batches = [small.inputs([n, 3], seed=n) for n in (4, 9, 17, 30)]
    with torch.no_grad():
        want = [packed(ids, attention_mask=mask).last_hidden_state for ids, mask in batches]
    wrong = []

    def work(first):
        with torch.no_grad():
            for i in range(first, first + 40):
                ids, mask = batches[i % 4]
                if not torch.equal(packed(ids, attention_mask=mask).last_hidden_state, want[i % 4]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_good_call_after_a_broken_one(monkeypatch):
    model = small.build("Bert")
    packed = pack(model)
    with torch.no_grad():
        want = states(packed)
        with pytest.raises(ValueError, match="out of range"):
            packed(IDS + 1000)
        with monkeypatch.context() as patch:
            patch.setattr("weft.transformer.passes.Pass._mlp", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                states(packed)
        with monkeypatch.context() as patch:
            patch.setattr("weft.transformer.memory.empty", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                packed(torch.ones(7, 70, dtype=torch.int64))  # buffers grow, and cannot
        assert torch.equal(states(packed), want)


def test_a_base_model_that_is_not_packed():
    packed = pack(small.build("Bert", "ForMaskedLM"))
    packed.bert = small.build("Bert")
    with pytest.raises(ValueError, match=r"BertForMaskedLM.bert is a BertModel that is not packed; pack the whole"):
        packed(IDS)
    with pytest.raises(ValueError, match="is not packed"):
        type(packed)(packed.config)(IDS)


def test_a_head_that_looks_at_several_tokens():
    class Mean(nn.Module):
        def forward(self, x):
            return (x + x.mean(1, keepdim=True))[..., :2]

    model = small.build("Bert", "ForTokenClassification")
    packed = pack(model)
    packed(IDS)
    model.classifier = packed.classifier = Mean()
    packed = pack(model)
    with torch.no_grad():
        torch.testing.assert_close(packed(IDS).logits, model(IDS).logits, **CLOSE)
        with pytest.raises(ValueError, match=r"classifier \(Mean\) is not known to work token by token"):
            packed(IDS, attention_mask=MASK)
