"""Modes, dropout, types and threads of packed models: what changes without any module being replaced."""

import threading

import packed_models as small
import pytest
import torch
from test_packed_surgery import CLOSE, IDS, MASK, assert_same, refused, states
from torch import nn

from weft.packed import pack

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
