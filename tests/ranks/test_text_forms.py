"""Texts in every form, in models that ranks share: `parallelize`, stages and `generate` compute each as if it were
alone, and give it back in the form that came in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from weft.packed import PackedBatch
from weft.parallel.stages import model_stage, stage_layouts

LENGTHS = [7, 1, 4, 9, 1]
TOKENS = sum(LENGTHS)
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64, "pad_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip


def built(name: str, head: str) -> Any:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**SIZES)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0 if p.dim() > 1 else 0.5, 0.2)
    return model


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def some_texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 50, (n,), generator=generator) for n in LENGTHS]


def labels_of(texts: list[Tensor], *, causal: bool) -> list[Tensor]:
    return [torch.cat([torch.tensor([-100]), t[1:]]) if causal else (t * 3) % 50 for t in texts]


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def padded(parts: list[Tensor], fill: int, side: str) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill, padding_side=side)


def forms(texts: list[Tensor], labels: list[Tensor]) -> dict[str, tuple[dict[str, Any], Any]]:
    """For each form a call with labels, and what makes its outputs [T, ...]."""
    batch = PackedBatch.from_list(texts)
    row = batch.to_flattened()
    ids, flat = {"input_ids": row["input_ids"], "labels": torch.cat(labels)[None]}, (lambda out: out[0])
    offsets = {k: row[k] for k in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    numbers = torch.arange(5).repeat_interleave(torch.tensor(LENGTHS))[None]
    found: dict[str, tuple[dict[str, Any], Any]] = {
        "packed": ({"input_ids": batch, "labels": torch.cat(labels)}, lambda out: out),
        "nested": ({"input_ids": nested(texts), "labels": nested(labels)}, lambda out: out.values()),
        "positions": ({**ids, "position_ids": row["position_ids"]}, flat),
        "offsets": ({**ids, **offsets}, flat),
        "numbers": ({**ids, "seq_idx": numbers}, flat),
        "all": ({**ids, **offsets, "seq_idx": numbers, "position_ids": row["position_ids"]}, flat),
    }
    mask = padded([torch.ones(n) for n in LENGTHS], 0, "right").long()
    rows = {"input_ids": padded(texts, 1, "right"), "labels": padded(labels, -100, "right"), "attention_mask": mask}
    found["padded"] = (rows, lambda out: out[mask.bool()])
    return found


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def loss_of(logits: Tensor, texts: list[Tensor], labels: list[Tensor], *, causal: bool) -> Tensor:
    targets = torch.cat(labels)
    if causal:
        targets = torch.cat([targets[1:], torch.tensor([-100])])
    return torch.nn.functional.cross_entropy(logits, targets)


def parallel() -> None:
    texts = some_texts()
    for name, head in (("Llama", "ForCausalLM"), ("GPT2", "LMHeadModel"), ("Bert", "ForMaskedLM")):
        causal, alone = name != "Bert", built(name, head)
        shared = weft.parallelize(copy.deepcopy(alone), mesh())
        labels = labels_of(texts, causal=causal)
        with torch.no_grad():
            one_by_one = torch.cat([shared(t[None]).logits[0] for t in texts])
            close(one_by_one, torch.cat([alone(t[None]).logits[0] for t in texts]))
        for form, (call, flat) in forms(texts, labels).items():
            given = {key: value for key, value in call.items() if key != "labels"}
            with torch.no_grad():
                got = shared(**given).logits
                assert torch.equal(flat(got), one_by_one), (name, form)
                if form in ("packed", "nested") and causal:
                    last = shared(**given, logits_to_keep=1).logits
                    ends = torch.tensor(LENGTHS).cumsum(0) - 1
                    assert torch.equal(flat(last), one_by_one[ends]), (name, form)
            states = shared(**given, output_hidden_states=True).hidden_states
            want = torch.cat([alone(t[None], output_hidden_states=True).hidden_states[-1][0] for t in texts])
            close(flat(states[-1]), want)
            output = shared(**call)
            close(output.loss, loss_of(one_by_one, texts, labels, causal=causal))
            assert isinstance(output.logits, DTensor)
            output.loss.backward()
        with pytest.raises(ValueError, match="position_ids and cu_seq_lens_q say different things"):
            shared(**{**forms(texts, labels)["all"][0], "position_ids": torch.arange(TOKENS)[None]})
        with pytest.raises(ValueError, match="labels and input_ids say different things"):
            shared(input_ids=nested(texts), labels=nested(labels[::-1]))
    alone = built("Bert", "ForSequenceClassification")
    shared = weft.parallelize(copy.deepcopy(alone), mesh())
    with torch.no_grad():
        want = torch.cat([alone(t[None]).logits for t in texts])
        close(shared(nested(texts)).logits, want)
        close(shared(PackedBatch.from_list(texts)).logits, want)


def prompts() -> None:
    texts, shared = some_texts(), weft.parallelize(built("Llama", "ForCausalLM"), mesh())
    want = weft.generate(shared, [t.tolist() for t in texts], max_new_tokens=5)
    assert weft.generate(shared, [texts[3]], max_new_tokens=5) == want[3:4]
    calls = {form: call for form, (call, _) in forms(texts, labels_of(texts, causal=True)).items()}
    mask = padded([torch.ones(n) for n in LENGTHS], 0, "left").long()
    calls["left"] = {"input_ids": padded(texts, 1, "left"), "attention_mask": mask}
    for form, call in calls.items():
        assert weft.generate(shared, call, max_new_tokens=5) == want, form
    for whole in (PackedBatch.from_list(texts), nested(texts)):
        assert weft.generate(shared, whole, max_new_tokens=5) == want
    with pytest.raises(ValueError, match="count the tokens of each from 0"):
        weft.generate(shared, {**calls["positions"], "position_ids": calls["positions"]["position_ids"] + 1},
                      max_new_tokens=5)  # fmt: skip
    with pytest.raises(ValueError, match="prompts came with pixel_values"):
        weft.generate(shared, {**calls["padded"], "pixel_values": mask}, max_new_tokens=5)


def stages() -> None:
    """One stage on two ranks, and two stages of one rank each, told as Hugging Face's model would be."""
    texts, alone = some_texts(), built("Llama", "ForCausalLM")
    labels = labels_of(texts, causal=True)
    with torch.no_grad():
        logits = torch.cat([alone(t[None]).logits[0] for t in texts])
    want = loss_of(logits, texts, labels, causal=True)
    count = sum(int((each != -100).sum()) for each in labels)
    every, me = forms(texts, labels), dist.get_rank()
    alike = model_stage(copy.deepcopy(alone), 0, 1, mesh())
    mine = alike.config.vocab_size // dist.get_world_size()
    with torch.no_grad():
        for call, flat in every.values():
            given = {key: value for key, value in call.items() if key not in ("input_ids", "labels")}
            out = alike(call["input_ids"], **given)
            close(flat(out), logits[:, me * mine : (me + 1) * mine])
            close(alike(call["input_ids"], **given, labels=call["labels"]) / count, want)
    rows, offsets = every["padded"][0], {"cu_seqlens": torch.tensor([0, TOKENS])}
    with pytest.raises(ValueError, match="got cu_seqlens, and attention_mask"):
        alike(rows["input_ids"], attention_mask=rows["attention_mask"], **offsets)
    with pytest.raises(ValueError, match="a stage was told colour"):
        alike(rows["input_ids"], colour=3)
    with pytest.raises(ValueError, match=r"cu_seqlens and the nested tensor say different things"):
        alike(nested(texts), **offsets)
    if dist.get_world_size() != 2:
        return
    made = weft.schedule("1f1b", stages=2, microbatches=2)
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))["tp"]
    stage = model_stage(copy.deepcopy(alone), me, 2, own)
    with weft.Pipeline({me: stage}, [0, 1], made, loss_fn=lambda summed, n: summed / n, **stage_layouts(2)) as pipe:
        for form in ("padded", "positions", "offsets", "numbers", "all", "packed", "nested"):
            call = dict(every[form][0])
            if form == "packed":  # of which the last stage hears by its labels
                call["labels"] = PackedBatch.from_list(labels)
            told = {key: [value] * 2 for key, value in call.items() if key != "input_ids"}
            losses = pipe.step([call["input_ids"]] * 2, [torch.tensor(count)] * 2, **told)
            if me == 1:
                close(losses, want.expand(2))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("calls", [parallel, prompts, stages])
def test_forms(calls: Any, ranks: int) -> None:
    run_ranks(calls, ranks, timeout=200.0)
