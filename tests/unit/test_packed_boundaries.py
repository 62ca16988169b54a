"""Where texts end: whatever says so, nothing is computed across a boundary."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

from weft.packed import PackedBatch, pack, packed_attention  # noqa: E402

LENGTHS = [7, 1, 4]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def flattened(lengths=LENGTHS, seed=0):
    """Texts, and the same in one row as Hugging Face's collator flattens them."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, small.VOCABULARY, (n,), generator=generator) for n in lengths]
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    return texts, collate([{"input_ids": t.tolist()} for t in texts])


def only(row, *names):
    return {name: row[name] for name in ("input_ids", *names)}


def alone(model, texts):
    return torch.cat([model(t[None]).last_hidden_state[0] for t in texts])


@pytest.mark.parametrize("marks", [("position_ids",), ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")])
@pytest.mark.parametrize("family", small.CAUSAL)
def test_a_flattened_row_is_several_texts(family, marks):
    model = small.build(family)
    packed = pack(model)
    texts, row = flattened()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got = packed(**only(row, *marks), use_cache=False).last_hidden_state
            want = model(**only(row, "position_ids"), use_cache=False).last_hidden_state
            torch.testing.assert_close(got, want, **CLOSE)
            torch.testing.assert_close(got[0], alone(model, texts), **CLOSE)
    with torch.no_grad():
        assert packed(**only(row, "position_ids")).get("past_key_values") is None


@pytest.mark.parametrize("family", small.CAUSAL)
def test_several_rows_of_several_texts(family):
    model = small.build(family)
    ids = torch.randint(5, small.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], list(range(9))])
    with torch.no_grad():
        want = model(ids, position_ids=positions, use_cache=False).last_hidden_state
        got = pack(model)(ids, position_ids=positions).last_hidden_state
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("family", small.CAUSAL)
def test_losses_and_gradients_of_a_flattened_row(family):
    model = small.build(family, small.LANGUAGE_HEADS[family])
    _, row = flattened()
    results = []
    for each in (model, pack(model)):
        model.zero_grad()
        output = each(**only(row, "position_ids", "labels"), use_cache=False)
        output.loss.backward()
        results.append((output.loss.detach(), {n: p.grad.clone() for n, p in each.named_parameters()}))
    (want, grads), (got, mine) = results
    torch.testing.assert_close(got, want, **CLOSE)
    for name, grad in grads.items():
        torch.testing.assert_close(mine[name], grad, atol=1e-5 * float(grad.abs().max() + 1), rtol=1e-3)
    labels = row["labels"].clone()
    labels[0, 7] = 9  # the first token of the second text, which the first one would predict
    with pytest.raises(ValueError, match="after the end of another text, has a label"):
        pack(model)(**only(row, "position_ids"), labels=labels)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "ModernBert"])
def test_encoders_restart_at_their_own_first_position(family):
    model = small.build(family)
    if family in ("Bert", "Roberta"):
        model.pooler = None
    packed = pack(model)
    texts, row = flattened()
    with torch.no_grad():
        if family == "Roberta":
            with pytest.raises(
                ValueError, match=r"restart inside of a text: token 7 .* begins at position 2; .*_start"
            ):
                packed(**only(row, "position_ids"))
            row["position_ids"] += 2
        offsets = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        for marks in (("position_ids",), offsets, ("seq_idx",), tuple(row.keys() - {"input_ids", "labels"})):
            got = packed(**only(row, *marks)).last_hidden_state
            torch.testing.assert_close(got[0], alone(model, texts), **CLOSE)
            assert torch.equal(got[0], alone(packed, texts))
        elsewhere = row["position_ids"] + 3 * (row["seq_idx"] == 2)
        with pytest.raises(ValueError, match="position_ids restart inside of a text: token 8"):
            packed(row["input_ids"], position_ids=elsewhere)


def test_a_pooler_reads_one_text_a_row():
    _, row = flattened()
    with pytest.raises(ValueError, match="the pooler reads the first column, but rows hold several texts"):
        pack(small.build("Bert"))(**only(row, "position_ids", "seq_idx"))


def contradictions():
    _, row = flattened()
    cu = row["cu_seq_lens_q"]
    ids, mask = row["input_ids"], torch.ones_like(row["input_ids"])
    padded = mask.clone()
    padded[0, 5] = 0
    both = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    shift = torch.zeros_like(row["seq_idx"])
    return {
        "a mask and positions": ({"attention_mask": mask, "position_ids": row["position_ids"]}, "position_ids restart"),
        "a cache": ({"position_ids": row["position_ids"], "use_cache": True}, "rows hold several here"),
        "other keys": ({"cu_seq_lens_q": cu, "cu_seq_lens_k": cu[:-1]}, "must be the same tensor of offsets"),
        "no keys": ({"cu_seq_lens_q": cu}, "must be the same tensor of offsets"),
        "too far": ({"cu_seq_lens_q": cu + 5, "cu_seq_lens_k": cu + 5}, "must rise from 0 to the 12 tokens"),
        "falling": ({"cu_seq_lens_q": cu.flip(0), "cu_seq_lens_k": cu.flip(0)}, "must rise from 0"),
        "numbers and offsets": ({**both, "seq_idx": shift}, "say different things"),
        "numbers that fall": ({"seq_idx": row["seq_idx"].flip(1)}, "seq_idx must not fall"),
        "numbers of another shape": ({"seq_idx": row["seq_idx"][:, 1:]}, r"of shape \[1, 12\], got \[1, 11\]"),
        "padding": ({**both, "attention_mask": padded}, "do not go together"),
        "positions inside": (
            {**both, "position_ids": torch.zeros_like(ids)},
            "position_ids and cu_seq_lens_q say different .* position_ids restart inside of a text, at token 1 ",
        ),
        "positions that go on": (
            {**both, "position_ids": torch.arange(12)[None]},
            "position_ids and cu_seq_lens_q say different .* position_ids go on where a text begins, at token 7 with 7",
        ),
        "positions and numbers": (
            {"seq_idx": row["seq_idx"], "position_ids": torch.arange(12)[None]},
            "position_ids and seq_idx say different things",
        ),
        "too short": ({**both, "max_length_q": 6, "max_length_k": 7}, "max_length_q is 6, but a text has 7 tokens"),
        "too short keys": ({**both, "max_length_q": 7, "max_length_k": 6}, "max_length_k is 6, but a text has 7"),
        "too short a row": ({"max_length_k": 11}, "max_length_k is 11, but a text has 12 tokens"),
        "positions of another length": ({"position_ids": row["position_ids"][:, :5]}, r"shape \[1, 12\] like the"),
    }


@pytest.mark.parametrize("case", contradictions())
def test_contradictions_are_named(case):
    arguments, message = contradictions()[case]
    _, row = flattened()
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        pack(small.build("Llama"))(row["input_ids"], **arguments)


def test_positions_that_jump_ahead_are_one_text():
    model = small.build("Bert")
    ids, mask = small.inputs([6, 6])
    positions = torch.tensor([[0, 1, 5, 6, 20, 21]])
    with torch.no_grad():
        each = (model, pack(model))
        want, got = (m(ids, attention_mask=mask, position_ids=positions).last_hidden_state for m in each)
    torch.testing.assert_close(got, want, **CLOSE)


# ---- batches made by hand --------------------------------------------------------------------------------------------


def good():
    return PackedBatch.from_padded(torch.arange(12).view(3, 4), torch.tensor([[1, 1, 0, 0], [0] * 4, [1, 1, 1, 1]]))


def test_a_batch_made_by_hand_may_be_right():
    batch = good()
    again = PackedBatch(batch.values, batch.cu_seqlens, batch.positions, batch.padded_index, batch.padded_shape)
    assert torch.equal(again.to_padded(), batch.to_padded())
    row = PackedBatch.from_padded(torch.arange(5)[None], starts=torch.tensor([[0, 0, 1, 0, 0]]))
    assert row.is_flattened
    assert not batch.is_flattened
    replace(row, values=torch.randn(5, 2))
    empty = PackedBatch.from_padded(torch.zeros(0, 3))
    replace(empty, values=torch.zeros(0, 7))


BAD = {
    "int64": ({"cu_seqlens": lambda b: b.cu_seqlens.long()}, "flat contiguous int32 tensor"),
    "a list": ({"cu_seqlens": lambda b: [0, 2, 2, 6]}, "int32 tensor of sequences"),
    "too long": ({"cu_seqlens": lambda b: b.cu_seqlens + torch.tensor([0, 0, 0, 4]).int()}, "rise from 0 to the 6"),
    "not from 0": ({"cu_seqlens": lambda b: b.cu_seqlens.clone().index_fill_(0, torch.tensor([0]), 1)}, "rise from 0"),
    "falling": ({"cu_seqlens": lambda b: torch.tensor([0, 4, 2, 6]).int()}, "rise from 0"),
    "other texts": ({"cu_seqlens": lambda b: torch.tensor([0, 3, 3, 6]).int()}, "positions must count the tokens"),
    "empty": ({"cu_seqlens": lambda b: torch.zeros(0).int()}, "flat contiguous int32"),
    "no stride 1": ({"cu_seqlens": lambda b: torch.tensor([0, 9, 2, 9, 2, 9, 6]).int()[::2]}, "contiguous int32"),
    "fewer values": ({"values": lambda b: b.values[1:]}, "rise from 0 to the 5 tokens"),
    "no values": ({"values": lambda b: 3}, "values must be a tensor"),
    "positions": ({"positions": lambda b: b.positions + 1}, "positions must count"),
    "positions' type": ({"positions": lambda b: b.positions.int()}, r"positions must be int64 of shape \[6\]"),
    "places outside": ({"padded_index": lambda b: b.padded_index + 9}, "within the 3 x 4 places"),
    "places twice": ({"padded_index": lambda b: b.padded_index.clamp(max=9)}, "must rise from token to token"),
    "two rows": ({"padded_index": lambda b: torch.tensor([0, 4, 8, 9, 10, 11])}, "into two rows"),
    "another row": ({"padded_index": lambda b: torch.tensor([4, 5, 8, 9, 10, 11])}, "sequence s of the 3 into row s"),
    "shape": ({"padded_shape": lambda b: (3, -4)}, "padded_shape must be"),
    "device": ({"padded_index": lambda b: b.padded_index.to("meta")}, "on one device"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_batch_made_by_hand_is_checked(case):
    changes, message = BAD[case]
    batch = good()
    with pytest.raises(ValueError, match=message):
        replace(batch, **{name: change(batch) for name, change in changes.items()})


def test_offsets_written_to_later_do_not_reach_the_core():
    packed = pack(small.build("Llama"))
    ids, _ = small.inputs([5, 3])
    batch = PackedBatch.from_list([ids[0], ids[1, :3]])
    batch.cu_seqlens[1] = 1_000_000
    q = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match="must rise from 0 to the 8 tokens"):
        packed_attention(q, q, q, batch)
    with torch.no_grad(), pytest.raises(ValueError, match=r"must rise from 0 to the 8 tokens|out of range|positions"):
        packed(batch)


def test_lengths_are_whole_numbers():
    with pytest.raises(ValueError, match=r"whole numbers, got torch\.float32"):
        PackedBatch.from_values(torch.zeros(3), torch.tensor([1.5, 1.5]))


def test_a_default_device_changes_nothing():
    model = small.build("Llama")
    packed = pack(model)
    ids, mask = small.inputs([5, 3])
    with torch.no_grad():
        want = packed(ids, attention_mask=mask).last_hidden_state
        with torch.device("meta"):
            assert torch.equal(packed(ids, attention_mask=mask).last_hidden_state, want)
