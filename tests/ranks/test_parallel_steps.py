"""Parallel models in use: optimisers, checkpoints, dropout, other axes, plans, and the same bits whatever the plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from parallel_cases import batch, both, build, checks, config, mesh, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import weft
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.blocks import Axis
from weft.overlap.executor.context import context_of
from weft.parallel.training import Noise, drop

MIXED = [19, 7, 30]


def step(model, optimiser, seed: int) -> torch.Tensor:
    ids, mask, labels = batch(MIXED, seed=seed)
    optimiser.zero_grad()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def clipped_adamw_steps(size: int) -> None:
    """`eps` keeps AdamW from making whole steps of the rounding of gradients that are 0, as those of key biases are."""
    for family, foreach in (("Llama", True), ("GPT2", False)):
        pair = both(family)
        made = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, foreach=foreach) for m in pair]
        for seed in range(3):
            want, got = (step(m, o, seed) for m, o in zip(pair, made, strict=True))
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)
        for name, parameter in pair[1].named_parameters():
            torch.testing.assert_close(whole(parameter), pair[0].get_parameter(name), rtol=1e-3, atol=2e-4)


def same_bits(size: int) -> None:
    """Overlapped, in turn, or by any other plan: loss, logits and gradients are equal."""
    runs = []
    for overlap in ("on", "off", "strange plans"):
        shared = weft.parallelize(build("GPT2", heads=5), mesh(), overlap="on" if overlap == "on" else "off")
        group = shared._weft_ranks.group
        if overlap == "strange plans":
            planner = context_of(group).planner
            planner.make = lambda *asked, planner=planner, group=group: strange(planner, group, *asked)
        ids, mask, labels = batch(MIXED)
        out = shared(input_ids=ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        plans = list(context_of(group).planner._plans.values())
        assert all(p.sequential for p in plans) or overlap != "off"
        assert plans or size == 1
        runs.append(
            [out.loss.detach(), out.logits.to_local().detach(), *(p.grad.to_local() for p in shared.parameters())]
        )
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def strange(planner, group, op, m, n, k, dtype) -> OverlapPlan:
    """Messages instead of windows, small tiles, uneven groups, by columns where that can be."""
    by_columns = not Op(op).gathers and (m + n) % 2
    plan = OverlapPlan(
        Op(op), m, n, k, dtype, context_of(group).hosts, Transport.MESSAGES,
        axis=Axis.COLS if by_columns else Axis.ROWS, tile_m=8, tile_n=32, groups=(1, 3, 2),
    )  # fmt: skip
    planner.use(plan)
    return plan


def dropout(size: int) -> None:
    """The same seed on rank 0 repeats a run whatever the others' seeds are; ranks drop different things."""
    options = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.3)
    shared = weft.parallelize(build("GPT2", **options), mesh())
    for lengths in (MIXED, [3, 2]):  # rows that are split, and rows that are whole
        ids, mask, labels = batch(lengths)
        losses = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed if dist.get_rank() == 0 else 100 * seed + len(losses))
            loss = shared(input_ids=ids, attention_mask=mask, labels=labels).loss
            shared.zero_grad()
            loss.backward()
            all_losses = [torch.zeros(()) for _ in range(size)]
            dist.all_gather(all_losses, loss.detach())
            assert len({float(each) for each in all_losses}) == 1, "replicated rows are dropped alike"
            losses.append(loss.item())
        assert losses[0] == losses[1] != losses[2]
        norms = [p.grad.to_local() for name, p in shared.named_parameters() if "ln_" in name]
        for grad in norms:
            others = [torch.empty_like(grad) for _ in range(size)]
            dist.all_gather(others, grad)
            assert all(torch.equal(grad, other) for other in others)
    classifier = weft.parallelize(build("Bert", "ForTokenClassification", classifier_dropout=0.5), mesh())
    ids, mask, _ = batch(MIXED)
    torch.manual_seed(dist.get_rank())
    logits = classifier(input_ids=ids, attention_mask=mask).logits.detach()
    others = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(others, logits)
    assert all(torch.equal(logits, other) for other in others)


def dropout_keeps_the_mean(size: int) -> None:
    """Dropout scales what it keeps: the mean over many draws is the value without, at each rank's own rows."""
    noise = Noise.of(7, dist.get_rank())
    x = torch.ones(200, 300)
    kept = drop(x, 0.25, noise.own)
    assert abs(float(kept.mean()) - 1.0) < 0.02
    assert {round(v, 4) for v in kept.unique().tolist()} == {0.0, round(1 / 0.75, 4)}
    others = [torch.empty_like(kept) for _ in range(size)]
    dist.all_gather(others, kept)
    assert all(not torch.equal(others[0], other) for other in others[1:])
    same = [torch.empty_like(kept) for _ in range(size)]
    dist.all_gather(same, drop(x, 0.25, noise.alike))
    assert all(torch.equal(same[0], other) for other in same)


def meta_device(size: int) -> None:
    """Nothing is allocated: shards of the right shapes, on the meta device, under the same names."""
    with torch.device("meta"):
        empty = weft.parallelize(LlamaForCausalLM(config("Llama", tie_word_embeddings=True)), mesh())
    full = weft.parallelize(build("Llama", tie_word_embeddings=True), mesh())
    for (name, a), (other, b) in zip(empty.named_parameters(), full.named_parameters(), strict=True):
        assert name == other
        assert a.is_meta
        assert a.to_local().shape == b.to_local().shape
        assert a.placements == b.placements
    empty.load_state_dict(full.state_dict(), assign=True)
    empty.model.rotary_emb.inv_freq = full.model.rotary_emb.inv_freq
    empty.tie_weights()
    ids, mask, labels = batch(MIXED)
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (full, empty)]
    assert torch.equal(*losses)


def evaluation(size: int) -> None:
    """Without gradients: equal to training's outputs, and never stale after an optimiser's step."""
    shared = weft.parallelize(build("GPT2", heads=5), mesh())
    optimiser = torch.optim.SGD(shared.parameters(), lr=0.1)
    ids, mask, labels = batch(MIXED)
    seen = []
    for _ in range(2):
        shared.eval()
        with torch.no_grad():
            quiet = shared(input_ids=ids, attention_mask=mask, labels=labels).loss
        shared.train()
        loss = shared(input_ids=ids, attention_mask=mask, labels=labels).loss
        torch.testing.assert_close(quiet, loss.detach(), rtol=1e-5, atol=1e-6)
        seen.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert seen[1] < seen[0] - 1e-3


def copies(size: int) -> None:
    """A deep copy is a model of its own on the same ranks."""
    shared = weft.parallelize(build("Llama"), mesh())
    ids, mask, labels = batch(MIXED)
    shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    other = copy.deepcopy(shared)
    for mine, theirs in zip(shared.parameters(), other.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(whole(mine.grad), whole(theirs.grad))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
        mine, theirs = (m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (shared, other))
    assert not torch.equal(mine, theirs)


CASES = [
    clipped_adamw_steps, same_bits, dropout, dropout_keeps_the_mean, meta_device, evaluation, copies,
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_in_use(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]


# Checkpoints of torch at another number of ranks ------------------------------------------------------------


def _trained() -> tuple:
    model = weft.parallelize(build("GPT2", heads=5), mesh())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def save_checkpoint(path: str) -> list[float]:
    """One step, a checkpoint, one step more."""
    model, optimiser = _trained()
    step(model, optimiser, 0)
    model_state, optimiser_state = get_state_dict(model, optimiser)
    dcp.save({"model": model_state, "optimiser": optimiser_state}, checkpoint_id=path)
    return [step(model, optimiser, seed).item() for seed in (1, 2)]


def resume_checkpoint(path: str) -> list[float]:
    model, optimiser = _trained()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model_state, optimiser_state = get_state_dict(model, optimiser)
    dcp.load({"model": model_state, "optimiser": optimiser_state}, checkpoint_id=path)
    set_state_dict(model, optimiser, model_state_dict=model_state, optim_state_dict=optimiser_state)
    return [step(model, optimiser, seed).item() for seed in (1, 2)]


def test_a_checkpoint_resumes_at_another_number_of_ranks(tmp_path) -> None:
    wanted = run_ranks(save_checkpoint, 2, str(tmp_path), timeout=120.0)[0]
    for ranks in (1, 3):
        resumed = run_ranks(resume_checkpoint, ranks, str(tmp_path), timeout=120.0)[0]
        assert resumed == pytest.approx(wanted, rel=1e-4)


# Another axis of the mesh -----------------------------------------------------------------------------------


def data_parallel() -> None:
    """Tensor x data: averaged over the data axis by hand, and by FSDP2; both have the gradients of the whole batch."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batches = [batch(MIXED, seed=seed) for seed in (1, 2)]
    ids, mask, labels = batches[grid.get_local_rank("data")]
    for kind in ("by hand", "fsdp"):
        model = weft.parallelize(build("GPT2", heads=5), grid["tensor"])
        if kind == "fsdp":
            fully_shard(model, mesh=grid["data"])
        alone = build("GPT2", heads=5)
        steps = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (alone, model)]
        for _ in range(3):  # what the first pass made of the weights is stale in the second
            for step in steps:
                step.zero_grad()
            for each in batches:
                (alone(input_ids=each[0], attention_mask=each[1], labels=each[2]).loss / 2).backward()
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            if kind == "by hand":
                for p in model.parameters():
                    dist.all_reduce(p.grad.to_local(), group=grid["data"].get_group())
                    p.grad.div_(2)
            for name, p in model.named_parameters():
                torch.testing.assert_close(whole(p.grad), alone.get_parameter(name).grad, rtol=2e-4, atol=2e-5)
            for step in steps:
                step.step()
    layered = weft.parallelize(build("GPT2"), grid["tensor"])
    for block in layered.transformer.h:
        fully_shard(block, mesh=grid["data"])
    with pytest.raises(ValueError, match="give the whole model to fully_shard"):
        layered(input_ids=ids, attention_mask=mask)


def test_data_parallel_over_another_axis() -> None:
    run_ranks(data_parallel, 4, timeout=120.0)


def sharded_base() -> None:
    """A base model is the module that `fully_shard` gives another class."""
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    ids, mask, _ = batch(MIXED, seed=1)
    for family in ("Bert", "Llama", "GPT2"):
        alone, model = build(family, "Model"), weft.parallelize(build(family, "Model"), grid["tensor"])
        fully_shard(model, mesh=grid["data"])
        steps = [torch.optim.AdamW(m.parameters(), lr=0.03, eps=1e-2, fused=True) for m in (model, alone)]
        for mode in (torch.enable_grad, torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                got, wanted = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (model, alone))
            torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=2e-4, atol=2e-5)
            if mode is torch.enable_grad:
                for states, step in zip((got, wanted), steps, strict=True):
                    step.zero_grad()
                    states[mask.bool()].square().mean().backward()
                    step.step()


def test_base_models_under_fsdp() -> None:
    run_ranks(sharded_base, 2, timeout=120.0)
