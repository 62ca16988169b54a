"""What `weft.parallelize` and its models refuse, on every rank and before anything is sent; and plans of styles."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from parallel_cases import WORDS, batch, build, checks, mesh, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import weft
from weft.errors import PeerMismatch
from weft.packed import PackedBatch

MIXED = [19, 7, 30]


def models(size: int) -> None:
    grid = init_device_mesh("cpu", (size, 1), mesh_dim_names=("tensor", "other"))
    with pytest.raises(ValueError, match=r"needs a mesh of one axis, got 2; take one of them, as in mesh\['other'\]"):
        weft.parallelize(build("Llama"), grid)
    with pytest.raises(ValueError, match="overlap is 'maybe', expected 'on' or 'off'"):
        weft.parallelize(build("Llama"), mesh(), overlap="maybe")
    with pytest.raises(ValueError, match=r"cannot parallelize a torch.nn.modules.linear.Linear without a plan"):
        weft.parallelize(nn.Linear(4, 4), mesh())
    untouched = build("Llama", heads=1, kv_heads=1)
    with pytest.raises(ValueError, match=r"ranks cannot share 1 query heads .* a rank would have none"):
        weft.parallelize(untouched, mesh())
    assert not any(isinstance(p, DTensor) for p in untouched.parameters())
    untouched(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="cannot share an MLP of width 1"):
        weft.parallelize(build("Llama", intermediate_size=1), mesh())
    with pytest.raises(ValueError, match=r"mesh is a int, expected a DeviceMesh, .* or none at all for one rank"):
        weft.parallelize(build("Llama"), size)
    odd = build("Llama")
    odd.model.layers[0].mlp.down_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"expected a torch.nn.Linear"):
        weft.parallelize(odd, mesh())
    once = weft.parallelize(build("Llama"), mesh())
    with pytest.raises(ValueError, match="is a DTensor already; parallelize a model once"):
        weft.parallelize(once, mesh())


def heads_for_words(size: int) -> None:
    """What the head of a masked language model does is read from its modules, strictly."""
    with pytest.raises(ValueError, match=r"config.sparse_prediction = True is not supported"):
        weft.parallelize(build("ModernBert", sparse_prediction=True), mesh())
    smooth = build("DistilBert")
    smooth.mlm_loss_fct = nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"mlm_loss_fct is .* expected a plain CrossEntropyLoss"):
        weft.parallelize(smooth, mesh())
    for family, name in (("Bert", "cls"), ("Roberta", "lm_head"), ("ModernBert", "head")):
        odd = build(family)
        setattr(odd, name, nn.Linear(72, WORDS))
        with pytest.raises(ValueError, match="is a Linear, expected the original one"):
            weft.parallelize(odd, mesh())

        class Scaled(type(getattr(build(family), name))):
            def forward(self, *args, **kwargs):
                return 2 * super().forward(*args, **kwargs)

        odd = build(family)
        getattr(odd, name).__class__ = Scaled
        with pytest.raises(ValueError, match="Scaled, which a packed model does not know"):
            weft.parallelize(odd, mesh())
    odd = build("Roberta")
    odd.lm_head.layer_norm = nn.Identity()
    with pytest.raises(ValueError, match=r"expected a torch.nn.LayerNorm over one dim"):
        weft.parallelize(odd, mesh())
    odd = build("ModernBert")
    odd.head.act = nn.Tanh()
    with pytest.raises(ValueError, match=r"the activation Tanh.* is not supported"):
        weft.parallelize(odd, mesh())


def inputs(size: int) -> None:
    """And after each refusal the ranks are still in step."""
    shared = weft.parallelize(build("GPT2"), mesh())
    ids, mask, labels = batch(MIXED)
    high, wrong = ids.clone(), labels.clone()
    high[0, 3] = wrong[0, 3] = WORDS
    cases = [
        ("values out of range; got .* to 97, expected 0 to 96", {"input_ids": high}),
        ("more positions than the model has", {"input_ids": torch.ones(1, 65, dtype=torch.int64)}),
        (
            "labels: got .* to 97, expected 0 to 96",
            {"input_ids": ids, "labels": wrong},
        ),
        ("labels of padding must be -100", {"input_ids": ids, "labels": labels.masked_fill(mask == 0, 5)}),
        ("a loss needs the logits of all tokens", {"input_ids": ids, "labels": labels, "logits_to_keep": 2}),
        ("expected a number", {"input_ids": PackedBatch.from_padded(ids, mask), "logits_to_keep": torch.tensor([1])}),
        ("the last column is padding in some sequences", {"input_ids": ids, "logits_to_keep": 1}),
        ("the argument output_attentions is not supported", {"input_ids": ids, "output_attentions": True}),
    ]
    for message, given in cases:
        packed = isinstance(given["input_ids"], PackedBatch) or given["input_ids"].shape != mask.shape
        with pytest.raises(ValueError, match=message):
            shared(**given, **({} if packed else {"attention_mask": mask}))
    shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    with pytest.raises(ValueError, match="a sequence of 65 positions is longer than the model's limit of 64"):
        weft.parallelize(build("Llama"), mesh())(input_ids=torch.ones(1, 65, dtype=torch.int64))


def different_inputs(size: int) -> None:
    """A rank that was given something else is found before any byte of the model moves, and named."""
    shared = weft.parallelize(build("Llama"), mesh())
    rank = dist.get_rank()
    ids, mask, labels = batch(MIXED)
    mine = ids.clone()
    mine[0, 0] = 5 + rank
    for given in ({"input_ids": mine}, {"input_ids": ids[:, : 20 + rank], "attention_mask": mask[:, : 20 + rank]}):
        with pytest.raises(PeerMismatch, match=r"rank 1: .*LlamaForCausalLM on \d+ tokens of 3 sequences"):
            shared(**given)
    with pytest.raises(PeerMismatch, match="training=True"):
        shared.train(rank == 0)(input_ids=ids, attention_mask=mask)
    other = labels.clone()
    other[0, 5] = rank
    shared.train()
    with pytest.raises(PeerMismatch, match="labels"):
        shared(input_ids=ids, attention_mask=mask, labels=other)
    shared(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 66), nn.Linear(66, 24)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def plans(size: int) -> None:
    """Any module with styles, as torch's parallelize_module takes them; a name that matches nothing is an error."""
    torch.manual_seed(0)
    alone = nn.Sequential(Block(), Block())
    torch.manual_seed(0)
    styles = {
        "*.up": weft.ColwiseOverlap(input_layouts=Shard(0)),
        "*.down": weft.RowwiseOverlap(output_layouts=Shard(0)),
    }
    shared = weft.parallelize(nn.Sequential(Block(), Block()), mesh(), plan=styles)
    x = torch.randn(6 * size, 24)
    got = shared(x.chunk(size)[dist.get_rank()])
    torch.testing.assert_close(got, alone(x).chunk(size)[dist.get_rank()])
    got.sum().backward()
    alone(x).sum().backward()
    for name, p in shared.named_parameters():
        torch.testing.assert_close(whole(p.grad), alone.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"plan\['1.upp'\] names no module of Sequential"):
        weft.parallelize(nn.Sequential(Block()), mesh(), plan={"1.upp": weft.ColwiseOverlap()})
    with pytest.raises(ValueError, match=r"plan\['up'\] names no module of Sequential; did you mean 0.up\?"):
        weft.parallelize(nn.Sequential(Block()), mesh(), plan={"up": weft.ColwiseOverlap()})
    with pytest.raises(ValueError, match="is a str, expected a style"):
        weft.parallelize(nn.Sequential(Block()), mesh(), plan={"0.up": "colwise"})
    with pytest.raises(ValueError, match="overlap='off' is for models without a plan"):
        weft.parallelize(nn.Sequential(Block()), mesh(), plan={"0.up": weft.ColwiseOverlap()}, overlap="off")


CASES = [models, heads_for_words, inputs, different_inputs, plans]


@pytest.fixture(scope="module")
def results():
    return checks(CASES, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_refusals_and_plans(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]


# A rank that dies -------------------------------------------------------------------------------------------


def dies() -> str:
    """Rank 1 is killed between the forward and the backward pass; the others must not wait for it for ever."""
    group = dist.new_group(timeout=timedelta(seconds=15))
    shared = weft.parallelize(build("Llama"), DeviceMesh.from_group(group, "cpu"))
    ids, mask, labels = batch(MIXED)
    loss = shared(input_ids=ids, attention_mask=mask, labels=labels).loss
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((weft.PeerLost, weft.PeerTimeout)) as caught:
        loss.backward()
    return str(caught.value)


def test_a_killed_rank_ends_the_others() -> None:
    texts = run_ranks(dies, 3, timeout=120.0, killed=[1])
    assert texts[1] == signal.SIGKILL
    assert all("rank" in texts[rank] for rank in (0, 2))
