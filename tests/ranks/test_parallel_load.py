"""Loading: each rank reads its own slices; what does not fit is told to all before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.errors import WeftError
from weft.parallel.files.load import BLOCK_BYTES, WeightFiles, load_sharded
from weft.parallel.files.save import save_model

PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "whole": [Replicate(), Replicate()],
    "last": [Replicate(), Shard(2)],
}
# 2 divides few of them, and one has less rows than there are ranks.
SHAPES = {"rows": (7, 3), "columns": (4, 5), "both": (5, 7), "twice": (3, 2), "whole": (6,), "last": (2, 3, 5)}


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()} | {"count": torch.tensor(17)}


class Bag(nn.Module):
    """Parameters and a persistent buffer; `tied` is `rows` again."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        self.register_buffer("count", torch.tensor(0))
        self.tied = self.rows


def distributed_bag(device: str, dtype: torch.dtype = torch.float32) -> Bag:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with torch.device(device):
        bag = Bag(dtype)
    for name, placements in PLACEMENTS.items():
        bag.register_parameter(
            name, nn.Parameter(distribute_tensor(bag.get_parameter(name).detach(), mesh, placements))
        )
    bag.tied = bag.rows
    return bag


def assert_holds(bag: Bag, wanted: dict[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name, placements in PLACEMENTS.items():
        got = bag.get_parameter(name)
        assert isinstance(got, DTensor)
        whole = wanted[name].to(got.dtype)
        assert torch.equal(got.to_local(), distribute_tensor(whole, mesh, placements).to_local()), name
    assert bag.tied is bag.rows
    assert int(bag.get_buffer("count")) == 17


def load_boxes(folder: str, device: str, dtype: torch.dtype) -> None:
    bag = distributed_bag(device, dtype)
    versions = [p._version for p in bag.parameters()]
    load_sharded(bag, folder)
    assert_holds(bag, values())
    if device == "cpu":  # packed copies of weights are renewed by version
        assert all(p._version > old for p, old in zip(bag.parameters(), versions, strict=True))


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.bfloat16)])
def test_every_rank_gets_its_box(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    run_ranks(load_boxes, 4, str(tmp_path), device, dtype)


def write_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Two files and their index."""
    names = sorted(tensors)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_index_and_tied_name(folder: str) -> None:
    bag = distributed_bag("meta")
    load_sharded(bag, folder)
    assert_holds(bag, values())


def test_files_with_an_index_and_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    tensors = values()
    tensors["tied"] = tensors.pop("rows")
    write_sharded(tmp_path, tensors)
    run_ranks(load_index_and_tied_name, 4, str(tmp_path))


def test_tied_weights_that_differ_in_the_files(tmp_path: Path) -> None:
    """One of them would be lost without a word. Those that are equal are fine."""
    tensors = values()
    tensors["tied"] = tensors["rows"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    run_ranks(load_index_and_tied_name, 4, str(tmp_path))
    tensors["tied"][4:] += 1.0  # on some ranks only
    save_file(tensors, tmp_path / "model.safetensors")
    problem = "rows and tied are one tied tensor in the model, but differ in the files (rank 1, 3)"
    run_ranks(refused, 4, str(tmp_path), [problem])


def unreadable_on_one_rank(folder: str) -> None:
    bag = distributed_bag("cpu")
    broken = OSError("the disk is gone") if dist.get_rank() == 2 else None
    with (
        pytest.raises((WeftError, OSError), match="the disk is gone"),
        mock.patch.object(WeightFiles, "copy_into", side_effect=broken),
    ):
        load_sharded(bag, folder)
    assert_usable()


def test_a_rank_that_cannot_read_fails_all(tmp_path: Path) -> None:
    """Nobody goes on with half a model."""
    save_file(values(), tmp_path / "model.safetensors")
    run_ranks(unreadable_on_one_rank, 4, str(tmp_path))


def refused(folder: str, lines: list[str]) -> None:
    bag = distributed_bag("meta")
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_sharded(bag, folder)
    told = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert sorted(told) == sorted(lines)
    assert all(p.is_meta for p in bag.parameters())
    assert_usable()


def assert_usable() -> None:
    """The group goes on after a refusal."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def test_all_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    tensors = values()
    del tensors["whole"], tensors["rows"]
    tensors["both"] = tensors["both"][:4].contiguous()
    tensors["count"] = torch.tensor(17.0)
    tensors["odd"] = tensors["more"] = torch.zeros(1)
    save_file({name: t.clone() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    lines = [
        "whole is missing",
        "rows or tied is missing",
        "both has shape [4, 7], expected [5, 7]",
        "count is F32, expected one that can be cast to int64",
        "more is extra: the model has no such tensor",
        "odd is extra: the model has no such tensor",
    ]
    run_ranks(refused, 4, str(tmp_path), lines)


def test_bad_files_are_listed_at_once(tmp_path: Path) -> None:
    write_sharded(tmp_path, values())
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-5])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"up": "../b.safetensors", "gone": "c.safetensors", "not_there": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_sharded(Bag(), tmp_path)
    told = str(caught.value).splitlines()[1:-1]
    assert len(told) == 4
    for expected in (
        "names the file '../b.safetensors', which is outside of its folder",
        "says that not_there is in a.safetensors, which has no such tensor",
        "b.safetensors cannot be read",
        "c.safetensors cannot be read",
    ):
        assert any(expected in line for line in told), expected


@pytest.mark.parametrize("text", ["{", "[1]", '{"weight_map": {"rows": 3}}', None])
def test_an_index_or_path_that_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"cannot be read|no weight_map|has neither"):
        load_sharded(Bag(), tmp_path)


def load_what_one_rank_lacks(folder: str, elsewhere: str) -> None:
    bag = distributed_bag("meta")
    with pytest.raises(ValueError, match=r"neither a file nor a folder \(rank 2\)"):
        load_sharded(bag, elsewhere if dist.get_rank() == 2 else folder)
    assert all(p.is_meta for p in bag.parameters())
    assert_usable()


def test_a_problem_of_one_rank_stops_all(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    run_ranks(load_what_one_rank_lacks, 4, str(tmp_path), str(tmp_path / "nowhere"))


WIDE = (3072, 16384)  # 192 MB in float32


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def peak_of_loading(file: str, dim: int) -> int:
    with torch.device("meta"):
        model = nn.Linear(WIDE[1], WIDE[0], bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(dim)]))
    load_sharded(model, file)  # once before, so that what the first call imports does not count
    del model.weight
    with torch.device("meta"):
        model.weight = nn.Parameter(distribute_tensor(torch.empty(WIDE), mesh, [Shard(dim)]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = status("VmRSS")
    load_sharded(model, file)
    return status("VmHWM") - before


@pytest.mark.parametrize("dim", [0, 1])
def test_memory_peaks_at_the_shard_and_a_block(tmp_path: Path, dim: int) -> None:
    file = tmp_path / "wide.safetensors"
    save_file({"weight": torch.ones(WIDE)}, file)
    shard = 4 * WIDE[0] * WIDE[1] // 2
    for peak in run_ranks(peak_of_loading, 2, str(file), dim):
        assert shard // 2 < peak < shard + BLOCK_BYTES + (16 << 20) < 2 * shard


def save_parts(folder: str, outcome: str) -> None:
    """Ranks 0 and 1 hold one half of the model, ranks 2 and 3 the other; then what each part was is loaded anew."""
    meshes = [dist.device_mesh.DeviceMesh("cpu", [0, 1]), dist.device_mesh.DeviceMesh("cpu", [2, 3])]
    part = dist.get_rank() // 2
    model = nn.Module()
    torch.manual_seed(part)
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("whole", Replicate())):
        tensor = distribute_tensor(torch.randn(5, 3), meshes[part], [placement])
        model.register_parameter(f"{name}{part}", nn.Parameter(tensor))
    model.register_buffer("shared", torch.arange(4))  # plain, on all ranks
    if outcome == "refused":
        with pytest.raises(ValueError, match="cannot be saved"):
            save_model(model, folder)
    else:
        save_model(model, folder, max_file_bytes=100)
    assert_usable()


def test_parts_of_a_model_are_saved_as_one(tmp_path: Path) -> None:
    run_ranks(save_parts, 4, str(tmp_path / "out"), "saved")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    wanted = {"shared": torch.arange(4)}
    for part in range(2):
        torch.manual_seed(part)
        wanted |= {f"{name}{part}": torch.randn(5, 3) for name in ("rows", "columns", "whole")}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert len(set(index["weight_map"].values())) == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")) == []


def test_a_place_that_cannot_be_written_is_told_to_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(save_parts, 4, str(tmp_path / "file" / "below"), "refused")
    save_file(values(), tmp_path / "model.safetensors")
    run_ranks(save_parts, 4, str(tmp_path), "refused")
    assert load_file(tmp_path / "model.safetensors").keys() == values().keys()


def hf_model(kind: str, tied: bool) -> Any:
    """A tiny model of Hugging Face with random weights and no dropout."""
    import transformers as t

    if kind.startswith("Llama"):
        rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 2.0, "original_max_position_embeddings": 32}  # fmt: skip
        config: Any = t.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, rope_parameters=rope, max_position_embeddings=128,
        )  # fmt: skip
    elif kind.startswith("GPT2"):
        config = t.GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    else:
        config = t.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                              intermediate_size=24)  # fmt: skip
    return getattr(t, kind)(config).eval()


@pytest.mark.parametrize(
    ("saved", "loaded", "tied"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM", False),
        ("LlamaForCausalLM", "LlamaForCausalLM", True),
        ("GPT2LMHeadModel", "GPT2LMHeadModel", True),
        ("GPT2Model", "GPT2LMHeadModel", True),  # the hub's GPT-2 has names without the prefix
        ("BertForMaskedLM", "BertForMaskedLM", True),
    ],
)
def test_a_meta_model_of_hugging_face_has_its_buffers_too(tmp_path: Path, saved: str, loaded: str, tied: bool) -> None:
    torch.manual_seed(3)
    wanted = hf_model(saved, tied)
    wanted.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = hf_model(loaded, tied)
    load_sharded(model, tmp_path)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    ids = torch.arange(40)[None] % 50
    with torch.no_grad():
        got = model.base_model(ids)[0] if saved == "GPT2Model" else model(ids)[0]
        assert torch.equal(got, wanted(ids)[0])
    if tied:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_buffer_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.ones(2), persistent=False)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the buffers table are on the meta device and in no file"):
        load_sharded(model, tmp_path)
