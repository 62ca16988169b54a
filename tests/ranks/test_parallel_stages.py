"""Decoders in pipeline stages that ranks share: the losses and gradients of the whole model in one process."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from parallel_cases import SIZES, WORDS, build, checks, whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import weft
from weft.errors import WeftError
from weft.packed import PackedBatch
from weft.parallel.files.save import save_model
from weft.parallel.stages import ModelStage, model_stage, stage_layouts

FAMILIES = {"Llama": {"kv_heads": 2, "heads": 4}, "GPT2": {"heads": 5}}  # heads that two ranks share, evenly or not
LAYERS = {"Llama": "num_hidden_layers", "GPT2": "n_layer"}
COUNT = 2  # micro-batches


def whole_model(family: str, **options: Any) -> Any:
    """Three layers, for two stages."""
    return build(family, **{"tie_word_embeddings": False, LAYERS[family]: 3, **FAMILIES[family], **options})


def grid(size: int) -> DeviceMesh:
    """Two stages, which one rank has or two share."""
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "tp"))


def texts(seed: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Two packed micro-batches: ids, what each token must predict, and where documents end."""
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.tensor([0, 19, 20, 41], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)]
    ids = [torch.randint(3, WORDS, (int(cu[-1]),), generator=generator) for cu in ends]
    targets = [torch.cat([t[1:], t.new_full((1,), -100)]) for t in ids]
    for t, cu in zip(targets, ends, strict=True):
        t[cu[1:].long() - 1] = -100
    return ids, targets, ends


def pipeline(stage: ModelStage, mesh: DeviceMesh, **options: Any) -> weft.Pipeline:
    schedule = weft.schedule("1f1b", stages=2, microbatches=COUNT)
    options |= {"loss_fn": lambda summed, n: summed / n, **stage_layouts(2)}
    return weft.Pipeline({stage.index: stage}, mesh.mesh.tolist(), schedule, **options)


def stage_of(model: Any, mesh: DeviceMesh) -> ModelStage:
    return model_stage(model, mesh.get_local_rank("pp"), 2, mesh["tp"])


def alone_losses(model: Any) -> list[torch.Tensor]:
    """Document by document, with torch's own loss."""
    losses = []
    for ids, targets, ends in zip(*texts(), strict=True):
        summed = torch.zeros(())
        for first, end in pairwise(ends.tolist()):
            logits = model(ids[None, first:end]).logits[0]
            summed = summed + F.cross_entropy(logits, targets[first:end], reduction="sum")
        losses.append(summed / ids.numel())
    return losses


def training(size: int) -> None:
    """Losses, gradients and two steps; documents of one token; micro-batches of another size each."""
    for family in FAMILIES:
        mesh, alone = grid(size), whole_model(family)
        stage = stage_of(whole_model(family), mesh)
        ids, targets, ends = texts()
        made = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, stage)]
        with pipeline(stage, mesh) as pipe:
            for _ in range(2):
                losses = pipe.step(ids, [t.numel() for t in ids], cu_seqlens=ends, next_ids=targets)
                wanted = torch.stack(alone_losses(alone))
                if pipe.has_last_stage:
                    torch.testing.assert_close(losses, wanted.detach(), rtol=2e-5, atol=2e-5)
                wanted.mean().backward()
                for name, p in stage.named_parameters():
                    want = alone.get_parameter(name).grad
                    message = f"{family} {name}: {{}}".format
                    torch.testing.assert_close(whole(p.grad), want, rtol=2e-4, atol=2e-5, msg=message)
                for optimiser in made:
                    optimiser.step()
                    optimiser.zero_grad()
            found = pipe.eval_step(ids, cu_seqlens=ends)
            if pipe.has_last_stage:
                for each, (t, cu) in zip(found.outputs, zip(ids, ends, strict=True), strict=True):
                    rows = [alone(t[None, a:b]).logits[0] for a, b in pairwise(cu.tolist())]
                    torch.testing.assert_close(_columns(each, mesh), torch.cat(rows), rtol=1e-4, atol=2e-4)


DECODERS = {
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {"head_dim": 12, "use_sliding_window": False},
    "Gemma3": {"head_dim": 12, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
}


def decoder(family: str) -> Any:
    """One of the other decoders, of three layers."""
    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 90}
    made = {**SIZES, **sizes, "num_hidden_layers": 3, "tie_word_embeddings": False, "pad_token_id": None}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**made, **DECODERS[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.15 if p.dim() > 1 else 0.2)
    return model.train()


def every_decoder(size: int) -> None:
    """The other families as stages, cut by cost: two layers and a dear third one with the head, or one and two."""
    ids, targets, ends = texts()
    for number, family in enumerate(DECODERS):
        mesh, alone, whole_of = grid(size), decoder(family), decoder(family)
        costs = [0.0, 1.0, 1.0, 1.0, 2.0] if number % 2 else [2.0, 1.0, 1.0, 1.0, 0.0]
        layers = weft.cut(whole_of, 2, costs)
        assert layers == ([range(2), range(2, 3)] if number % 2 else [range(1), range(1, 3)])
        index = mesh.get_local_rank("pp")
        stage = model_stage(whole_of, index, 2, mesh["tp"], layers=layers)
        base = stage.model
        assert [int(i) for i in base.layers] == list(layers[index])
        with pipeline(stage, mesh) as pipe:
            losses = pipe.step(ids, [t.numel() for t in ids], cu_seqlens=ends, next_ids=targets)
        wanted = torch.stack(alone_losses(alone))
        if pipe.has_last_stage:
            torch.testing.assert_close(losses, wanted.detach(), rtol=2e-5, atol=2e-5)
        wanted.mean().backward()
        for name, p in stage.named_parameters():
            want = alone.get_parameter(name).grad
            message = f"{family} {name}: {{}}".format
            torch.testing.assert_close(whole(p.grad), want, rtol=5e-4, atol=5e-5, msg=message)


def _columns(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Logits of all words, from the ranks of a stage."""
    parts: list[Any] = [None] * mesh["tp"].size()
    dist.all_gather_object(parts, part, group=mesh["tp"].get_group())
    return torch.cat(parts, 1)


def dropout(size: int) -> None:
    """One stage drops what `parallelize` drops by the same seed; two stages each other things, again by the seed."""
    drops = {
        "GPT2": dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.3), "Llama": {"attention_dropout": 0.3},
    }  # fmt: skip
    ids, targets, ends = texts()
    for family, options in drops.items():
        mesh = init_device_mesh("cpu", (size,))
        stage = model_stage(whole_model(family, **options), 0, 1, mesh)
        shared = weft.parallelize(whole_model(family, **options), mesh)
        batch = PackedBatch.from_list(list(ids[0].split(ends[0].diff().tolist())))
        labels = torch.cat([ids[0].new_full((1,), -100), targets[0][:-1]])
        values = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed if dist.get_rank() == 0 else 9)
            summed = stage(ids[0], cu_seqlens=ends[0], next_ids=targets[0])
            torch.manual_seed(seed if dist.get_rank() == 0 else 9)
            torch.testing.assert_close(summed, shared(batch, labels=labels, num_items_in_batch=1).loss)
            values.append(summed)
        assert torch.equal(values[0], values[1])
        assert not torch.equal(values[0], values[2])
        plain = whole_model(family).eval()
        stage.eval()
        torch.testing.assert_close(
            stage(ids[0], cu_seqlens=ends[0], next_ids=targets[0]) / ids[0].numel(), alone_losses(plain)[0]
        )
        two = grid(size)
        runs = []
        for seed in (3, 3, 4):
            part = stage_of(whole_model(family, **options), two)
            with pipeline(part, two, seed=seed) as pipe:
                runs.append(pipe.step(ids, [1, 1], cu_seqlens=ends, next_ids=targets))
        assert torch.equal(runs[0], runs[1])
        assert not runs[0].numel() or not torch.equal(runs[0], runs[2])
    # Two stages that draw the same number drop different elements.
    whole_of = whole_model("GPT2", **drops["GPT2"])
    engines = [model_stage(whole_of, i, 2, init_device_mesh("cpu", (size,)))._engine for i in range(2)]
    drawn = []
    for i, engine in enumerate(engines):
        assert engine is not None
        torch.manual_seed(1)
        noise = engine.noise(salt=i)
        assert noise is not None
        drawn.append(torch.rand(5, generator=noise.alike))
    assert not torch.equal(*drawn)


def files(size: int) -> None:
    """From the meta device, by files, and back into files."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    for family in FAMILIES:
        alone = whole_model(family)
        folder = f"{place[0]}/{family}"
        if dist.get_rank() == 0:
            alone.save_pretrained(folder)
        dist.barrier()
        with torch.device("meta"):
            empty = type(alone)(alone.config)
        stage = stage_of(empty, grid(size))
        weft.load_sharded(stage, folder)
        for name, p in stage.named_parameters():
            assert torch.equal(whole(p), alone.get_parameter(name)), name
        save_model(stage, f"{folder}-again")
        read = type(alone).from_pretrained(f"{folder}-again")
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), read.parameters(), strict=True))


def refusals(size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    for family in FAMILIES:
        for tied in (whole_model(family, tie_word_embeddings=True), whole_model(family)):
            tied.set_output_embeddings(torch.nn.Linear(*tied.lm_head.weight.shape[::-1], bias=False))
            tied.lm_head.weight = tied.get_input_embeddings().weight  # also where the config does not say so
            with pytest.raises(ValueError, match="would share one tied embedding"):
                model_stage(tied, 0, 2, mesh)
    with pytest.raises(ValueError, match=r"got a BertForMaskedLM, expected a .*GPT2LMHeadModel.* to cut into stages"):
        model_stage(build("Bert"), 0, 1, mesh)
    for layers in ([range(1), range(2, 3)], [range(3)], [range(0), range(3)]):
        with pytest.raises(ValueError, match="expected consecutive ranges, none empty, that make up 3 layers"):
            model_stage(whole_model("GPT2"), 0, 2, mesh, layers=layers)
    stage = model_stage(whole_model("GPT2"), 0, 2, mesh)
    ids, _, ends = texts()
    with pytest.raises(ValueError, match=r"input_ids.* out of range; got .* to 97, expected 0 to 96"):
        stage(ids[0].index_fill(0, torch.tensor([3]), WORDS), cu_seqlens=ends[0])
    long = torch.ones(65, dtype=torch.int64)
    with pytest.raises(ValueError, match="a sequence has 65 tokens, the model has 64 positions"):
        stage(long, cu_seqlens=torch.tensor([0, 65]))
    short = whole_model("GPT2")
    short.transformer.wpe = torch.nn.Embedding(16, 60)
    short = model_stage(short, 0, 2, mesh)
    with pytest.raises(ValueError, match=r"position_ids.*more positions than the model has"):
        short(ids[0], cu_seqlens=ends[0])
    stage(ids[0], cu_seqlens=ends[0])
    if size > 1:
        with pytest.raises(WeftError, match="training=True"):
            stage.train(dist.get_rank() == 0)(ids[0], cu_seqlens=ends[0])
    stage.train()
    stage(ids[0], cu_seqlens=ends[0])
    # A stage is in the mode that its model was in.
    assert not any(m.training for m in model_stage(whole_model("GPT2").eval(), 1, 2, mesh).modules())


CASES = [training, every_decoder, dropout, files, refusals]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks} ranks")
def results(request):
    return checks(CASES, request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_stages(case, results) -> None:
    assert results[case.__name__] is None, results[case.__name__]
