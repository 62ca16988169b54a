"""A parallel model that is changed between calls, or used as other models are: right, or refused by name."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import WORDS, batch, both, build, check_gradients, checks, mesh
from torch import nn

import weft
from weft.packed import PackedBatch
from weft.parallel.surface import local_parameters

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
    refused(shared, "a parameter is no DTensor; it was replaced after parallelize")
    attention.q_proj = mine
    same(alone, shared)
    whole, shared.model = shared.model, build("Llama").model
    refused(shared, "model of the LlamaForCausalLM was replaced after parallelize")
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


# What else models are used for ------------------------------------------------------------------------------


def other_types(size: int) -> None:
    """`to(dtype)`, before and after the first call, and back."""
    alone, shared = pair("Llama", heads=10, kv_heads=5)
    ids, mask, labels = batch(LENGTHS)
    same(alone, shared)
    alone.bfloat16(), shared.to(torch.bfloat16)
    same(alone, shared, tolerance=0.1)
    shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in shared.parameters())
    weft.generate(shared, [[1, 2]], max_new_tokens=2)
    alone.float(), shared.float()
    shared.zero_grad()
    same(alone, shared)
    for odd in (torch.float16, torch.float64):
        refused(shared.to(odd), f"weft computes in float32 and bfloat16.*got {odd}")
    # As from_pretrained makes them: weights in bfloat16, rotary frequencies in float32.
    mixed = build("Llama").eval()
    for p in mixed.parameters():
        p.data = p.data.bfloat16()
    same(mixed, weft.parallelize(copy.deepcopy(mixed), mesh()), tolerance=0.1)


def compiled(size: int) -> None:
    """torch.compile leaves it as it is."""
    alone, shared = pair()
    fast = torch.compile(shared)
    same(alone, fast)
    ids, mask, labels = batch(LENGTHS)
    for model in (alone, fast):
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    check_gradients(alone, shared)


def saved(size: int) -> None:
    """`save_pretrained` gathers; whatever it writes, `from_pretrained` reads."""
    for family, options in (("Llama", {"heads": 10, "kv_heads": 5, "tie_word_embeddings": True}), ("GPT2", {})):
        alone, shared = pair(family, **options)
        place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(place)
        shared.save_pretrained(place[0], max_shard_size="100KB")
        read = type(alone).from_pretrained(place[0])
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), read.parameters(), strict=True))
        assert read.config.architectures == [type(alone).__name__]
        assert os.path.exists(f"{place[0]}/generation_config.json")
        assert torch.equal(
            type(shared).from_pretrained(place[0]).eval()(torch.tensor([[1, 2]])).logits,
            read.eval()(torch.tensor([[1, 2]])).logits,
        )
        with pytest.raises(ValueError, match="does not take variant"):
            shared.save_pretrained(place[0], variant="x")


def refusals(size: int) -> None:
    alone, shared = pair()
    ids, mask, _ = batch(LENGTHS)
    with pytest.raises(ValueError, match="resize it before parallelize"):
        shared.resize_token_embeddings(WORDS + 3)
    with pytest.raises(ValueError, match="cannot be pickled"):
        pickle.dumps(shared)
    with pytest.raises(ValueError, match=r"DistributedDataParallel does not take.*fully_shard"):
        nn.parallel.DistributedDataParallel(shared)
    with pytest.raises(ValueError, match=r"torch.jit.trace: a parallel model"):
        torch.jit.trace(shared, (ids,), strict=False)
    with pytest.raises(ValueError, match=r"torch.export: a parallel model"):
        torch.export.export(shared, (ids,), strict=False)
    with torch.no_grad(), pytest.raises(ValueError, match=r"torch.func"):
        torch.func.vmap(lambda row: shared(row[None]).logits)(ids)
    with pytest.warns(UserWarning, match="no effect inside a parallel model"):
        shared.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"output_hidden_states was asked for.*use_cache=False"):
        shared.generate(ids, attention_mask=mask, max_new_tokens=2, output_hidden_states=True)
    with pytest.raises(ValueError, match=r"the model is in training mode \(call eval\(\)\)"):
        shared.train().generate(ids[:1], max_new_tokens=2)
    shared.eval()
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        shared(ids, cu_seq_lens_q=torch.tensor([0, 3, 9]))
    with torch.no_grad(), pytest.raises(ValueError, match="logits_to_keep is -1"):
        shared(ids, logits_to_keep=-1)
    odd = build("Llama")
    odd.lm_head = nn.Linear(72, WORDS + 1, bias=False)
    with pytest.raises(ValueError, match="the embedding has 97 words and the head 98"):
        weft.parallelize(odd, mesh())
    same(alone, shared)
    same(alone, copy.deepcopy(shared))
    assert type(shared)(shared.config)(ids).logits.shape == (*ids.shape, WORDS)  # a plain model of the same class


def threads(size: int) -> None:
    """Two threads that call one model wait for each other; small heads swap parameters meanwhile."""
    if size > 1:  # there, ranks must make the same calls in the same order
        return
    alone, shared = pair("Llama")
    small = [m.eval() for m in both("Bert", "ForSequenceClassification")]
    prompts = [[i, 5, 7] for i in range(6)]
    wanted = [weft.generate(shared, [p], max_new_tokens=6, eos=()) for p in prompts]
    ids, mask, _ = batch(LENGTHS)
    with torch.no_grad():
        logits, classes = alone(ids, attention_mask=mask).logits, small[0](ids, attention_mask=mask).logits
    wrong: list[str] = []

    def work(number: int) -> None:
        for _ in range(5):
            if weft.generate(shared, [prompts[number]], max_new_tokens=6, eos=()) != wanted[number]:
                wrong.append("tokens")
            with torch.no_grad():
                got = shared(ids, attention_mask=mask).logits
                if not torch.allclose(got[mask.bool()], logits[mask.bool()], rtol=1e-4, atol=2e-4):
                    wrong.append("logits")
                if not torch.allclose(small[1](ids, attention_mask=mask).logits, classes, rtol=1e-4, atol=2e-4):
                    wrong.append("classes")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def a_swap_that_fails(size: int) -> None:
    """Parameters that were swapped for plain tensors are put back, also where a later one cannot be."""
    shared = weft.parallelize(build("Bert", "ForSequenceClassification"), mesh())
    before = dict(shared.named_parameters())
    broken = shared.classifier.bias

    class Failing(dict):
        def items(self):
            yield from super().items()
            raise MemoryError

    held = shared.classifier._parameters
    shared.classifier._parameters = Failing(held)
    with pytest.raises(MemoryError), local_parameters(shared):
        pass
    shared.classifier._parameters = held
    assert shared.classifier.bias is broken
    assert all(p is before[name] for name, p in shared.named_parameters())


def odd_batches(size: int) -> None:
    """One token, no row, rows without tokens, holes, padding on the left; labels that count nowhere."""
    alone, shared = pair("Llama")
    generator = torch.Generator().manual_seed(3)
    for shape in ((1, 1), (3, 1), (2, 7)):
        ids = torch.randint(3, WORDS, shape, generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(shared(ids).logits, alone(ids).logits, rtol=1e-4, atol=2e-4)
    ids = torch.randint(3, WORDS, (3, 8), generator=generator)
    for rows in ([[1] * 8, [0] * 8, [0, 0, 1, 1, 1, 0, 0, 0]], [[1, 0, 1, 1, 0, 0, 1, 1]] * 3):
        mask = torch.tensor(rows)
        with torch.no_grad():
            got = shared(ids, attention_mask=mask).logits
            want = alone(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=2e-4)
        assert not got[~mask.bool()].any()
    nothing = torch.zeros(0, 5, dtype=torch.int64)
    with torch.no_grad():
        assert shared(nothing).logits.shape == (0, 5, WORDS)
        assert shared(ids, attention_mask=torch.zeros_like(ids)).logits.shape == (3, 8, WORDS)
        assert shared(input_ids=PackedBatch.from_list([torch.tensor([5])])).logits.shape == (1, WORDS)
    assert shared(nothing).logits.shape == (0, 5, WORDS)
    assert shared(ids, labels=torch.full_like(ids, -100)).loss.isnan()


CASES = [
    vectors_of_another_type, different_vectors_and_positions, cut_and_moved_layers, replaced_modules, hooks,
    modes_of_parts, one_rank_alone, other_types, compiled, saved, refusals, threads, a_swap_that_fails, odd_batches,
    writes_past_the_counters, resharded_in_place,
]  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_changes(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]
