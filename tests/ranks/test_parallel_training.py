"""Parallel models against the unsharded ones: outputs, losses and all gradients."""

from __future__ import annotations

import pytest
import torch
from parallel_cases import PAD, WORDS, batch, both, build, check_gradients, checks, mesh, whole
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from weft.packed import PackedBatch
from weft.transformer import parts

MIXED = [19, 7, 30]


def compare(family: str, lengths: list[int], *, side: str = "right", **options) -> None:
    """Loss, logits, gradients, from padded inputs."""
    alone, shared = both(family, **options)
    ids, mask, labels = batch(lengths, side=side)
    want, got = (m(input_ids=ids, attention_mask=mask, labels=labels) for m in (alone, shared))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert isinstance(got.logits, DTensor)
    assert got.logits.placements == (Shard(2),)
    assert got.logits.shape == want.logits.shape
    real = mask.bool()
    torch.testing.assert_close(whole(got.logits)[real], want.logits[real], rtol=1e-4, atol=2e-4)
    want.loss.backward()
    got.loss.backward()
    check_gradients(alone, shared)


def llama(size: int) -> None:
    compare("Llama", MIXED, heads=2 * size, kv_heads=size)


def llama_uneven(size: int) -> None:
    compare("Llama", MIXED, heads=10, kv_heads=5)


def llama_biased_and_tied(size: int) -> None:
    compare("Llama", MIXED, heads=6, kv_heads=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)


def llama_with_a_padding_word(size: int) -> None:
    """Its row gets no gradient where it occurs as a token, but one as an output where embeddings are tied."""
    word = int(batch(MIXED)[0][0, 0])
    compare("Llama", MIXED, pad_token_id=word)
    compare("Llama", MIXED, pad_token_id=word, tie_word_embeddings=True)


def bert_with_padding_rows(size: int) -> None:
    """Every table may have a row that gets no gradient, as RoBERTa's positions have."""
    alone, shared = build("Bert"), build("Bert")
    for model in (alone, shared):
        model.bert.embeddings.position_embeddings.padding_idx = 2
        model.bert.embeddings.token_type_embeddings.padding_idx = 0
    shared = weft.parallelize(shared, mesh())
    ids, mask, labels = batch(MIXED)
    for model in (alone, shared):
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    check_gradients(alone, shared)
    assert not whole(shared.bert.embeddings.position_embeddings.weight.grad)[2].any()


def llama_of_few_tokens(size: int) -> None:
    compare("Llama", [3, 1, 2], heads=10, kv_heads=5, attention_bias=True)


def ranks_without_rows(size: int) -> None:
    """4 tokens on 3 ranks are 2, 2 and 0 rows, where few tokens are split too."""
    before, parts.FEWEST_ROWS = parts.FEWEST_ROWS, 1
    try:
        compare("Llama", [3, 1], heads=10, kv_heads=5)
        compare("GPT2", [3, 1], heads=5)
        compare("Bert", [3, 1], heads=5)
    finally:
        parts.FEWEST_ROWS = before


def gpt2(size: int) -> None:
    compare("GPT2", MIXED, heads=4)
    compare("GPT2", [2, 3], heads=3)


def bert(size: int) -> None:
    compare("Bert", MIXED, heads=4)
    compare("Bert", [2, 3], heads=3)


def other_encoders(size: int) -> None:
    """Heads of their own for words, gate and up in one weight, windows, positions that count from another number."""
    for family in ("Roberta", "DistilBert", "ModernBert"):
        compare(family, MIXED, heads=4)
        compare(family, [2, 3], heads=3)
        compare(family, [14, 0, 22], side="left")  # and a row without tokens
    compare("ModernBert", MIXED, heads=5, attention_bias=True, mlp_bias=True, norm_bias=True, intermediate_size=37)
    compare("ModernBert", MIXED, decoder_bias=False, classifier_bias=True, classifier_activation="silu")
    compare("DistilBert", MIXED, activation="relu", sinusoidal_pos_embds=True)
    compare("Roberta", MIXED, hidden_act="relu", tie_word_embeddings=False)


def bfloat16(size: int) -> None:
    """As near to float32 as the unsharded model in bfloat16 is."""
    ids, mask, labels = batch(MIXED)
    precise = build("Llama")
    rough, shared = build("Llama").bfloat16(), weft.parallelize(build("Llama").bfloat16(), mesh())
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (precise, rough, shared)]
    for loss in losses:
        loss.backward()
    assert abs(losses[2] - losses[0]) < 0.05
    for name, p in precise.named_parameters():
        errors = [float((whole(m.get_parameter(name).grad) - p.grad).norm() / p.grad.norm()) for m in (rough, shared)]
        assert errors[1] < 1.5 * errors[0] + 0.01, name


def heads_of_every_kind(size: int) -> None:
    """Small heads are computed by every rank, with their own code; base models give whole states."""
    ids, mask, _ = batch(MIXED)
    torch.manual_seed(3)
    cases = [
        ("Bert", "Model", "pooler_output", None),
        ("Bert", "ForTokenClassification", "logits", torch.randint(0, 2, ids.shape).masked_fill(mask == 0, -100)),
        ("Bert", "ForSequenceClassification", "logits", torch.tensor([0, 1, 1])),
        ("GPT2", "Model", "last_hidden_state", None),
        ("GPT2", "ForSequenceClassification", "logits", torch.tensor([0, 1, 1])),
        ("Llama", "Model", "last_hidden_state", None),
        ("Llama", "ForTokenClassification", "logits", torch.randint(0, 2, ids.shape).masked_fill(mask == 0, -100)),
    ]
    for family in ("Roberta", "DistilBert", "ModernBert"):
        cases += [
            (family, "Model", "last_hidden_state", None),
            (family, "ForTokenClassification", "logits", torch.randint(0, 2, ids.shape).masked_fill(mask == 0, -100)),
            (family, "ForSequenceClassification", "logits", torch.tensor([0, 1, 1])),
            (family, "ForQuestionAnswering", "start_logits", None),
        ]
    for family, head, field, labels in cases:
        more = {"pad_token_id": PAD, "classifier_dropout": 0.0} if head != "Model" else {}
        if family == "ModernBert" and head == "ForSequenceClassification":
            more["classifier_pooling"] = "mean"
        alone, shared = both(family, head, **more)
        inputs = {"input_ids": ids, "attention_mask": mask} | ({} if labels is None else {"labels": labels})
        want, got = alone(**inputs), shared(**inputs)
        keep = mask.bool() if got[field].shape[:2] == mask.shape else slice(None)
        torch.testing.assert_close(got[field][keep], want[field][keep], rtol=1e-4, atol=2e-4)
        for out in (want, got):
            (out[field][keep].square().mean() if labels is None else out.loss).backward()
        if family == "Bert" and head == "Model":  # its head is not fed to the loss in one of the two
            assert isinstance(shared.pooler.dense.weight.grad, DTensor)
        check_gradients(alone, shared)


def packed_and_padded(size: int) -> None:
    """A PackedBatch gives the same bits as its padded form, on the right or on the left."""
    shared = both("Llama")[1]
    results = []
    for side in ("right", "left"):
        ids, mask, labels = batch(MIXED, side=side)
        real = mask.bool()
        tokens = PackedBatch.from_padded(ids, mask)
        positions = torch.arange(ids.shape[1]).expand_as(ids)[real]
        packed = shared(input_ids=tokens, labels=labels[real], position_ids=positions)
        packed.loss.backward()
        grads = [whole(p.grad).clone() for p in shared.parameters()]
        shared.zero_grad()
        padded = shared(input_ids=ids, attention_mask=mask, labels=labels)
        padded.loss.backward()
        assert torch.equal(packed.loss, padded.loss)
        assert packed.logits.shape == (sum(MIXED), WORDS)
        assert torch.equal(whole(packed.logits), whole(padded.logits)[real])
        assert all(torch.equal(whole(p.grad), g) for p, g in zip(shared.parameters(), grads, strict=True))
        shared.zero_grad()
        results.append(packed.loss)
    assert not torch.equal(*results)


def whole_logits(size: int) -> None:
    """Without labels every rank gets all logits, of the tokens that it asks for, and can go back through them."""
    alone, shared = both("Llama")
    ids, mask, _ = batch(MIXED, side="left")
    real = mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for keep in (0, 1, 3, torch.tensor([29, 27])):
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": keep}
        want, got = alone(**inputs).logits, shared(**inputs).logits
        assert not isinstance(got, DTensor)
        kept = real[:, -keep:] if isinstance(keep, int) else real[:, keep]
        torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=2e-4)
        for model, logits in ((alone, want), (shared, got)):
            model.zero_grad()
            logits[kept].square().mean().backward()
        check_gradients(alone, shared)
    packed = shared(input_ids=PackedBatch.from_padded(ids, mask), logits_to_keep=1).logits
    assert packed.shape == (3, WORDS)


def hidden_states_and_vectors(size: int) -> None:
    """What a caller can ask for and give besides: all hidden states, vectors for ids with their gradient."""
    alone, shared = both("Llama")
    ids, mask, _ = batch(MIXED)
    vectors = [alone.get_input_embeddings()(ids).detach().requires_grad_() for _ in range(2)]
    want, got = (
        m(inputs_embeds=v, attention_mask=mask, output_hidden_states=True)
        for m, v in zip((alone, shared), vectors, strict=True)
    )
    real = mask.bool()
    assert len(got.hidden_states) == len(want.hidden_states) == 3
    for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
        torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=2e-4)
    for out in (want, got):
        (out.logits[real].square().mean() + out.hidden_states[1][real].square().mean()).backward()
    torch.testing.assert_close(vectors[1].grad[real], vectors[0].grad[real], rtol=2e-4, atol=2e-5)
    check_gradients(alone, shared)


def counted_labels(size: int) -> None:
    alone, shared = both("Llama")
    ids, mask, labels = batch(MIXED)
    for items in (None, 11, torch.tensor(7)):
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": items}
        torch.testing.assert_close(shared(**inputs).loss, alone(**inputs).loss, rtol=1e-5, atol=1e-6)
    none = shared(input_ids=ids, attention_mask=mask, labels=torch.full_like(ids, -100))
    assert none.loss.isnan()


def names_places_and_ties(size: int) -> None:
    """Parameters stay under their names; tied ones stay one; frozen ones stay frozen."""
    frozen = build("Llama", tie_word_embeddings=True)
    frozen.model.embed_tokens.weight.requires_grad_(False)
    names = list(frozen.state_dict())
    shared = weft.parallelize(frozen, mesh())
    assert shared is frozen
    assert type(shared).__name__ == "LlamaForCausalLM"
    assert list(shared.state_dict()) == names
    assert shared.lm_head.weight is shared.model.embed_tokens.weight
    layer = shared.model.layers[0]
    assert layer.self_attn.q_proj.weight.placements == (Shard(0),)
    assert layer.self_attn.o_proj.weight.placements == (Shard(1),)
    assert layer.input_layernorm.weight.placements == (Replicate(),)
    ids, mask, labels = batch(MIXED)
    shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert shared.lm_head.weight.grad is None
    assert layer.self_attn.q_proj.weight.grad is not None


def accumulated_gradients(size: int) -> None:
    """Two backward passes add up, also where one of two forward passes is over before the other goes back."""
    alone, shared = both("GPT2", heads=5)
    for model in (alone, shared):
        first, second = (
            model(input_ids=ids, attention_mask=mask, labels=labels).loss
            for ids, mask, labels in (batch(MIXED), batch([9, 4, 30], seed=2))
        )
        second.backward()
        first.backward()
    check_gradients(alone, shared)


CASES = [
    llama, llama_uneven, llama_biased_and_tied, llama_with_a_padding_word, llama_of_few_tokens, ranks_without_rows,
    gpt2, bert, bert_with_padding_rows, other_encoders, bfloat16, heads_of_every_kind, packed_and_padded, whole_logits,
    hidden_states_and_vectors, counted_labels, names_places_and_ties, accumulated_gradients,
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_like_the_unsharded_model(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]


def test_one_rank() -> None:
    results = checks([llama, gpt2, whole_logits, heads_of_every_kind], 1)
    assert set(results.values()) == {None}, results
