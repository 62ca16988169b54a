"""More ranks than key/value heads: a rank has copies of those that its queries read; their gradients are added up."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import batch, both, build, check_gradients, checks, mesh, whole
from test_parallel_inference import LENGTHS, NEW, greedy_of, logits_of, program_of, prompts
from test_parallel_training import MIXED, compare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from weft.parallel import load_checkpoint, save_checkpoint

# Query and key/value heads on so many ranks: queries that ranks divide, and not; one rank that reads two keys.
SHAPES = {3: [(8, 2), (4, 2), (5, 1)], 4: [(4, 1), (8, 2), (6, 2)]}


def losses_and_gradients(size: int) -> None:
    for heads, kv_heads in SHAPES[size]:
        compare("Llama", MIXED, heads=heads, kv_heads=kv_heads)
    heads, kv_heads = SHAPES[size][0]
    compare("Llama", [3, 1, 2], heads=heads, kv_heads=kv_heads, attention_bias=True)  # tokens that are not split
    compare("Llama", MIXED, heads=heads, kv_heads=kv_heads, attention_bias=True, tie_word_embeddings=True)
    compare("Llama", MIXED, heads=heads, kv_heads=1, head_dim=2)  # keys of which some ranks store no row


def tokens(size: int) -> None:
    """Greedy ones, of mixed lengths without padding, and by Hugging Face's generate with padding and beams."""
    for heads, kv_heads in SHAPES[size]:
        alone, shared = both("Llama", heads=heads, kv_heads=kv_heads)
        alone.eval(), shared.eval()
        got = weft.generate(shared, prompts(), max_new_tokens=NEW, eos=())
        assert got == [greedy_of(alone, p) for p in prompts()], (heads, kv_heads)
        assert [weft.generate(shared, [p], max_new_tokens=NEW, eos=())[0] for p in prompts()] == got
        ids, mask, _ = batch([9, 4, 17], side="left")
        options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        for way in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
            assert torch.equal(shared.generate(ids, **options, **way), alone.generate(ids, **options, **way)), way


def same_bits(size: int) -> None:
    """Whatever the batch, the pieces, the wire and the overlap."""
    heads, kv_heads = SHAPES[size][0]
    model = build("Llama", heads=heads, kv_heads=kv_heads).eval()
    program, network = program_of(model), program_of(model, network=True)
    some = prompts([40, 3, 9, 1])
    wanted = [logits_of(program, [t])[0] for t in some]
    for used, pieces in ((program, 1), (program, 5), (network, 1), (network, 5)):
        for got, want in zip(logits_of(used, some, pieces), wanted, strict=True):
            assert torch.equal(got, want), (type(used.wire).__name__, pieces)
    ids, mask, labels = batch(MIXED)
    grads = []
    for overlap in ("on", "off"):
        shared = both("Llama", overlap=overlap, heads=heads, kv_heads=kv_heads)[1]
        shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        grads.append([p.grad.to_local() for p in shared.parameters()])
    assert all(map(torch.equal, *grads))


def bfloat16(size: int) -> None:
    """Gradients of copies are added in float32: as near to those of float32 as the unsharded model's are."""
    heads, kv_heads = SHAPES[size][0]
    ids, mask, labels = batch(MIXED)
    precise, rough = (build("Llama", heads=heads, kv_heads=kv_heads) for _ in range(2))
    shared = weft.parallelize(build("Llama", heads=heads, kv_heads=kv_heads).bfloat16(), mesh())
    for model in (precise, rough.bfloat16(), shared):
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for name, p in precise.named_parameters():
        assert shared.get_parameter(name).grad.dtype == torch.bfloat16
        errors = [float((whole(m.get_parameter(name).grad) - p.grad).norm() / p.grad.norm()) for m in (rough, shared)]
        assert errors[1] < 1.5 * errors[0] + 0.01, name


def steps_and_checkpoints(size: int) -> None:
    """Trained, saved, loaded on one rank and on all, generated from; written to in between."""
    heads, kv_heads = SHAPES[size][1]
    options = {"heads": heads, "kv_heads": kv_heads, "head_dim": 2}
    alone, shared = both("Llama", **options)
    ids, mask, labels = batch(MIXED)
    made = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (alone, shared)]
    for model, optimiser in zip((alone, shared), made, strict=True):
        for _ in range(2):
            optimiser.zero_grad()
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimiser.step()
        model.eval()
    assert weft.generate(shared, prompts(), max_new_tokens=4, eos=()) == [
        greedy_of(alone, p, max_new_tokens=4) for p in prompts()
    ]
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    save_checkpoint(f"{place[0]}/steps", 2, shared, made[1])
    shared.save_pretrained(f"{place[0]}/whole")
    read = type(alone).from_pretrained(f"{place[0]}/whole").eval()
    assert all(torch.equal(whole(a), b) for a, b in zip(shared.parameters(), read.parameters(), strict=True))
    again = weft.parallelize(build("Llama", seed=3, **options).eval(), mesh())
    wanted = weft.generate(shared, prompts(LENGTHS[:2]), max_new_tokens=4, eos=())
    load_checkpoint(f"{place[0]}/steps", again)
    assert weft.generate(again, prompts(LENGTHS[:2]), max_new_tokens=4, eos=()) == wanted
    fresh = weft.parallelize(build("Llama", seed=4, **options).eval(), mesh())
    weft.load_sharded(fresh, f"{place[0]}/whole")
    assert weft.generate(fresh, prompts(LENGTHS[:2]), max_new_tokens=4, eos=()) == wanted


def data_parallel(size: int) -> None:
    """With FSDP around it, on another axis."""
    if size == 3:
        return
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batches = [batch(MIXED, seed=seed) for seed in range(2)]
    ids, mask, labels = batches[grid.get_local_rank("data")]
    shared = weft.parallelize(build("Llama", heads=4, kv_heads=1), grid["tensor"])
    fully_shard(shared, mesh=grid["data"])
    alone = build("Llama", heads=4, kv_heads=1)
    made = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (alone, shared)]
    for _ in range(2):
        for each in batches:
            (alone(input_ids=each[0], attention_mask=each[1], labels=each[2]).loss / 2).backward()
        shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        for name, p in shared.named_parameters():
            torch.testing.assert_close(whole(p.grad), alone.get_parameter(name).grad, rtol=2e-4, atol=2e-5)
        for optimiser in made:
            optimiser.step()
            optimiser.zero_grad()
    alone.eval(), shared.eval()
    assert weft.generate(shared, prompts(), max_new_tokens=4, eos=()) == [
        greedy_of(alone, p, max_new_tokens=4) for p in prompts()
    ]


def dropped_and_frozen(size: int) -> None:
    """Dropout of attention repeats by its seed; a key projection that is frozen gets no gradient, others do."""
    heads, kv_heads = SHAPES[size][0]
    shared: Any = weft.parallelize(build("Llama", heads=heads, kv_heads=kv_heads, attention_dropout=0.4), mesh())
    ids, mask, labels = batch(MIXED)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed if dist.get_rank() == 0 else 7)
        losses.append(shared(input_ids=ids, attention_mask=mask, labels=labels).loss)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    alone, shared = both("Llama", heads=heads, kv_heads=kv_heads)
    for model in (alone, shared):
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    check_gradients(alone, shared)
    assert shared.model.layers[0].self_attn.k_proj.weight.grad is None


def refusal(size: int) -> None:
    message = rf"{size} ranks cannot share {size - 1} query heads \(1 key/value heads\).* at most {size - 1} ranks"
    with pytest.raises(ValueError, match=message):
        weft.parallelize(build("Llama", heads=size - 1, kv_heads=1), mesh())


CASES = [
    losses_and_gradients, tokens, same_bits, bfloat16, steps_and_checkpoints, data_parallel, dropped_and_frozen,
    refusal,
]  # fmt: skip


@pytest.fixture(scope="module", params=[3, 4], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_more_ranks_than_keys(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]
