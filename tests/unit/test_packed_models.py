"""`pack(model)` against the model itself: outputs, losses, gradients, and what is refused."""

import copy
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

from weft.packed import PackedBatch, pack  # noqa: E402
from weft.packed.api import supported  # noqa: E402

LENGTHS = [37, 1, 12, 25, 3]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def logits_of(output):
    return output.logits if "logits" in output else output.last_hidden_state


def only_real(states, mask):
    return states * mask[..., None] if states.dim() == 3 else states


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_states_are_the_same(family, side):
    model = small.build(family)
    if side == "left" and family in ("Bert", "Roberta"):
        model.pooler = None  # it would read the padding in column 0
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS, side=side)
    with torch.no_grad():
        want, got = model(ids, attention_mask=mask), packed(ids, attention_mask=mask)
    assert type(got) is type(want)
    real = only_real(want.last_hidden_state, mask)
    assert real.abs().max() > 0.5
    torch.testing.assert_close(got.last_hidden_state, real, **CLOSE)  # and zeros at padding
    if want.get("pooler_output") is not None:
        torch.testing.assert_close(got.pooler_output, want.pooler_output, **CLOSE)


@pytest.mark.parametrize("head", [0, 1, 2])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_heads_losses_and_gradients(family, head):
    name = small.heads(family)[head]
    model = small.build(family, name)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 2, (5,) if head == 2 else ids.shape, generator=generator)
    if head != 2:
        labels = labels.masked_fill(mask == 0, -100)
    results = []
    for each in (model, packed):
        model.zero_grad()
        output = each(ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        grads = {n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None}
        results.append((output.loss.detach(), only_real(output.logits.detach(), mask), grads))
    (want_loss, want, want_grads), (loss, got, grads) = results
    torch.testing.assert_close(loss, want_loss, **CLOSE)
    torch.testing.assert_close(got, want, **CLOSE)
    assert grads.keys() == want_grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(grad, want_grads[key], atol=1e-5 * float(want_grads[key].abs().max() + 1), rtol=1e-3)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_names_and_signature_stay(family):
    for head in ["Model", *small.heads(family)]:
        model = small.build(family, head)
        packed = pack(model)
        assert isinstance(packed, type(model))
        assert type(packed).__name__ == type(model).__name__
        assert list(packed.state_dict()) == list(model.state_dict())
        assert inspect.signature(packed.forward) == inspect.signature(model.forward)
        assert all(a is b for a, b in zip(packed.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("family", small.FAMILIES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_any_mask(family, data):
    """Holes, left padding and rows without a token, wherever the model's meaning allows them."""
    rows, columns = data.draw(st.integers(1, 4), label="rows"), data.draw(st.integers(1, 9), label="columns")
    bits = st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)
    mask = torch.tensor(data.draw(bits, label="mask")).view(rows, columns)
    model = small.build(family)
    if family in ("Bert", "Roberta"):
        model.pooler = None
    packed = pack(model)
    ids = torch.randint(5, small.VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(rows))
    if family == "ModernBert" and PackedBatch.from_padded(ids, mask).has_holes:
        with pytest.raises(ValueError, match="holes"):
            packed(ids, attention_mask=mask.long())
        return
    with torch.no_grad():
        want = model(ids, attention_mask=mask.long()).last_hidden_state
        got = packed(ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(got[mask], want[mask], **CLOSE)
    assert (got[~mask] == 0).all()


@pytest.mark.parametrize("family", small.FAMILIES)
def test_bits_do_not_depend_on_the_batch(family):
    packed = pack(small.build(family))
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        whole = packed(ids, attention_mask=mask).last_hidden_state
        for row, length in enumerate(LENGTHS):
            alone = packed(ids[row : row + 1, :length]).last_hidden_state
            assert torch.equal(alone[0], whole[row, :length])


@pytest.mark.parametrize("family", small.FAMILIES)
def test_packed_batches_in_and_out(family):
    packed = pack(small.build(family))
    ids, mask = small.inputs(LENGTHS)
    batch = PackedBatch.from_list([row[: int(n)] for row, n in zip(ids, mask.sum(1), strict=True)])
    with torch.no_grad():
        got = packed(batch).last_hidden_state
        want = packed(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(got, want[mask.bool()])


def test_nothing_is_computed_of_nothing():
    packed = pack(small.build("Bert"))
    ids = torch.zeros(0, 5, dtype=torch.int64)
    with torch.no_grad():
        assert packed(ids).last_hidden_state.shape == (0, 5, 64)
        output = packed(torch.zeros(2, 3, dtype=torch.int64), attention_mask=torch.zeros(2, 3))
    assert output.last_hidden_state.shape == (2, 3, 64)
    assert (output.last_hidden_state == 0).all()


def test_nan_stays_in_its_sequence():
    model = small.build("Bert")
    model.embeddings.word_embeddings.weight.data[7] = float("nan")
    ids, mask = small.inputs(LENGTHS)
    ids[ids == 7] = 8
    packed = pack(model)
    with torch.no_grad():
        clean = packed(ids, attention_mask=mask).last_hidden_state
        ids[2, 4] = 7
        dirty = packed(ids, attention_mask=mask).last_hidden_state
    assert dirty[2, :12].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(dirty[others], clean[others])


def test_training_moves_the_weights_that_inference_uses():
    model = small.build("Bert", "ForSequenceClassification", attention_probs_dropout_prob=0.0)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    labels = torch.tensor([0, 1, 0, 1, 1])
    with torch.no_grad():
        before = packed(ids, attention_mask=mask).logits
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.05)
    packed.train()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        torch.manual_seed(0)  # the same dropout each time
        loss = packed(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    packed.eval()
    with torch.no_grad():
        after, want = (m(ids, attention_mask=mask).logits for m in (packed, model))
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, want, **CLOSE)


def test_replaced_and_loaded_weights_are_noticed():
    packed, other = pack(small.build("Bert")), small.build("Bert", seed=5)
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        packed(ids, attention_mask=mask)
        want = other(ids, attention_mask=mask).last_hidden_state
        for assign in (False, True):
            packed.load_state_dict(other.state_dict(), assign=assign)
            got = packed(ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(got, only_real(want, mask), **CLOSE)
            other = small.build("Bert", seed=6)
            want = other(ids, attention_mask=mask).last_hidden_state


def test_copies_are_on_their_own():
    packed = pack(small.build("Bert"))
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        want = packed(ids, attention_mask=mask).last_hidden_state
        twin = copy.deepcopy(packed)
        packed.embeddings.word_embeddings.weight.zero_()
        assert torch.equal(twin(ids, attention_mask=mask).last_hidden_state, want)


def test_bfloat16():
    model = small.build("Bert").bfloat16()
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        got = pack(model)(ids, attention_mask=mask).last_hidden_state
        want = small.build("Bert")(ids, attention_mask=mask).last_hidden_state
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), only_real(want, mask), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_encoder(norm_first, batch_first, activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 48, dropout=0.0, activation=activation, batch_first=batch_first, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
    nn.init.normal_(encoder.norm.weight, 1.0)  # a norm of ones behind another one changes nothing
    packed = pack(encoder)
    _, mask = small.inputs(LENGTHS)
    padding = mask == 0
    src = torch.randn(5, 37, 32)
    src = src if batch_first else src.transpose(0, 1)
    for grad in (False, True):
        leaf = src.clone().requires_grad_(grad)
        causal = nn.Transformer.generate_square_subsequent_mask(37)
        for options in ({}, {"mask": causal, "is_causal": True}):
            want = encoder(leaf, src_key_padding_mask=padding.float().masked_fill(padding, -torch.inf), **options)
            got = packed(leaf, src_key_padding_mask=padding, **options)
            real = ~padding if batch_first else ~padding.t()
            torch.testing.assert_close(got[real], want[real], **CLOSE)
            if grad:
                got_grad, want_grad = (torch.autograd.grad(o[real].square().sum(), leaf)[0] for o in (got, want))
                torch.testing.assert_close(got_grad, want_grad, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="only a causal mask"):
        packed(src, mask=torch.zeros(37, 37).bernoulli_().bool())


REFUSED = {
    "output_attentions": {"output_attentions": True},
    "past_key_values": {"past_key_values": object()},
    "use_cache": {"use_cache": True},
    "encoder_hidden_states": {"encoder_hidden_states": torch.zeros(5, 37, 64)},
}


@pytest.mark.parametrize("argument", REFUSED)
def test_unsupported_arguments_are_named(argument):
    ids, mask = small.inputs(LENGTHS)
    with pytest.raises(ValueError, match=f"argument {argument} is not supported; supported are"):
        pack(small.build("Bert"))(ids, attention_mask=mask, **REFUSED[argument])


def wrong_calls():
    ids, mask = small.inputs(LENGTHS)
    return {
        "vocabulary": ({"input_ids": ids + 90, "attention_mask": mask}, r"input_ids: values out of range; .* 0 to 98"),
        "negative id": ({"input_ids": ids - 50}, r"input_ids: values out of range"),
        "mask shape": ({"input_ids": ids, "attention_mask": mask[:, :5]}, r"mask must have shape \[5, 37\]"),
        "mask dims": ({"input_ids": ids, "attention_mask": mask[:, None]}, r"attention_mask must have shape"),
        "too long": ({"input_ids": torch.ones(1, 81, dtype=torch.int64)}, r"more positions than the model has; .* 80"),
        "float ids": ({"input_ids": ids.float()}, r"input_ids must be integers"),
        "no ids": ({}, r"input_ids must be integers .* got NoneType"),
        "types": ({"input_ids": ids, "token_type_ids": ids}, r"token_type_ids: values out of range"),
        "types shape": ({"input_ids": ids, "token_type_ids": ids[:2]}, r"token_type_ids must have shape \[5, 37\]"),
        "left padding": ({"input_ids": ids, "attention_mask": mask.flip(1)}, r"the pooler reads the first column"),
    }


@pytest.mark.parametrize("case", wrong_calls())
def test_wrong_inputs_are_named(case):
    arguments, message = wrong_calls()[case]
    with pytest.raises(ValueError, match=message):
        pack(small.build("Bert"))(**arguments)


def test_labels_of_padding_are_refused():
    ids, mask = small.inputs(LENGTHS)
    with pytest.raises(ValueError, match="labels of padding must be -100"):
        pack(small.build("Bert", "ForMaskedLM"))(ids, attention_mask=mask, labels=ids)
    left_ids, left_mask = small.inputs(LENGTHS, side="left")
    labels = left_ids.masked_fill(left_mask == 0, -100)
    with pytest.raises(ValueError, match="predicted from padding"):
        pack(small.build("Llama", "ForCausalLM"))(left_ids, attention_mask=left_mask, labels=labels)


def test_other_models_are_refused_by_name():
    with pytest.raises(ValueError, match=r"cannot pack a torch.nn.modules.linear.Linear; supported are BertModel"):
        pack(nn.Linear(2, 2))
    config = transformers.BertConfig(is_decoder=True, **small.SIZE)
    with pytest.raises(ValueError, match=r"config.is_decoder = True is not supported; expected False"):
        pack(transformers.BertModel(config))
    with pytest.raises(ValueError, match=r"BertForMultipleChoice; supported are"):
        pack(small.build("Bert", "ForMultipleChoice"))
    assert "LlamaForCausalLM" in supported()
    swapped = small.build("Bert")
    swapped.encoder.layer[0].output.dense = nn.Sequential(nn.Linear(96, 64))
    with pytest.raises(ValueError, match=r"BertModel.encoder.layer.0.output.dense is a torch.*Sequential, which"):
        pack(swapped)
    with pytest.raises(ValueError, match=r"activation MishActivation\(\) is not supported"):
        pack(small.build("Bert", hidden_act="mish"))


def test_logits_to_keep_and_tuples():
    model = small.build("Llama", "ForCausalLM")
    packed = pack(model)
    ids, mask = small.inputs([9, 9])
    with torch.no_grad():
        want, got = (m(ids, attention_mask=mask, logits_to_keep=1).logits for m in (model, packed))
        torch.testing.assert_close(got, want, **CLOSE)
        masked = pack(small.build("Bert", "ForMaskedLM"))
        whole = masked(ids, attention_mask=mask)
        (logits,) = masked(ids, attention_mask=mask, return_dict=False)
        assert torch.equal(logits, whole.logits)
        states, _ = pack(small.build("Bert"))(ids, attention_mask=mask, return_dict=False)
    assert states.shape == (2, 9, 64)


@pytest.mark.parametrize("lengths", [[16_384], [3] * 10_000], ids=["one of 16k", "10,000 of 3"])
def test_extreme_lengths(lengths):
    """One very long sequence and very many short ones, through a whole model with gradients."""
    model = small.build("Llama", num_hidden_layers=1)
    packed = pack(model)
    generator = torch.Generator().manual_seed(0)
    batch = PackedBatch.from_values(
        torch.randint(5, small.VOCABULARY, (sum(lengths),), generator=generator), torch.tensor(lengths)
    )
    with torch.no_grad():
        got = packed(batch).last_hidden_state
        if len(lengths) > 1:
            want = model(batch.to_padded()).last_hidden_state.view(-1, 64)
            torch.testing.assert_close(got, want, **CLOSE)
        else:  # causal: the start of a long sequence is that of a short one
            head = model(batch.values[None, :300]).last_hidden_state[0]
            torch.testing.assert_close(got[:300], head, **CLOSE)
            last = packed(PackedBatch.from_list([batch.values, batch.values[:7]])).last_hidden_state
            assert torch.equal(last[: len(got)], got)
    packed(batch).last_hidden_state.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.embed_tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_infinity_stays_in_its_sequence(family, bad):
    model = small.build(family)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    vectors = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        clean = packed(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
        vectors[2, 4, 0] = bad
        dirty = packed(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
    assert not dirty[2, 4].isfinite().all()
    others = [0, 1, 3, 4]
    assert torch.equal(dirty[others], clean[others])
