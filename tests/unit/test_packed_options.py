"""Options of a packed model's call: caches and generation, hidden states, embeddings as input, spans, dropout."""

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

from weft import reference  # noqa: E402
from weft.kernels.attention import dropout_seed  # noqa: E402
from weft.packed import PackedBatch, pack, packed_attention  # noqa: E402

LENGTHS = [37, 1, 12, 25, 3]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def decoder(family):
    return small.build(family, small.LANGUAGE_HEADS[family])


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}])
@pytest.mark.parametrize("family", small.CAUSAL)
def test_generation_gives_the_tokens_of_the_original(family, options):
    model = decoder(family)
    ids, mask = small.inputs(LENGTHS, side="left")
    want, got = (
        each.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None, **options)
        for each in (model, pack(model))
    )
    assert want.shape == (5, 57)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", small.CAUSAL)
def test_generation_from_embeddings(family):
    model = decoder(family)
    ids, mask = small.inputs(LENGTHS, side="left")
    vectors = model.get_input_embeddings()(ids).detach()
    want, got = (
        each.generate(inputs_embeds=vectors, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for each in (model, pack(model))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", small.CAUSAL)
def test_a_cache_holds_the_keys_and_values_of_real_tokens(family):
    model = decoder(family)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS, side="left")
    with torch.no_grad():
        want = model(ids, attention_mask=mask).past_key_values
        given = transformers.DynamicCache(config=model.config)
        for got in (
            packed(ids, attention_mask=mask).past_key_values,  # the config's default, as in transformers
            packed(ids, attention_mask=mask, use_cache=True).past_key_values,
            packed(ids, attention_mask=mask, past_key_values=given).past_key_values,
        ):
            for layer, other in zip(want.layers, got.layers, strict=True):
                for a, b in ((layer.keys, other.keys), (layer.values, other.values)):
                    torch.testing.assert_close(b, a * mask[:, None, :, None], **CLOSE)
    assert got is given
    assert packed(ids, attention_mask=mask).get("past_key_values") is None  # with gradients nobody decodes
    assert packed(ids, attention_mask=mask, use_cache=True).past_key_values.get_seq_length() == 37


def test_what_a_cache_cannot_do_is_named():
    packed = pack(decoder("Llama"))
    ids, mask = small.inputs(LENGTHS)
    batch = PackedBatch.from_padded(ids, mask)
    with torch.no_grad():
        assert packed(batch).get("past_key_values") is None
        with pytest.raises(ValueError, match="use_cache: a cache is padded"):
            packed(batch, use_cache=True)
        with pytest.raises(ValueError, match="past_key_values must be a cache of transformers, got object"):
            packed(ids, attention_mask=mask, past_key_values=object())
        with pytest.raises(ValueError, match="last column, which is padding in some sequences"):
            packed.generate(ids, attention_mask=mask, max_new_tokens=2)


# ---- hidden states and embeddings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["Model", 0, 1, 2])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_hidden_states_are_the_same(family, head):
    model = small.build(family, head if head == "Model" else small.heads(family)[head])
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            want = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            got = packed(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        assert len(want) >= 4
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a * mask[..., None], **CLOSE)


def test_hidden_states_by_config_by_tuple_and_packed():
    model = small.build("Bert", output_hidden_states=True)
    ids, mask = small.inputs([9, 9])
    packed = pack(model)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, return_dict=False)
        got = packed(ids, attention_mask=mask, return_dict=False)
        assert len(got) == len(want) == 3
        for a, b in zip(want[2], got[2], strict=True):
            torch.testing.assert_close(b, a, **CLOSE)
        assert packed(PackedBatch.from_padded(ids, mask)).hidden_states[1].shape == (18, 64)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_embeddings_as_input_and_their_gradients(family):
    model = small.build(family)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    results = []
    for each in (model, packed):
        states = each(inputs_embeds=vectors, attention_mask=mask).last_hidden_state * mask[..., None]
        results.append((states, torch.autograd.grad(states.square().sum(), vectors)[0] * mask[..., None]))
    torch.testing.assert_close(results[1][0], results[0][0], **CLOSE)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4 * float(results[0][1].abs().max()), rtol=1e-3)
    with torch.no_grad():
        fast = packed(inputs_embeds=vectors, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(fast, results[0][0], **CLOSE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(2, 3, 5)}, r"inputs_embeds must have shape \[batch, length, 64\], got \[5\]"),
        ({"inputs_embeds": torch.zeros(2, 64)}, r"inputs_embeds must be .* got torch.float32 \[2, 64\]"),
        ({"inputs_embeds": torch.zeros(2, 3, 64), "input_ids": torch.ones(2, 3).long()}, r"got both input_ids and"),
        (
            {"inputs_embeds": torch.zeros(2, 3, 64).bfloat16()},
            r"are torch.bfloat16, the model computes in",
        ),
    ],
)
def test_wrong_embeddings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message), torch.no_grad():
        pack(small.build("Bert"))(**arguments)


def test_attention_weights_asked_by_config_are_refused():
    model = small.build("Bert")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"config.output_attentions = True is not supported"):
        pack(model)(torch.ones(1, 3).long())


# ---- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", small.FAMILIES)
def test_spans(family):
    model = small.build(family, "ForQuestionAnswering")
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        want, got = (each(ids, attention_mask=mask) for each in (model, packed))
    for key in ("start_logits", "end_logits"):
        torch.testing.assert_close(got[key][mask.bool()], want[key][mask.bool()], **CLOSE)
        assert (got[key].softmax(-1)[mask == 0] == 0).all()
    places = {"start_positions": torch.tensor([3, 1]), "end_positions": torch.tensor([4, 8])}
    with pytest.raises(ValueError, match=r"start_positions: the loss of .* counts the logits of padding"):
        packed(ids[:2], attention_mask=mask[:2], **places)
    level = ids[:2, :9]
    want_loss, loss = (each(level, **places).loss for each in (model, packed))
    torch.testing.assert_close(loss, want_loss, **CLOSE)
    loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


# ---- dropout ---------------------------------------------------------------------------------------------------------


def attention_inputs(lengths, *, heads=4, kv_heads=2, width=16):
    batch = PackedBatch.from_values(torch.zeros(sum(lengths)), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), h, width) for h in (heads, kv_heads, kv_heads)]
    return batch, [torch.randn(*s, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4)}])
def test_dropped_attention_is_that_of_the_plain_twin(options):
    """The twin derives the same mask from the seed: values and gradients are exact, not alike on average."""
    batch, inputs = attention_inputs([0, 1, 40, 300])
    exact = [t.detach().double().requires_grad_() for t in inputs]
    for seed in (torch.tensor([5]), torch.tensor([2**62 + 12345])):
        got = packed_attention(*inputs, batch, dropout=0.3, seed=seed, **options)
        want = reference.packed_attention(*exact, batch, dropout=0.3, seed=seed, **options)
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=5e-6)
        weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
        got_grads = torch.autograd.grad((got * weights).sum(), inputs)
        want_grads = torch.autograd.grad((want * weights.double()).sum(), exact)
        for g, w in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(g.double(), w, atol=3e-5, rtol=3e-5)


def test_dropout_follows_torchs_generator():
    batch, inputs = attention_inputs([20, 60])
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(packed_attention(*inputs, batch, dropout=0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert dropout_seed().shape == (1,)


def test_dropout_drops_evenly_and_keeps_the_mean():
    kept = reference.kept(987654321987, 8, 0, 256, 256, 0.25).double()
    spread = (0.25 * 0.75) ** 0.5
    for dims, count in (((0, 1, 2), 8 * 256 * 256), ((1, 2), 256 * 256), ((0, 1), 8 * 256), ((0, 2), 8 * 256)):
        assert ((kept.mean(dims) - 0.75).abs() < 5 * spread / count**0.5).all()
    centred = kept - kept.mean()
    neighbours = [centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[..., 1:] * centred[..., :-1]]
    assert all(abs(float(n.mean())) < 5 * spread**2 / n.numel() ** 0.5 for n in neighbours)
    batch, inputs = attention_inputs([30])
    with torch.no_grad():
        plain = packed_attention(*inputs, batch)
        rounds = [packed_attention(*inputs, batch, dropout=0.2, seed=torch.tensor([s])) for s in range(2000)]
    mean, deviation = torch.stack(rounds).mean(0), torch.stack(rounds).std(0)
    assert ((mean - plain).abs() < 6 * deviation / 2000**0.5 + 1e-6).all()


@pytest.mark.parametrize(("dropout", "seed"), [(1.0, None), (-0.1, None), (0.1, torch.tensor([1.0]))])
def test_wrong_dropout_is_named(dropout, seed):
    batch, inputs = attention_inputs([3])
    with pytest.raises(ValueError, match="dropout"):
        packed_attention(*inputs, batch, dropout=dropout, seed=seed)


def test_slopes_that_would_get_no_gradient_are_refused():
    batch, inputs = attention_inputs([3])
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes get no gradient"):
        packed_attention(*inputs, batch, alibi_slopes=slopes)
    with torch.no_grad():
        assert packed_attention(*inputs, batch, alibi_slopes=slopes).shape == (3, 4, 16)


def test_training_drops_attention_as_the_model_says():
    model = small.build("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.4).train()
    ids, mask = small.inputs(LENGTHS)

    def states(each):
        torch.manual_seed(0)
        return each(ids, attention_mask=mask).last_hidden_state

    packed, off = pack(model), pack(model, attention_dropout="off")
    assert torch.equal(states(packed), states(packed))
    exact = model.eval()(ids, attention_mask=mask).last_hidden_state * mask[..., None]
    model.train()
    off.train()
    torch.testing.assert_close(states(off), exact, **CLOSE)
    assert (states(packed.train()) - exact).abs().max() > 1e-2
    with pytest.raises(ValueError, match="'error' is not a valid AttentionDropout"):
        pack(model, attention_dropout="error")


# ---- second derivatives ----------------------------------------------------------------------------------------------


def test_second_derivatives_of_attention_are_refused_by_name():
    batch, inputs = attention_inputs([3, 5])
    (grad,) = torch.autograd.grad(packed_attention(*inputs, batch).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of packed attention are not supported"):
        grad.square().sum().backward()
    packed = pack(small.build("Bert"))
    vectors = torch.randn(1, 4, 64, requires_grad=True)
    loss = packed(inputs_embeds=vectors).last_hidden_state.square().sum()
    (grad,) = torch.autograd.grad(loss, vectors, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of packed attention are not supported"):
        grad.square().sum().backward()


def test_training_a_head_learns_with_every_dropout():
    model = small.build("Bert", "ForSequenceClassification").train()
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    labels = torch.tensor([0, 1, 0, 1, 1])
    optimizer = torch.optim.SGD(packed.parameters(), lr=0.05)
    torch.manual_seed(0)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(packed(ids, attention_mask=mask).logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize(
    ("name", "where"), [("LlamaModel", "layer"), ("GPT2Model", "config"), ("GPT2Model", "layer")]
)  # fmt: skip
def test_a_decoder_that_looks_ahead_is_refused(name: str, where: str) -> None:
    import transformers

    sizes = {"LlamaModel": {"intermediate_size": 32, "num_key_value_heads": 2}, "GPT2Model": {}}[name]
    config = getattr(transformers, name.replace("Model", "Config"))(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **sizes
    )
    model = getattr(transformers, name)(config).eval()
    packed = pack(model)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        packed(input_ids=ids)
    if where == "config":
        model.config.is_causal = False
    else:
        model.get_submodule("layers.1.self_attn" if name == "LlamaModel" else "h.1.attn").is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        packed(input_ids=ids)


@pytest.mark.parametrize("window", [None, 3])
def test_decoders_of_llamas_kin_look_ahead_where_their_config_says_so(window: int | None) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, sliding_window=window, is_causal=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.MistralModel(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    packed, ids = pack(model), torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (packed, model))
        torch.testing.assert_close(got[mask == 1], want[mask == 1], atol=1e-5, rtol=1e-5)
        changed = packed(input_ids=ids.clone().index_fill_(1, torch.tensor([5]), 7), attention_mask=mask)
        assert not torch.equal(changed.last_hidden_state[0, 4], got[0, 4])  # it sees the next token


def test_what_is_packed_already_is_refused_by_name() -> None:
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    with pytest.raises(ValueError, match="packed or parallel already"):
        pack(pack(encoder))


def test_a_list_of_texts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        PackedBatch.from_list(["one text", "another"])
