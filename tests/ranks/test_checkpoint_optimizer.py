"""Checkpoints and optimisers: saving changes nothing, nor does a load that is refused, and a checkpoint goes on as the
run would have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from weft.errors import WeftError
from weft.parallel.files.checkpoint import load_checkpoint, save_checkpoint

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),  # some of its state has the shape of rows
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}


def llama() -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )
    ).train()  # fmt: skip


def make(kind: str) -> nn.Module:
    model = llama()
    if kind == "packed":
        return weft.pack(model)
    return weft.parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),))) if kind == "parallel" else model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for step in range(first, end):
        ids = torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a run goes on from, each tensor copied."""
    found: dict[str, Any] = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
    held = optimizer.state_dict()
    for i, own in held["state"].items():
        for key, value in own.items():
            found[f"{i} {key}"] = local(value).clone() if isinstance(value, Tensor) else value
    return found | {f"group {i} {k}": copy.copy(v) for i, g in enumerate(held["param_groups"]) for k, v in g.items()}


def check_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value) if isinstance(value, Tensor) else got[name] == value, name


def save_and_load_at_any_step(folder: str, kind: str) -> None:
    for name, make_optimizer in OPTIMIZERS.items():
        if name == "adafactor" and kind == "parallel":  # torch's does not take DTensors
            continue
        for steps in (0, 2):
            place = f"{folder}/{name}-{steps}"
            undisturbed = make(kind)
            other = make_optimizer(undisturbed.parameters())
            train(undisturbed, other, 0, steps + 2)

            model = make(kind)
            optimizer = make_optimizer(model.parameters())
            train(model, optimizer, 0, steps)
            before = values(model, optimizer)
            save_checkpoint(place, steps, model, optimizer)
            check_same(values(model, optimizer), before)
            assert all(p.grad is None for p in model.parameters())
            train(model, optimizer, steps, steps + 2)
            check_same(values(model, optimizer), values(undisturbed, other))

            for trained in (0, 3):  # into one that has not stepped, and one that has
                resumed = make(kind)
                again = make_optimizer(resumed.parameters())
                train(resumed, again, 50, 50 + trained)
                load_checkpoint(place, resumed, again)
                check_same(values(resumed, again), before)
                train(resumed, again, steps, steps + 2)
                check_same(values(resumed, again), values(undisturbed, other))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "packed", "parallel"])
def test_saving_changes_nothing_and_loading_goes_on(tmp_path: Path, kind: str, world: int) -> None:
    run_ranks(save_and_load_at_any_step, world, str(tmp_path), kind, timeout=240.0)


def refused(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, *texts: str) -> None:
    """What does not fit is told, and nothing has changed."""
    before = values(model, optimizer)
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_checkpoint(folder, model, optimizer)
    for text in texts:
        assert text in str(caught.value)
    check_same(values(model, optimizer), before)
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))


def refuse_all(folder: str, kind: str) -> None:
    model = make(kind)
    some = list(model.parameters())
    adamw, sgd = OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]
    train(model, adamw(some), 0, 1)
    saved: dict[str, torch.optim.Optimizer | None] = {
        "none": None,
        "sgd": sgd(some),
        "adamw": adamw(some),
        "part": adamw(some[1:]),
        "groups": torch.optim.AdamW([{"params": some[:2]}, {"params": some[2:], "lr": 0.5}]),
    }
    for name, optimizer in saved.items():
        if optimizer is not None:
            train(model, optimizer, 1, 2)
        save_checkpoint(f"{folder}/{name}", 1, model, optimizer)
    first, third = (list(dict(model.named_parameters()))[i] for i in (0, 2))
    for steps in (0, 2):
        other = make(kind)
        optimizer = adamw(other.parameters())
        train(other, optimizer, 5, 5 + steps)
        refused(f"{folder}/none", other, optimizer, "it has no optimizer state", "load it without one")
        refused(f"{folder}/sgd", other, optimizer, "saved with the optimizer SGD, and is loaded into AdamW")
        refused(f"{folder}/part", other, optimizer, f"{first} is a parameter of the optimizer, and was none")
        refused(f"{folder}/groups", other, optimizer, f"{first} and {third} are in one group", "with lr 0.001 and 0.5")
        refused(f"{folder}/adamw", other, sgd(other.parameters()), "saved with the optimizer AdamW, and is loaded into")
        strange = adamw([nn.Parameter(torch.zeros(3))])
        refused(f"{folder}/adamw", other, strange, "1 parameters that are not in the model, the first of shape [3]")
        with pytest.raises((ValueError, WeftError), match="make the optimizer from"):
            save_checkpoint(f"{folder}/strange", 1, other, strange)
        assert load_checkpoint(f"{folder}/adamw", other).step == 1  # without an optimiser it may be


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("parallel", 2)])
def test_a_refused_load_changes_nothing(tmp_path: Path, kind: str, world: int) -> None:
    run_ranks(refuse_all, world, str(tmp_path), kind, timeout=120.0)


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_checkpoint(tmp_path, 1, model)
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(other.parameters())
    refused(str(tmp_path), other, optimizer, "0.weight has shape [2, 2]", "2.bias is missing", "it has no optimizer")


def test_groups_may_be_in_another_order_and_parameters_without_a_step_stay_so(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    model, other = made(), made()
    optimizer = torch.optim.AdamW([
        {"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters()}
    ])  # fmt: skip
    model[0](torch.ones(1, 2)).sum().backward()  # the second layer takes no part
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer)
    resumed = torch.optim.AdamW([{"params": other[1].parameters()}, {"params": other[0].parameters()}])
    load_checkpoint(tmp_path, other, resumed)
    assert [group["lr"] for group in resumed.param_groups] == [0.001, 0.25]
    assert {id(p) for p in resumed.state} == {id(p) for p in other[0].parameters()}


def test_an_optimizer_of_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    empty = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"on the meta device(.|\n)*load the model without it first"):
        load_checkpoint(tmp_path, empty, torch.optim.AdamW(empty.parameters()))
    load_checkpoint(tmp_path, empty)
    load_checkpoint(tmp_path, empty, torch.optim.AdamW(empty.parameters()))
    assert torch.equal(empty.weight, model.weight)


def test_state_that_would_not_come_back_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for value in ({"rows": torch.ones(2)}, [torch.ones(2)]):
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight]["history"] = value
        with pytest.raises(ValueError, match=rf"state\.weight\.history is a {type(value).__name__}, expected tensors"):
            save_checkpoint(tmp_path, 1, model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({1: "one"}, r"extra is \{1: 'one'\}, which would come back as \{'1': 'one'\}"),
        ({"shape": (1, 2)}, r"extra\['shape'\] is \(1, 2\), which would come back as \[1, 2\]"),
        ({"a": [{"b": (1,)}]}, r"extra\['a'\]\[0\]\['b'\] is \(1,\)"),
        ({"a": {True: 1}}, r"extra\['a'\] is \{True: 1\}"),
    ],
)
def test_extra_comes_back_as_it_was_or_is_refused(tmp_path: Path, extra: Any, text: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=text):
        save_checkpoint(tmp_path, 1, model, extra=extra)
    assert not list(tmp_path.iterdir())


def test_extra_that_json_can_say_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    extra = {"a": [1, 2.5, True, None, {"b": "c"}], "inf": float("inf"), "": {}, "big": 2**70}
    save_checkpoint(tmp_path, 1, model, extra=extra)
    found = load_checkpoint(tmp_path, model).extra
    assert repr(found) == repr(extra)
    save_checkpoint(tmp_path, 2, model, extra={"nan": float("nan")})


@pytest.mark.parametrize(
    ("step", "keep", "text"),
    [
        (1.5, 2, r"step is 1\.5, expected a whole number, 0 or more"),
        (-1, 2, "step is -1, expected a whole number, 0 or more"),
        (True, 2, "step is True, expected a whole number"),
        ("1", 2, "step is '1', expected a whole number"),
        (1, 0, "keep is 0, expected a whole number, 1 or more"),
    ],
)
def test_steps_are_whole_numbers(tmp_path: Path, step: Any, keep: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        save_checkpoint(tmp_path, step, nn.Linear(2, 2), keep=keep)
