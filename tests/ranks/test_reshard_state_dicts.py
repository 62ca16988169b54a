"""State dicts of which every rank has another part, tied weights, and tensors that are written into."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import weft
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh
from weft.reference import shard
from weft.reshard import Source, reshard_state_dict

LIMIT = {"timeout": 30.0}


def value(name: str, shape: tuple[int, ...] = (7, 6)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def dtensor(name: str, mesh: DeviceMesh, placements: list[object], shape: tuple[int, ...] = (7, 6)) -> DTensor:
    """A DTensor of random values on the ranks of its mesh."""
    return distribute_tensor(value(name, shape), mesh, placements)  # type: ignore[arg-type]


def stages() -> None:
    """Each stage knows its own names only, the engine its own layouts: first as new tensors, then into a live model."""
    me = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    engine = DeviceMesh("cpu", [1, 4])
    names = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
    ways = {"embed": [Shard(0)], "layers.0": [Shard(1)], "layers.1": [Replicate()], "head": [Shard(0)]}
    mine = [0, 0, 1, 1, None][me]
    state = {name: dtensor(name, meshes[stage], ways[name]) for name, stage in names.items() if stage == mine}
    target = Mesh.of([4], hosts=[0])
    dst = {name: Layout(target, [Replicate()]) for name in names} if me == 4 else None
    found = reshard_state_dict(state or None, dst, **LIMIT)
    assert found.keys() == (names.keys() if me == 4 else set())
    assert all(torch.equal(tensor, value(name)) for name, tensor in found.items())
    assert all(
        torch.equal(state[name].to_local(), dtensor(name, meshes[names[name]], ways[name]).to_local()) for name in state
    )

    live = {name: distribute_tensor(torch.zeros(7, 6), engine, [Shard(1)]) for name in names} if me in (1, 4) else None
    before = {name: (t._version, t._local_tensor._version) for name, t in (live or {}).items()}
    found = reshard_state_dict(state or None, live, **LIMIT)
    for name, tensor in (live or {}).items():
        assert found[name] is tensor
        assert torch.equal(tensor.to_local(), value(name)[:, :3] if me == 1 else value(name)[:, 3:]), name
        assert tensor._version > before[name][0], "whoever looks at the wrapper sees it"
        assert tensor._local_tensor._version > before[name][1], "and whoever looks at the shard"


def test_stages_give_each_its_part() -> None:
    run_ranks(stages, 5)


def model_stages() -> None:
    """What the documentation shows: the stages of a pipeline into a live model on another mesh."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.parallel.stages import model_stage

    me = dist.get_rank()
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trained = LlamaForCausalLM(config)
    goal = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    torch.manual_seed(1)
    other = weft.parallelize(LlamaForCausalLM(config), init_device_mesh("cpu", (4,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = model_stage(trained, me // 2, 2, mesh["tp"])
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        before = other(input_ids=ids).logits
        weft.reshard_state_dict(dict(stage.state_dict()), dict(other.state_dict()), **LIMIT)
        after = other(input_ids=ids).logits
        torch.manual_seed(0)
        plain = LlamaForCausalLM(config)(input_ids=ids).logits
    for name, tensor in other.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, goal[name]), name
    assert not torch.allclose(before, plain, atol=1e-3)
    assert torch.allclose(after, plain, atol=1e-4), "the live model computes with what came"


def test_stages_of_a_pipeline_into_a_live_model() -> None:
    run_ranks(model_stages, 4)


def marks() -> None:
    """Whatever way the bytes took, what was written has another version, and only that."""
    me = dist.get_rank()
    for hosts in ([0, 0, 0], [0, 1, 1]):
        a, b = Mesh.of([0], hosts=hosts[:1]), Mesh.of([1, 2], hosts=hosts[1:])
        known = Source((40, 30), torch.float32, Layout(a, [Replicate()]))
        x = value("x", (40, 30)) if me == 0 else None
        for out in (torch.zeros(40, 30), torch.zeros(30, 40).t(), torch.nn.Parameter(torch.zeros(40, 30))):
            version, beside = out._version, torch.zeros(3)
            given = None if me == 0 else {"w": out}
            found = reshard_state_dict(
                None if x is None else {"w": x}, {"w": (b, [Replicate()])}, src={"w": known}, out=given, **LIMIT
            )
            assert me == 0 or found["w"] is out
            assert me == 0 or torch.equal(out, value("x", (40, 30)))
            assert (out._version > version) == (me > 0)
            assert x is None or x._version == 0
            assert beside._version == 0


def test_what_was_written_is_marked() -> None:
    run_ranks(marks, 3)


def ties() -> list[str]:
    """One memory under two names is written once too often, unless the source has one memory under both as well."""
    me, texts = dist.get_rank(), []
    mesh = DeviceMesh("cpu", [0, 1])
    x, y = dtensor("x", mesh, [Shard(0)]), dtensor("y", mesh, [Shard(0)])
    one, two = (distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)]) for _ in range(2))
    memory = torch.zeros(7, 4)
    overlap = {"a": memory[:, :3], "b": memory[:, 1:]}
    rows = {name: (mesh, [Shard(1)]) for name in "ab"}
    cases: list[tuple[dict[str, DTensor], dict[str, object], dict[str, torch.Tensor] | None]] = [
        ({"a": x, "b": x}, {"a": one, "b": one}, None),
        ({"a": x, "b": y}, {"a": one, "b": two}, None),
        ({"a": x, "b": y}, {"a": one, "b": one}, None),
        ({"a": x, "b": y}, rows, overlap if me == 1 else None),
        ({"a": x, "b": y}, {"a": x, "b": two}, None),
    ]
    for state, dst, out in cases:
        try:
            reshard_state_dict(state, dst, out=out, **LIMIT)
            texts.append("no error")
        except (ValueError, PeerMismatch) as error:
            texts.append(f"{type(error).__name__}: {error}")
    assert torch.equal(one.full_tensor(), value("x"))
    assert torch.equal(two.full_tensor(), value("y"))
    return texts


def test_tied_weights_and_memory_that_overlaps() -> None:
    first, second = run_ranks(ties, 2)
    assert first[:2] == second[:2] == ["no error", "no error"]
    for texts in (first, second):
        assert "destinations 'a' and 'b' are one memory" in texts[2]
        assert "'b' lies in the same memory as destination 'a'" in texts[3]
        assert "'a' lies in the same memory as" in texts[4]


def mismatches() -> list[str]:
    me, texts = dist.get_rank(), []
    alone = [DeviceMesh("cpu", [rank]) for rank in (0, 1)]
    both = DeviceMesh("cpu", [0, 1])
    whole = {"0.weight": value("a")}
    named = {"0.weight": (both, [Replicate()])}
    plain = Source((7, 6), torch.float32, Layout(Mesh.of([0, 1], hosts=[0, 0]), [Replicate()]))
    state = {"0.weight": distribute_tensor(value("ab"[me]), alone[me], [Replicate()])}
    good = {"0.weight": dtensor("a", both, [Shard(0)])}
    calls = {
        "one name on two stages": lambda: reshard_state_dict(state, named, **LIMIT),
        "one name of two shapes": lambda: reshard_state_dict(
            {"0.weight": dtensor("a", both, [Replicate()], (7, 6 + me))}, named, **LIMIT
        ),
        "another destination": lambda: reshard_state_dict(good, {"0.weight": (both, [Shard(me)])}, **LIMIT),
        "another shape": lambda: reshard_state_dict(
            good, {"0.weight": dtensor("a", both, [Shard(0)], (7, 5))}, **LIMIT
        ),
        "names": lambda: reshard_state_dict(good, {"0.weight": (both, [Shard(0)]), "b": (both, [Shard(0)])}, **LIMIT),
        "plain source": lambda: reshard_state_dict(whole, named, **LIMIT),
        "plain destination": lambda: reshard_state_dict(good, whole, **LIMIT),
        "strange out": lambda: reshard_state_dict(good, named, out={"b": value("b")}, **LIMIT),
        "no tensor": lambda: reshard_state_dict({**good, "_extra_state": 3}, named, **LIMIT),  # type: ignore[dict-item]
        "integer dtype": lambda: reshard_state_dict(good, named, dtype=torch.int32, **LIMIT),
        "function": lambda: (
            weft.reshard(good["0.weight"], both, [Replicate()], **LIMIT)
            if me
            else reshard_state_dict(good, named, **LIMIT)
        ),
        "two sources": lambda: reshard_state_dict(good, named, src={"0.weight": plain}, **LIMIT),
        "nothing": lambda: reshard_state_dict(None, None, **LIMIT),
    }
    for case, call in calls.items():
        try:
            call()
            texts.append(f"{case}: no error")
        except (ValueError, PeerMismatch) as error:
            texts.append(f"{case}: {type(error).__name__}: {error}")
        found = reshard_state_dict(good, named, **LIMIT)
        assert torch.equal(found["0.weight"].to_local(), value("a")), case
    return texts


EXPECTED = {
    "one name on two stages": "PeerMismatch: source of tensor '0.weight' is Source(shape=(7, 6)",
    "one name of two shapes": "PeerMismatch: source of tensor '0.weight' is Source(shape=(7, 7)",
    "another destination": "PeerMismatch: destination of tensor '0.weight' is Target(",
    "another shape": "ValueError: tensor '0.weight' is (7, 6) at the source and (7, 5) at the destination",
    "names": "ValueError: sources without a destination: [], destinations without a source: ['b']",
    "plain source": "ValueError: tensor '0.weight' is a plain tensor of shape (7, 6), expected a DTensor",
    "plain destination": "ValueError: destination '0.weight' is a plain tensor of shape (7, 6)",
    "strange out": "ValueError: out has ['b'], which dst has not",
    "no tensor": "ValueError: '_extra_state' is a int, expected a tensor",
    "integer dtype": "ValueError: dtype is torch.int32, expected a floating one",
    "function": "PeerMismatch: ranks are about to do different things",
    "two sources": "ValueError: tensor '0.weight' is Source(",
    "nothing": "ValueError: no rank has a source",
}


def test_what_does_not_fit_is_named() -> None:
    for texts in run_ranks(mismatches, 2, timeout=120.0):
        for text, (case, message) in zip(texts, EXPECTED.items(), strict=True):
            assert text.startswith(f"{case}: {message}"), text
            if "PeerMismatch" in text:
                assert "rank 0" in text, text
                assert "rank 1" in text, text


def casts() -> None:
    """`dtype` is for floating tensors, `cast` takes each to what it is written into."""
    me = dist.get_rank()
    mesh, here = DeviceMesh("cpu", [0, 1]), Mesh.of([0, 1], hosts=[0, 0])
    state = {
        "w": dtensor("w", mesh, [Shard(0)]),
        "steps": distribute_tensor(torch.arange(6), mesh, [Shard(0)]),
        "mask": distribute_tensor(torch.arange(6) % 3 == 0, mesh, [Shard(0)]),
    }
    dst = {name: (here, [Replicate()]) for name in state}
    found = reshard_state_dict(state, dst, dtype=torch.bfloat16, **LIMIT)
    assert [found[name].dtype for name in state] == [torch.bfloat16, torch.int64, torch.bool]
    assert torch.equal(found["w"], value("w").bfloat16())
    out = {
        "w": torch.zeros(7, 6, dtype=torch.float64),
        "steps": torch.zeros(6),
        "mask": torch.zeros(6, dtype=torch.int8),
    }
    reshard_state_dict(state, dst, out=out, cast=True, **LIMIT)
    assert torch.equal(out["w"], value("w").double())
    assert torch.equal(out["steps"], torch.arange(6.0))
    assert torch.equal(out["mask"], (torch.arange(6) % 3 == 0).to(torch.int8))
    with pytest.raises((ValueError, PeerMismatch), match="destination of tensor 'w' is Target"):
        reshard_state_dict(
            state, dst, out={**out, "w": out["w"].to(torch.float32) if me else out["w"]}, cast=True, **LIMIT
        )
    assert shard(value("w"), Layout(here, [Shard(0)]))[me].shape == state["w"].to_local().shape


def test_casts_of_state_dicts() -> None:
    run_ranks(casts, 2)
