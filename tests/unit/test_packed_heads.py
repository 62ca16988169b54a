"""All heads of all families beside Hugging Face's own: outputs on real positions, losses, and every gradient."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

from weft.packed import PackedBatch, pack  # noqa: E402

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
LENGTHS = [6, 1, 9, 3]
BY_TOKEN, BY_ROW, SPANS = "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering"


def answer(model, call, real, row_labels=False):
    """The numbers of a call, and all gradients of its loss or of a weighted sum of its logits."""
    model.zero_grad()
    output = model(**call)
    found = {}
    for key in ("logits", "start_logits", "end_logits"):
        if output.get(key) is not None:
            found[key] = output[key] if row_labels else output[key][real]
    weights = torch.Generator().manual_seed(4)
    loss = output.get("loss")
    if loss is None:
        loss = sum((t * torch.randn(t.shape, generator=weights)).sum() for t in found.values())
    loss.backward()
    found = {k: t.detach() for k, t in found.items()}
    found["loss"] = loss.detach()
    found.update({f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def assert_same(model, call, real, **options):
    packed = pack(model)
    want, got = (answer(each, call, real, **options) for each in (model, packed))
    assert got.keys() == want.keys()
    largest = max(float(t.abs().max()) for k, t in want.items() if k.startswith("grad"))
    for key, t in want.items():
        limits = {"atol": 2e-6 * (largest + 1), "rtol": 1e-3} if key.startswith("grad") else CLOSE
        torch.testing.assert_close(got[key], t, msg=lambda m, key=key: f"{key}: {m}", **limits)
    with torch.no_grad():
        fast = packed(**call)
        for key in ("logits", "start_logits"):
            if fast.get(key) is not None:
                numbers = fast[key] if options.get("row_labels") else fast[key][real]
                torch.testing.assert_close(numbers, want[key], **CLOSE)


def language_head(family):
    return small.LANGUAGE_HEADS.get(family, "ForMaskedLM")


@pytest.mark.parametrize("side", ["right", "left", "none"])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_heads_by_token(family, side):
    ids, mask = small.inputs([9, 9] if side == "none" else LENGTHS, side=side)
    real = mask.bool()
    generator = torch.Generator().manual_seed(2)
    hidden = ~real | (torch.rand(real.shape, generator=generator) < 0.3)
    hidden[:, 1:] |= ~real[:, :-1]  # nobody predicts from padding
    for head, labels in ((language_head(family), small.VOCABULARY), (BY_TOKEN, 3)):
        model = small.build(family, head, num_labels=3, num_hidden_layers=2)
        call = {"input_ids": ids, "labels": torch.randint(0, labels, ids.shape).masked_fill(hidden, -100)}
        if side != "none":
            call["attention_mask"] = mask
        assert_same(model, call, real)
        call.pop("labels")
        assert_same(model, call, real)


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("family", small.FAMILIES)
def test_heads_by_row_with_every_kind_of_problem(family, labels):
    ids, mask = small.inputs(LENGTHS)
    targets = {
        "regression": torch.randn(4) if labels == 1 else torch.randn(4, labels),
        "single_label_classification": torch.tensor([0, 1, labels - 1, 0]),
        "multi_label_classification": torch.randint(0, 2, (4, labels)).float(),
    }
    for problem, target in targets.items():
        if labels == 1 and problem != "regression":
            continue
        model = small.build(family, BY_ROW, num_labels=labels, problem_type=problem, num_hidden_layers=1)
        assert_same(model, {"input_ids": ids, "attention_mask": mask, "labels": target}, None, row_labels=True)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_spans(family):
    model = small.build(family, SPANS, num_hidden_layers=2)
    ids, mask = small.inputs(LENGTHS)
    assert_same(model, {"input_ids": ids, "attention_mask": mask}, mask.bool())
    places = {"start_positions": torch.tensor([3, 1]), "end_positions": torch.tensor([8, 8])}
    assert_same(model, {"input_ids": ids[:2], **places}, torch.ones(2, 9, dtype=torch.bool))


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_token_types_and_tuples(family):
    ids, mask = small.inputs(LENGTHS)
    types = torch.randint(0, 2, ids.shape, generator=torch.Generator().manual_seed(0))
    model = small.build(family, language_head(family), num_hidden_layers=2)
    model.resize_token_embeddings(small.VOCABULARY)
    if family == "Roberta":
        types = torch.zeros_like(types)  # it has one row of them
    call = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    assert_same(model, call, mask.bool())
    with torch.no_grad():
        want, got = (m(**call, output_hidden_states=True, return_dict=False) for m in (model, pack(model)))
    assert len(want) == len(got) == 2
    torch.testing.assert_close(got[0][mask.bool()], want[0][mask.bool()], **CLOSE)
    for a, b in zip(want[1], got[1], strict=True):
        torch.testing.assert_close(b[mask.bool()], a[mask.bool()], **CLOSE)


# ---- what reads padding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", small.CAUSAL)
def test_classifiers_of_decoders_never_read_padding(family):
    """They read the last token that is not the padding token, whatever the mask says."""
    model = small.build(family, BY_ROW)
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS)
    with torch.no_grad():
        for side in ("right", "left"):
            padded, shown = small.inputs(LENGTHS, side=side)
            want, got = (m(padded, attention_mask=shown).logits for m in (model, packed))
            torch.testing.assert_close(got, want, **CLOSE)
        other = ids.masked_fill(mask == 0, 7)  # padding that is not called so
        with pytest.raises(ValueError, match=r"reads column 8 of row 0, which is padding there"):
            packed(other, attention_mask=mask)
        vectors = model.get_input_embeddings()(ids)
        with pytest.raises(ValueError, match=r"reads column 8 of row 0"):
            packed(inputs_embeds=vectors, attention_mask=mask)
        want, got = (m(inputs_embeds=vectors[2:3]).logits for m in (model, packed))
        torch.testing.assert_close(got, want, **CLOSE)
        with pytest.raises(ValueError, match=r"reads column 0 of row 1"):
            packed(*small.inputs([4, 0])[:1], attention_mask=small.inputs([4, 0])[1])


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "ModernBert"])
def test_a_row_without_tokens_has_no_class(family):
    packed = pack(small.build(family, BY_ROW))
    ids, mask = small.inputs([4, 0])
    with torch.no_grad(), pytest.raises(ValueError, match=r"reads column 0 of row 1, which is padding there"):
        packed(ids, attention_mask=mask)
    base = pack(small.build(family))
    with torch.no_grad():
        output = base(ids, attention_mask=mask)
        alone = base(ids[:1])
    assert torch.equal(output.last_hidden_state[:1], alone.last_hidden_state)
    assert not output.last_hidden_state[1].any()
    if output.get("pooler_output") is not None:
        torch.testing.assert_close(output.pooler_output[:1], alone.pooler_output, **CLOSE)
        assert not output.pooler_output[1].any()


def test_a_mean_of_states_reads_no_padding():
    model = small.build("ModernBert", BY_ROW, classifier_pooling="mean")
    ids, mask = small.inputs(LENGTHS, side="left")
    assert_same(model, {"input_ids": ids, "attention_mask": mask}, None, row_labels=True)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "GPT2"])
def test_rows_of_tables_that_are_padding_get_no_gradient(family):
    """RoBERTa's padding tokens have a position of their own, which is not trained."""
    ids, _ = small.inputs(LENGTHS)
    ids[0, 2] = small.PAD
    model = small.build(family, num_hidden_layers=2)
    packed = pack(model)
    grads = []
    for each in (model, packed):
        model.zero_grad()
        each(ids).last_hidden_state.square().sum().backward()  # no mask: padding tokens are computed
        grads.append({n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-4 * float(grad.abs().max() + 1), rtol=1e-3)
    if family == "Roberta":
        assert not grads[1]["embeddings.position_embeddings.weight"][small.PAD].any()


def test_logits_to_keep_and_labels():
    model = small.build("Llama", "ForCausalLM")
    packed = pack(model)
    ids, mask = small.inputs(LENGTHS, side="left")
    with torch.no_grad():
        for keep in (1, 3, torch.tensor([8, 7])):
            want, got = (m(ids, attention_mask=mask, logits_to_keep=keep).logits for m in (model, packed))
            shown = mask[:, -keep:] if isinstance(keep, int) else mask[:, keep]
            torch.testing.assert_close(got[shown.bool()], want[shown.bool()], **CLOSE)
        right, shown = small.inputs(LENGTHS)
        for keep in (1, 2):
            with pytest.raises(ValueError, match="keeps the last column, which is padding"):
                packed(right, attention_mask=shown, logits_to_keep=keep)
        with pytest.raises(ValueError, match="would be predicted from padding"):
            packed(ids, attention_mask=mask, logits_to_keep=9, labels=ids.masked_fill(mask == 0, -100))


@pytest.mark.parametrize("states", [1, [0, 2], -1])
def test_single_hidden_states_are_refused(states):
    ids, mask = small.inputs(LENGTHS)
    with pytest.raises(ValueError, match=r"output_hidden_states = .*: single states cannot be asked for"):
        pack(small.build("Bert"))(ids, attention_mask=mask, output_hidden_states=states)


def test_a_packed_batch_has_no_mask():
    ids, mask = small.inputs(LENGTHS)
    packed, batch = pack(small.build("Llama")), PackedBatch.from_padded(ids, mask)
    for name, value in {"attention_mask": mask, "cu_seq_lens_q": batch.cu_seqlens, "seq_idx": ids}.items():
        with pytest.raises(ValueError, match=f"a PackedBatch needs no {name}"):
            packed(batch, **{name: value})
