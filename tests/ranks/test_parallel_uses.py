"""What else parallel models are used for: other types, compiling, saving, threads, batches of odd shapes, refusals."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from parallel_cases import WORDS, batch, both, build, check_gradients, checks, mesh
from test_parallel_changes import pair, refused, same
from torch import nn

import weft
from weft.packed import PackedBatch
from weft.parallel.surface import local_parameters

LENGTHS = [5, 3, 9]


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


CASES = [other_types, compiled, saved, refusals, threads, a_swap_that_fails, odd_batches]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_uses(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]
