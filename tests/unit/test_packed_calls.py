"""Calls as other people's programs make them: each gives what Hugging Face's own model gives, or is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import weft  # noqa: E402
from weft.kernels.freshness import Stamp  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip


def made(name: str, head: str = "Model", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(SIZES)
    if name == "DistilBert":
        sizes = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes, **options)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.2)
    return model


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9)[None] < torch.tensor([9, 4, 6])[:, None]).long()
    return ids.masked_fill(mask == 0, 1), mask


@pytest.mark.parametrize("when", ["before", "after", "in place"])
@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("Bert", "position_ids"),
        ("DistilBert", "position_ids"),
        ("Bert", "token_type_ids"),
        ("Roberta", "token_type_ids"),
    ],
)
@torch.no_grad()
def test_buffers_of_the_embeddings_are_read(name: str, buffer: str, when: str) -> None:
    model = made(name)
    ids, mask = padded()
    now = model.embeddings.get_buffer(buffer)
    other = now.flip(1).clone() if buffer == "position_ids" else torch.arange(now.shape[1])[None] % 2
    plain = model(ids, attention_mask=mask).last_hidden_state
    if when == "before":
        setattr(model.embeddings, buffer, torch.nn.Buffer(other, persistent=False))
    packed = weft.pack(model)
    if when == "after":
        setattr(model.embeddings, buffer, torch.nn.Buffer(other, persistent=False))
    elif when == "in place":
        setattr(model.embeddings, buffer, torch.nn.Buffer(now.clone(), persistent=False))
        packed(ids, attention_mask=mask)
        model.embeddings.get_buffer(buffer).copy_(other)
    want, got = (m(ids, attention_mask=mask).last_hidden_state[mask.bool()] for m in (model, packed))
    assert not torch.allclose(want, plain[mask.bool()], atol=1e-2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_labels_have_the_shape_of_the_ids(name: str) -> None:
    model = made(name, "ForCausalLM" if name == "Llama" else "LMHeadModel")
    ids = torch.randint(3, 50, (2, 4))
    with pytest.raises(ValueError, match=r"labels must have shape \[2, 4\] like input_ids, got \[8\]"):
        weft.pack(model)(input_ids=ids, labels=ids.reshape(-1))
    batch = weft.PackedBatch.from_padded(ids)
    got = weft.pack(model)(input_ids=batch, labels=batch.values).loss
    torch.testing.assert_close(got, model(input_ids=ids, labels=ids).loss)


@torch.no_grad()
def test_a_cache_never_shows_padding() -> None:
    model = made("Llama", "ForCausalLM")
    packed, (ids, mask) = weft.pack(model), padded()
    new = torch.tensor([[5], [6], [7]])

    def fresh() -> Any:
        return packed(ids, attention_mask=mask, use_cache=True).past_key_values

    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    positions = mask.sum(1, keepdim=True)
    want = model(
        new, attention_mask=longer, position_ids=positions,
        past_key_values=model(ids, attention_mask=mask, use_cache=True).past_key_values,
    ).logits  # fmt: skip
    got = packed(new, attention_mask=longer, position_ids=positions, past_key_values=fresh()).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    shown = longer.clone()
    shown[1, 5] = 1
    for wrong in (None, torch.ones_like(longer), shown):
        with pytest.raises(ValueError, match="the cache holds padding"):
            packed(new, attention_mask=wrong, past_key_values=fresh())
    hidden = longer.clone()
    hidden[0, 2] = 0  # less than before may be seen
    want, got = (
        m(
            new, attention_mask=hidden, past_key_values=m(ids, attention_mask=mask, use_cache=True).past_key_values
        ).logits
        for m in (model, packed)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradients", [False, True])
def test_far_positions_cost_no_memory(gradients: bool) -> None:
    model = made("Llama")
    ids, positions = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[0, 1, 7, 3 * 10**8]])
    with torch.set_grad_enabled(gradients):
        want, got = (
            m(ids, attention_mask=torch.ones(1, 4).long(), position_ids=positions).last_hidden_state
            for m in (model, weft.pack(model))
        )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_weights_of_inference_mode_are_compared_in_full() -> None:
    with torch.inference_mode():
        model = made("Llama", "ForCausalLM")
        packed, (ids, mask) = weft.pack(model), padded()
        packed(ids, attention_mask=mask)
        for row in range(32):
            model.model.layers[0].mlp.down_proj.weight[row, row].add_(1.0)
            want, got = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, packed))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        weight = torch.randn(1000, 33)
        stamp = Stamp.of([weight])
        for at in (0, 16_001, 32_999):
            assert stamp.holds([weight])
            weight.view(-1)[at] += 1.0
            assert not stamp.holds([weight])
            stamp = Stamp.of([weight])


def test_a_copy_has_its_own_buffers() -> None:
    model = made("Bert")
    packed, (ids, mask) = weft.pack(copy.deepcopy(model)), padded()
    model.embeddings.token_type_ids = torch.nn.Buffer(torch.ones(1, 64, dtype=torch.int64), persistent=False)
    with torch.no_grad():
        got = packed(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        want = model(ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids)).last_hidden_state[mask.bool()]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_layers_that_were_given_to_fsdp_are_named() -> None:
    """Whatever class FSDP2 made of a layer: the remedy is another call of fully_shard."""
    from torch.distributed.fsdp import FSDPModule

    model = made("Llama")
    kind = type(model.layers[0])
    model.layers[0].__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    with pytest.raises(ValueError, match=r"LlamaModel.layers.0 was given to fully_shard"):
        weft.pack(model)


def test_lists_of_numbers_of_any_kind() -> None:
    import numpy as np

    batch = weft.PackedBatch.from_list([list(np.arange(3)), [4, np.int32(5)]])
    assert batch.values.tolist() == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="expected a tensor"):
        weft.PackedBatch.from_list([[True, False]])
