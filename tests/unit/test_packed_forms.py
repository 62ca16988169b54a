"""Texts in every form that a call may bring them in: each is computed as if it were alone, to the bit, and comes back
in the form that came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

import weft  # noqa: E402
from weft.packed import PackedBatch  # noqa: E402

LENGTHS = [7, 1, 4, 1, 1]
TOKENS = sum(LENGTHS)
FIRST = {"Roberta": small.PAD + 1}
Form = tuple[dict[str, Any], Callable[[Any], Tensor]]


def some_texts(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, small.VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def padded(parts: list[Tensor], fill: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    side = "left" if left else "right"
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill, padding_side=side)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(p)) for p in parts], batch_first=True, padding_side=side)
    return rows, real.long()


def row_of(parts: list[Tensor], first: int = 0) -> dict[str, Any]:
    """All of them in one row, as the collator of transformers makes it."""
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True, position_ids_start=first
    )
    row = dict(collate([{"input_ids": p.tolist()} for p in parts]))
    row.pop("labels")
    return row


OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
MARKS = {
    "positions": ("position_ids",),
    "offsets": OFFSETS,
    "numbers": ("seq_idx",),
    "all": ("position_ids", *OFFSETS, "seq_idx"),
}


def form(name: str, family: str, texts: list[Tensor], labels: list[Tensor] | None = None) -> Form:
    """The arguments of a call, and how its outputs become [T, ...]."""
    if name == "padded":
        ids, mask = padded(texts, small.PAD)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if labels is not None:
            arguments["labels"] = padded(labels, -100)[0]
        return arguments, lambda out: out[mask.bool()]
    if name == "nested":
        arguments = {"input_ids": nested(texts)}
        if labels is not None:
            arguments["labels"] = nested(labels)

        def flat(out: Tensor) -> Tensor:
            assert out.is_nested
            assert out.layout == torch.jagged
            assert [len(t) for t in out.unbind()] == LENGTHS
            return out.values()

        return arguments, flat
    if name == "packed":
        arguments = {"input_ids": PackedBatch.from_list(texts)}
        if labels is not None:
            arguments["labels"] = PackedBatch.from_list(labels)
        return arguments, lambda out: out
    row = row_of(texts, FIRST.get(family, 0))
    arguments = {key: row[key] for key in ("input_ids", *MARKS[name])}
    if labels is not None:
        arguments["labels"] = torch.cat(labels)[None]

    def only(out: Tensor) -> Tensor:
        assert out.shape[:2] == (1, TOKENS)
        return out[0]

    return arguments, only


FORMS = ["padded", "packed", "nested", *MARKS]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", small.FAMILIES)
def test_states(family: str, name: str) -> None:
    model = small.build(family)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    twin, texts = weft.pack(model), some_texts()
    arguments, flat = form(name, family, texts)
    with torch.no_grad():
        alone = [twin(t[None], output_hidden_states=True) for t in texts]
        got = twin(**arguments, output_hidden_states=True)
        assert torch.equal(flat(got.last_hidden_state), torch.cat([o.last_hidden_state[0] for o in alone]))
        for i, states in enumerate(got.hidden_states):
            assert torch.equal(flat(states), torch.cat([o.hidden_states[i][0] for o in alone]))
        want = torch.cat([model(t[None]).last_hidden_state[0] for t in texts])
        torch.testing.assert_close(flat(got.last_hidden_state), want, atol=1e-4, rtol=1e-4)
        first, *_ = twin(**arguments, return_dict=False)
        assert torch.equal(flat(first), flat(got.last_hidden_state))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", small.FAMILIES)
def test_embeddings(family: str, name: str) -> None:
    model = small.build(family)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    twin, texts, table = weft.pack(model), some_texts(), model.get_input_embeddings()
    arguments, flat = form(name, family, texts)
    ids = arguments.pop("input_ids")
    with torch.no_grad():
        if isinstance(ids, PackedBatch):
            arguments["inputs_embeds"] = ids.with_values(table(ids.values))
        else:
            arguments["inputs_embeds"] = nested([table(t) for t in texts]) if ids.is_nested else table(ids)
        want = torch.cat([twin(inputs_embeds=table(t)[None]).last_hidden_state[0] for t in texts])
        assert torch.equal(flat(twin(**arguments).last_hidden_state), want)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", small.FAMILIES)
@pytest.mark.parametrize("head", ["language", "ForTokenClassification"])
def test_losses_and_gradients(family: str, name: str, head: str) -> None:
    model = small.build(family, small.heads(family)[0] if head == "language" else head)
    twin, texts = weft.pack(model), some_texts()
    words = small.VOCABULARY if head == "language" else 2
    labels = [t % words for t in texts]
    if family in small.CAUSAL and head == "language":
        for each in labels:
            each[0] = -100
    count = sum(int((each != -100).sum()) for each in labels)
    options = {"use_cache": False} if family in small.CAUSAL else {}
    want = torch.zeros(())
    for text, own in zip(texts, labels, strict=True):
        if bool((own != -100).any()):
            want = want + model(text[None], labels=own[None], **options).loss * (own != -100).sum() / count
    model.zero_grad()
    want.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    arguments, flat = form(name, family, texts, labels)
    model.zero_grad()
    got = twin(**arguments)
    got.loss.backward()
    torch.testing.assert_close(got.loss.detach(), want.detach(), atol=1e-5, rtol=1e-4)
    assert flat(got.logits).shape == (TOKENS, words)
    for key, p in model.named_parameters():
        if key in gradients:
            torch.testing.assert_close(
                p.grad, gradients[key], atol=2e-5, rtol=1e-3, msg=lambda m, key=key: f"{key} {m}"
            )


@pytest.mark.parametrize("family", small.FAMILIES)
@pytest.mark.parametrize("name", ["packed", "nested"])
def test_a_class_for_each_text(family: str, name: str) -> None:
    model = small.build(family, "ForSequenceClassification")
    twin, texts = weft.pack(model), some_texts()
    labels = torch.tensor([0, 1, 1, 0, 1])
    arguments, _ = form(name, family, texts)
    with torch.no_grad():
        want = torch.cat([model(t[None]).logits for t in texts])
        got = twin(**arguments, labels=labels)
    torch.testing.assert_close(got.logits, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.loss, torch.nn.functional.cross_entropy(want, labels), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="rows hold several"):
        twin(**form("all", family, texts)[0], labels=labels[:1])


def test_nested_outputs_fit_nested_inputs() -> None:
    twin = weft.pack(small.build("Llama"))
    ids = nested(some_texts())
    ids_of_holes = torch.nested.narrow(padded(some_texts(), 3)[0], 1, torch.zeros(5).long(), torch.tensor(LENGTHS),
                                       layout=torch.jagged)  # fmt: skip
    strided = torch.nested.nested_tensor(some_texts())
    with torch.no_grad():
        states = twin(ids).last_hidden_state
        assert (states * ids.unsqueeze(-1)).shape[0] == 5  # torch knows that they fit
        for other in (ids_of_holes, strided):
            again = twin(other).last_hidden_state
            assert again.is_nested
            for a, b in zip(again.unbind(), states.unbind(), strict=True):
                assert torch.equal(a, b)
    twin.train()
    twin(ids).last_hidden_state.values().sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


def test_what_does_not_fit_is_named() -> None:
    twin, texts = weft.pack(small.build("Llama", "ForCausalLM")), some_texts()
    ids, others = nested(texts), nested([texts[0][:5], *texts[1:]])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids, "labels": others}, r"labels and input_ids .* lengths \[5, 1, 4, 1, 1\] and \[7, 1, 4"),
        ({"input_ids": padded(texts, 1)[0], "labels": ids}, r"labels came as a nested tensor, and input_ids as a tens"),
        (
            {"input_ids": ids, "attention_mask": padded(texts, 1)[1]},
            "needs no attention_mask, nor does a nested tensor",
        ),
        ({"input_ids": ids, "seq_idx": torch.zeros(1, TOKENS)}, "needs no seq_idx"),
        ({"input_ids": ids, "inputs_embeds": ids}, "got both input_ids and inputs_embeds"),
        ({"input_ids": ids, "position_ids": torch.zeros(TOKENS, dtype=torch.int64)}, "restart inside of a text"),
        ({"input_ids": ids, "use_cache": True}, "use_cache: a cache is padded"),
    ]
    for arguments, message in wrong:
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            twin(**arguments)


# ---- attn_implementation="weft" --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["padded", *MARKS])
@pytest.mark.parametrize(
    ("family", "cache"), [*((f, False) for f in small.FAMILIES), *((f, True) for f in small.CAUSAL)]
)
def test_the_registry(family: str, cache: bool, name: str) -> None:
    weft.register_attention()
    model = small.build(family)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    model.set_attn_implementation("weft")
    texts = some_texts()
    arguments, flat = form(name, family, texts)
    if name in ("offsets", "numbers"):  # the model itself numbers positions, along the row
        arguments["position_ids"] = row_of(texts, FIRST.get(family, 0))["position_ids"]
    options = {"use_cache": cache} if family in small.CAUSAL else {}
    with torch.no_grad():
        want = torch.cat([model(t[None]).last_hidden_state[0] for t in texts])
        got = model(**arguments, **options).last_hidden_state
        torch.testing.assert_close(flat(got), want, atol=1e-4, rtol=1e-4)
        if name == "all":
            for given, message in (
                ({"attention_mask": torch.ones(1, TOKENS)}, "by its attention_mask it is one"),
                ({"cu_seq_lens_q": torch.tensor([0, 9, 14]), "cu_seq_lens_k": torch.tensor([0, 9, 14])}, "different"),
                ({"max_length_q": 6}, "max_length_q is 6, but a text has 7 tokens|seq_idx"),
            ):
                keep = () if "attention_mask" in given else MARKS["all"]
                said = {k: v for k, v in arguments.items() if k in ("input_ids", "position_ids", *keep)}
                with pytest.raises(ValueError, match=message):
                    model(**{**said, **given}, **options)


@pytest.mark.parametrize("family", small.CAUSAL)
def test_the_registry_takes_one_row_with_padding_before_it(family: str) -> None:
    """Whose positions fall, as `generate` counts them, where the padding ends: it is one text all the same."""
    weft.register_attention()
    model = small.build(family)
    ids, mask = padded([torch.arange(9), torch.arange(5, 9)], small.PAD, left=True)
    ids, mask = ids[1:], mask[1:]
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        for positions in (None, counted, counted.clamp(min=0)):
            answers = []
            for name in ("eager", "weft"):
                model.set_attn_implementation(name)
                states = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
                answers.append(states[mask.bool()])
            torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


def test_there_and_back() -> None:
    batch = PackedBatch.from_list(some_texts())
    row = batch.to_flattened()
    ids = row.pop("input_ids")
    assert torch.equal(PackedBatch.from_flattened(ids, **row).cu_seqlens, batch.cu_seqlens)
    for key in ("position_ids", "cu_seq_lens_q"):
        said = {key: row[key]} if key == "position_ids" else {key: row[key], "cu_seq_lens_k": row[key]}
        again = PackedBatch.from_flattened(ids, **said)
        assert torch.equal(again.values, batch.values)
        assert torch.equal(again.cu_seqlens, batch.cu_seqlens)
        assert not again.is_flattened
    assert [t.tolist() for t in batch] == [t.tolist() for t in some_texts()]
    two = PackedBatch.from_flattened(torch.arange(6).view(2, 3), position_ids=torch.tensor([[0, 0, 1], [0, 1, 2]]))
    assert two.lengths.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="position_ids and cu_seq_lens_q say different things"):
        PackedBatch.from_flattened(ids, **{**row, "position_ids": torch.arange(TOKENS)[None]})
    with pytest.raises(ValueError, match=r"\[rows, tokens, ...\], got \[14\]"):
        PackedBatch.from_flattened(ids[0])
