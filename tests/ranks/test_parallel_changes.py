"""A parallel model that is changed between calls, or used as other models are: right, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import batch, both, build, checks, mesh
from torch import nn

import weft

LENGTHS = [5, 3, 9]


def pair(family: str = "Llama", head: str | None = None, **options: Any) -> tuple[Any, Any]:
    alone, shared = both(family, head, **options)
    return alone.eval(), shared.eval()


def same(alone: Any, shared: Any, *, field: str = "logits", tolerance: float = 2e-4) -> None:
    """Without gradients and with."""
    ids, mask, _ = batch(LENGTHS)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            want, got = (m(input_ids=ids, attention_mask=mask)[field] for m in (alone, shared))
        keep = mask.bool() if got.dim() == 3 else slice(None)
        torch.testing.assert_close(got[keep], want[keep], rtol=1e-4, atol=tolerance)


def refused(shared: Any, message: str) -> None:
    """Without gradients and with, and as text is generated."""
    ids, mask, labels = batch(LENGTHS)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        shared(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match=message):
        shared(input_ids=ids, attention_mask=mask, labels=labels)
    if type(shared).__name__.endswith(("CausalLM", "LMHeadModel")):
        with pytest.raises(ValueError, match=message):
            weft.generate(shared, [[1, 2]], max_new_tokens=1)


# What is given ----------------------------------------------------------------------------------------------


def vectors_of_another_type(size: int) -> None:
    """The core would take them for the model's own type, and read past their end."""
    for family, options in (("Llama", {}), ("GPT2", {}), ("Bert", {}), ("Llama", {"head": "Model"})):
        alone, shared = pair(family, **options)
        ids, mask, _ = batch(LENGTHS)
        given = alone.get_input_embeddings()(ids).detach()
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            message = f"inputs_embeds are {dtype}, the model computes in torch.float32"
            for gradients in (False, True):
                with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=message):
                    shared(inputs_embeds=given.to(dtype), attention_mask=mask)
        with torch.no_grad():
            want, got = (m(inputs_embeds=given, attention_mask=mask)[0] for m in (alone, shared))
            torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=2e-4)
    rough = weft.parallelize(build("Llama").bfloat16().eval(), mesh())
    with torch.no_grad(), pytest.raises(ValueError, match=r"the model computes in torch.bfloat16"):
        rough(inputs_embeds=torch.randn(1, 4, 72))


def different_vectors_and_positions(size: int) -> None:
    """What ranks are given besides ids is compared, too: a mixture of theirs would be nobody's."""
    if size == 1:
        return
    alone, shared = pair()
    ids, mask, labels = batch(LENGTHS)
    vectors = alone.model.embed_tokens(ids).detach() + 0.1 * dist.get_rank()
    shifted = torch.arange(ids.shape[1])[None] + dist.get_rank()
    for given in (
        {"inputs_embeds": vectors},
        {"input_ids": ids, "position_ids": shifted},
        {"input_ids": ids, "labels": labels, "num_items_in_batch": 3 + dist.get_rank()},
        {"input_ids": ids, "logits_to_keep": torch.tensor([dist.get_rank()])},
    ):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), pytest.raises(weft.PeerMismatch, match=r"rank 1: "):
                shared(attention_mask=mask, **given)
    same(alone, shared)


# What the model is made of ----------------------------------------------------------------------------------


def cut_and_moved_layers(size: int) -> None:
    alone, shared = pair("Llama", num_hidden_layers=4)
    same(alone, shared)

    def renumber() -> None:  # Hugging Face's own caches go by these
        for model in (alone, shared):
            model.config.num_hidden_layers = len(model.model.layers)
            for i, layer in enumerate(model.model.layers):
                layer.self_attn.layer_idx = i

    for model in (alone, shared):
        del model.model.layers[1]
    renumber()
    same(alone, shared)
    for model in (alone, shared):
        first, second = model.model.layers[0], model.model.layers[1]
        model.model.layers[0], model.model.layers[1] = second, first
    renumber()
    same(alone, shared)
    for model in (alone, shared):
        model.model.layers = model.model.layers[:2]
    renumber()
    same(alone, shared)
    wanted = alone.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert weft.generate(shared, [[5, 6]], max_new_tokens=4, eos=())[0] == wanted[0, 2:].tolist()
    del shared.model.layers[0], shared.model.layers[0]
    refused(shared, "the model has no layers")
    with pytest.raises(ValueError, match="the model has no layers"):
        weft.parallelize(build("Llama", num_hidden_layers=0), mesh())


class Adapter(nn.Module):
    """What adapters such as LoRA put around a linear."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x) + 1.0


def replaced_modules(size: int) -> None:
    alone, shared = pair()
    same(alone, shared)
    attention = shared.model.layers[1].self_attn
    mine = attention.q_proj
    attention.q_proj = Adapter(mine)
    refused(shared, "Adapter")
    attention.q_proj = nn.Linear(72, 72, bias=False)
    refused(shared, "a parameter is not a DTensor; it was replaced after parallelize")
    attention.q_proj = mine
    same(alone, shared)
    whole, shared.model = shared.model, build("Llama").model
    refused(shared, "LlamaForCausalLM.model is a LlamaModel that is not shared")
    shared.model = whole
    same(alone, shared)
    for model in (alone, shared):
        model.model.layers[0].input_layernorm.variance_epsilon = 0.3
        model.model.layers[1].self_attn.scaling = 0.1
    same(alone, shared)


def hooks(size: int) -> None:
    """They would never run. On the whole model they do; those that Hugging Face leaves on layers do nothing."""
    alone, shared = pair()
    same(alone, shared)
    layer, calls = shared.model.layers[0], []

    def hook(*args: Any) -> None:
        calls.append(1)

    for module, name in ((layer, "layers.0"), (layer.mlp.up_proj, "up_proj"), (shared.lm_head, "lm_head")):
        for register, kind in (
            (module.register_forward_hook, "forward hook"),
            (module.register_forward_pre_hook, "forward pre-hook"),
            (module.register_full_backward_hook, "backward hook"),
            (module.register_full_backward_pre_hook, "backward pre-hook"),
        ):
            handle = register(hook)
            refused(shared, f"{name}.*{kind}|{kind}.*{name}|{name} has a hook")
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(hook)
    refused(shared, "a hook for all modules")
    handle.remove()
    layer.forward = lambda x: x
    refused(shared, "layers.0 has")
    del layer.forward
    handle = shared.register_forward_hook(hook)
    calls.clear()
    same(alone, shared)
    assert len(calls) == 2
    handle.remove()
    untouched = build("Llama")
    untouched.model.layers[0].register_forward_hook(hook)
    with pytest.raises(ValueError, match=r"layers.0 has a"):
        weft.parallelize(untouched, mesh())
    recorded = build("Llama").eval()
    recorded(torch.tensor([[1, 2]]), output_hidden_states=True)  # Hugging Face leaves hooks of its own
    same(alone, weft.parallelize(recorded, mesh()))


def modes_of_parts(size: int) -> None:
    """Dropout acts where a module is in training mode, with the probability that it has now."""
    options = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.5)
    alone, shared = pair("GPT2", **options)
    ids, mask, labels = batch(LENGTHS)
    for model in (alone, shared):
        model.train()
        model.transformer.eval()
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    torch.testing.assert_close(shared(**given).loss, alone(**given).loss)
    with torch.no_grad():
        torch.testing.assert_close(shared(**given).loss, alone(**given).loss)
    for model in (alone, shared):  # dropout of what it adds to attention only, also where the rest is in eval mode
        model.eval()
        model.transformer.h[0].attn.resid_dropout.train()
    losses = {shared(**given).loss.item() for _ in range(4)}
    assert len(losses) == 4
    assert all(abs(loss - alone.eval()(**given).loss.item()) < 2.0 for loss in losses)
    with torch.no_grad():
        assert not torch.equal(shared(ids, attention_mask=mask).logits, shared(ids, attention_mask=mask).logits)
    for model in (alone, shared):
        model.eval()
    same(alone, shared)
    shared.train()
    assert len({shared(**given).loss.item() for _ in range(4)}) == 4
    for module in shared.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(shared(**given).loss, alone(**given).loss)


# Weights ----------------------------------------------------------------------------------------------------


def one_rank_alone(size: int) -> None:
    """What one rank finds stale is made again by all: it is collective where heads do not divide."""
    alone, shared = pair("GPT2", heads=5)
    same(alone, shared)
    ids, mask, labels = batch(LENGTHS)
    for rank in range(size):
        with torch.no_grad():
            if dist.get_rank() == rank:
                shared.weft_engine().forget()
            same(alone, shared)
            shared(input_ids=ids, attention_mask=mask)
            if dist.get_rank() == rank:
                shared.weft_engine().forget()
            shared(input_ids=ids, attention_mask=mask, labels=labels)
            assert len(weft.generate(shared, [[1, 2]], max_new_tokens=3, eos=())[0]) == 3
    for model in (alone, shared):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
    same(alone, shared)


WRITES = {
    "shard": lambda p: p.to_local().mul_(1.25),
    "data": lambda p: p.data.mul_(1.25),
    "memory": lambda p: p.data.to_local().numpy().__imul__(1.25),
}


def writes_past_the_counters(size: int) -> None:
    for family in ("Llama", "GPT2"):
        for name, write in WRITES.items():
            alone, shared = pair(family)
            same(alone, shared)
            with torch.no_grad():
                for p in alone.parameters():
                    p.mul_(1.25)
                for p in shared.parameters():
                    write(p)
            same(alone, shared)
            wanted = alone.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
            assert weft.generate(shared, [[5, 6]], max_new_tokens=4, eos=())[0] == wanted[0, 2:].tolist(), name


def resharded_in_place(size: int) -> None:
    """`reshard_state_dict` into a model that has generated already."""
    shared = pair("Llama")[1]
    weft.generate(shared, [[5, 6]], max_new_tokens=4, eos=())
    other = build("Llama", seed=7)
    source = weft.parallelize(build("Llama", seed=7).eval(), mesh())
    layouts = {name: (mesh(), list(p.placements)) for name, p in shared.named_parameters()}
    weft.reshard_state_dict(source.state_dict(), layouts, out=shared.state_dict())
    same(other.eval(), shared)


CASES = [
    vectors_of_another_type, different_vectors_and_positions, cut_and_moved_layers, replaced_modules, hooks,
    modes_of_parts, one_rank_alone, writes_past_the_counters, resharded_in_place,
]  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_changes(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]
