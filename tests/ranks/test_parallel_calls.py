"""Calls of parallel models as other people's programs make them: what one process computes, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.errors import Unsupported

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip


def pair(name: str, head: str, **options: Any) -> tuple[Any, Any]:
    """The same model alone and on all ranks."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    alone = getattr(transformers, f"{name}{head}")(config).eval()
    for p in alone.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.2)
    world = torch.distributed.get_world_size()
    return alone, weft.parallelize(copy.deepcopy(alone), init_device_mesh("cpu", (world,)))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def flattened() -> None:
    """Rows that hold several texts, however that is said, in training and in inference."""
    ids = torch.randint(3, 50, (1, 24), generator=torch.Generator().manual_seed(1))
    lengths = [9, 1, 14]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    offsets = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 14, "max_length_k": 14}
    numbers = {"seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]}
    labels = ids.clone()
    labels[positions == 0] = -100
    jump = positions.clone()
    jump[:, 9:] += 20  # they need not restart at 0
    for name, head in (("Llama", "ForCausalLM"), ("GPT2", "LMHeadModel")):
        alone, shared = pair(name, head)
        for said in ({"position_ids": positions}, {"position_ids": jump}, {"position_ids": positions, **offsets}):
            said = {"input_ids": ids, **said}
            want = alone(**said, labels=labels, use_cache=False)
            close(shared(**said, labels=labels).loss, want.loss)
            close(shared(**said).logits, want.logits)
            with torch.no_grad():
                close(shared(**said).logits, want.logits)
                close(shared(**said, logits_to_keep=torch.tensor([3, 23])).logits, want.logits[:, [3, 23]])
        want = alone(input_ids=ids, position_ids=positions, use_cache=False).logits
        with torch.no_grad():
            close(shared(input_ids=ids, position_ids=positions, **numbers).logits, want)
            with pytest.raises(ValueError, match="rows hold several"):
                shared(input_ids=ids, position_ids=positions, use_cache=True)
        other = cu.clone()
        other[1] = 8
        with pytest.raises(ValueError, match="different things"):
            shared(input_ids=ids, **{**offsets, "cu_seq_lens_q": other, "cu_seq_lens_k": other}, **numbers)
    alone, shared = pair("Bert", "ForMaskedLM")
    texts = [t[None] for t in ids[0].split(lengths)]
    want = torch.cat([alone(input_ids=t).logits for t in texts], 1)
    close(shared(input_ids=ids, position_ids=positions, **offsets).logits, want)


def caches() -> None:
    """A call that goes on must see of the past what was there."""
    alone, shared = pair("Llama", "ForCausalLM")
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(2))
    new, mask = torch.tensor([[7], [8]]), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    with torch.no_grad():

        def step(model: Any, shown: torch.Tensor | None) -> torch.Tensor:
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            return model(new, attention_mask=shown, past_key_values=cache).logits  # type: ignore[no-any-return]

        close(step(shared, longer), step(alone, longer))
        less = longer.clone()
        less[0, 2] = 0
        for wrong in (None, torch.ones_like(longer), less):
            with pytest.raises(ValueError, match="shows other tokens of the 6 columns in the cache"):
                step(shared, wrong)
        close(step(shared, longer), step(alone, longer))


def buffers_and_labels() -> None:
    alone, shared = pair("Bert", "ForMaskedLM")
    ids, mask = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(3)), torch.ones(2, 6)
    for model in (alone, shared):
        model.bert.embeddings.position_ids = torch.nn.Buffer(torch.arange(64).flip(0)[None], persistent=False)
        model.bert.embeddings.token_type_ids = torch.nn.Buffer(torch.arange(64)[None] % 2, persistent=False)
    with torch.no_grad():
        close(shared(ids, attention_mask=mask).logits, alone(ids, attention_mask=mask).logits)
    _, decoder = pair("Llama", "ForCausalLM")
    with pytest.raises(ValueError, match="labels must have shape"):
        decoder(input_ids=ids, labels=ids.reshape(-1))


def losses() -> None:
    """Of models whose class has a loss of its own, which does not count items, and of those with a `loss_function`."""
    ids = torch.randint(2, 50, (3, 9))
    for name, head in (("Bert", "ForMaskedLM"), ("Llama", "ForCausalLM")):
        plain, model = pair(name, head)
        for items in (None, torch.tensor(40)):
            given = {} if items is None else {"num_items_in_batch": items}
            close(model(ids, labels=ids, **given).loss, plain(ids, labels=ids, **given).loss)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(Unsupported, match="the loss_function of LlamaForCausalLM is <lambda>, expected transformers'"):
        model(ids, labels=ids)
    model(ids)  # without a loss nobody asks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("calls", [flattened, caches, buffers_and_labels, losses])
def test_calls(calls: Any, ranks: int) -> None:
    run_ranks(calls, ranks, timeout=120.0)
