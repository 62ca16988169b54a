"""Checkpoints: whole or not there, whatever is killed when; and read at another number of ranks."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from weft.errors import PeerTimeout, WeftError
from weft.parallel.files import checkpoint_folder
from weft.parallel.files.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint

SHAPES = {"up": (7, 4), "down": (4, 7), "norm": (4,)}
PLACEMENTS: dict[str, Any] = {"up": Shard(0), "down": Shard(1), "norm": Replicate()}


class Block(nn.Module):
    """x + down(relu(up(norm * x))), on whole tensors: what is tested is where the parameters lie."""

    def __init__(self, mesh: DeviceMesh | None, seed: int = 0, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, device=device)
            value = whole if mesh is None else distribute_tensor(whole, mesh, [PLACEMENTS[name]])
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        up, down, norm = (_whole(getattr(self, name)) for name in SHAPES)
        return x + torch.relu((x * norm) @ up.T) @ down.T


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(device: str = "cpu") -> tuple[Block, torch.optim.Optimizer]:
    model = Block(init_device_mesh("cpu", (dist.get_world_size(),)), seed=dist.get_world_size(), device=device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def save_then_go_on(folder: str) -> list[float]:
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    save_checkpoint(folder, 3, model, optimizer, {"documents": [1, 2]})
    return train(model, optimizer, 3, 6)


def load_and_go_on(folder: str) -> list[float]:
    model, optimizer = make()
    found = load_checkpoint(folder, model, optimizer)
    assert (found.step, found.extra) == (3, {"documents": [1, 2]})
    empty, _ = make("meta")  # gets its memory first
    load_checkpoint(folder, empty)
    for name in SHAPES:
        assert torch.equal(getattr(empty, name).to_local(), getattr(model, name).to_local())
    return train(model, optimizer, 3, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A checkpoint of two ranks after step 3, and the losses of the steps after it."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(save_then_go_on, 2, folder)[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_goes_on_at_another_number_of_ranks(saved: tuple[str, list[float]], world: int) -> None:
    folder, wanted = saved
    for losses in run_ranks(load_and_go_on, world, folder):
        if world == 2:
            assert losses == wanted
        assert losses == pytest.approx(wanted, rel=1e-6)


def save_stages(folder: str) -> None:
    """Two stages of two ranks each, with names of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
    stage = dist.get_rank() // 2
    model = nn.ModuleDict({f"{stage}": Block(mesh["tensor"], seed=stage)})
    optimizer = torch.optim.AdamW(model.parameters())
    train(model[f"{stage}"], optimizer, 0, 1)
    save_checkpoint(folder, 1, model, optimizer)
    torch.save({n: _whole(p) for n, p in model.named_parameters()}, f"{folder}/whole-{stage}.{dist.get_rank()}")


def load_as_one(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ModuleDict({"0": Block(mesh, seed=7), "1": Block(mesh, seed=8)})
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(folder, model, optimizer)
    wanted = torch.load(f"{folder}/whole-0.0") | torch.load(f"{folder}/whole-1.2")
    for name, p in model.named_parameters():
        assert torch.equal(_whole(p), wanted[name])
        assert optimizer.state[p]["step"] == 1
    half = nn.ModuleDict({"0": Block(mesh)})
    with pytest.raises(ValueError, match=r"1\.down is extra(.|\n)*1\.norm is extra(.|\n)*1\.up is extra"):
        load_checkpoint(folder, half)


def test_stages_are_loaded_as_one_model(tmp_path: Path) -> None:
    run_ranks(save_stages, 4, str(tmp_path))
    run_ranks(load_as_one, 2, str(tmp_path))


def test_what_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    model = Block(None)
    model.register_parameter("old", nn.Parameter(torch.zeros(2)))
    save_checkpoint(tmp_path, 1, model)
    other = Block(None, seed=1)
    other.norm = nn.Parameter(torch.zeros(5))
    other.register_parameter("new", nn.Parameter(torch.zeros(2)))
    before = other.up.detach().clone()
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_checkpoint(tmp_path, other)
    told = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(told) == [
        "new is missing",
        "norm has shape [4], expected [5]",
        "old is extra: the model has no such tensor",
    ]
    assert torch.equal(other.up, before)


def test_a_damaged_checkpoint_and_none_at_all(tmp_path: Path) -> None:
    model = Block(None)
    assert not has_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        load_checkpoint(tmp_path, model)
    path = save_checkpoint(tmp_path, 4, model)
    with pytest.raises(ValueError, match=r"no checkpoint of step 5; there are: step-00000004"):
        load_checkpoint(tmp_path, model, step=5)
    (path / ".metadata").write_bytes(b"\x80\x04none")
    with pytest.raises(ValueError, match="metadata cannot be read"):
        load_checkpoint(tmp_path, model)


def test_the_newest_are_kept_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    model = Block(None)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, model, keep=2)
    with torch.no_grad():
        model.norm.fill_(5.0)
    save_checkpoint(tmp_path, 2, model, keep=2)  # a run that was resumed at 1
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002", "step-00000002.1", "step-00000003"]
    other = Block(None)
    assert load_checkpoint(tmp_path, other).step == 2
    assert other.norm.tolist() == [5.0] * 4
    assert load_checkpoint(tmp_path, other, step=3).step == 3
    assert other.norm.tolist() != [5.0] * 4


class _Killed(BaseException):
    """Ends a save as a kill would: nothing in weft catches it."""


_CALLS = ((Path, "mkdir"), (Path, "rename"), (Path, "replace"), (Path, "open"), (os, "fsync"), (shutil, "rmtree"))


def save_until(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves step 1, then begins to save step 2 and ends at the `at`-th of the calls that change the directory."""
    model = Block(None)
    save_checkpoint(folder, 1, model, extra={"norm": model.norm.tolist()})
    calls = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise _Killed
            return original(*args, **kwargs)

        return call

    with torch.no_grad():
        model.norm.fill_(2.0)
    with monkeypatch.context() as patch:
        for owner, name in _CALLS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        # torch reports what ends its own part as an error of the rank.
        with suppress(_Killed, WeftError):
            save_checkpoint(folder, 2, model, extra={"norm": model.norm.tolist()}, keep=1)


def test_an_end_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for at in range(1, 60):
        folder = tmp_path / str(at)
        save_until(folder, at, monkeypatch)
        model = Block(None, seed=9)
        found = load_checkpoint(folder, model)
        assert model.norm.tolist() == found.extra["norm"]
        assert found.step == (2 if found.extra["norm"] == [2.0] * 4 else 1)
        steps.append(found.step)
        is_through = not (folder / "step-00000001").exists()
        save_checkpoint(folder, 3, model)  # and what was left behind does not matter
        assert not list(folder.glob(".*"))
        if is_through:
            break
    assert steps == sorted(steps)
    assert {1, 2} == set(steps)
    assert 8 < len(steps) < 59


def test_a_writer_leaves_what_others_write_alone(tmp_path: Path) -> None:
    folder = checkpoint_folder.CheckpointFolder(tmp_path)
    first = folder.begin(1)
    (first.path / "data").write_text("first")
    second = folder.begin(1)
    assert second.path != first.path
    assert (first.path / "data").read_text() == "first"
    (second.path / "data").write_text("second")
    paths = [folder.publish(each.path, 1, "{}", keep=2) for each in (second, first)]
    for each in (first, second):
        each.end(published=True)
    assert [path.name for path in paths] == ["step-00000001", "step-00000001.1"]
    assert [(path / "data").read_text() for path in paths] == ["second", "first"]
    assert (tmp_path / "latest").read_text().strip() == "step-00000001.1"
    assert not list(tmp_path.glob(".*"))


def begin_and_be_killed(folder: str) -> None:
    checkpoint_folder.CheckpointFolder(Path(folder)).begin(7)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.part").mkdir()  # of a version without locks
    run_ranks(begin_and_be_killed, 1, str(tmp_path), killed=[0])
    assert len(list(tmp_path.glob(".step-00000007.*"))) == 2
    save_checkpoint(tmp_path, 1, Block(None))
    assert not list(tmp_path.glob(".*"))


def test_a_directory_is_claimed_by_one(tmp_path: Path) -> None:
    folder = checkpoint_folder.CheckpointFolder(tmp_path / "run")
    with folder.claimed():
        with pytest.raises(ValueError, match=rf"in use by another run, process {os.getpid()} of this host"):
            folder.claimed().__enter__()
        save_checkpoint(folder.root, 1, Block(None))  # its own saves go on
    with folder.claimed():
        pass
    assert not list(folder.root.glob(".*"))


def test_names_from_other_ranks_stay_in_the_directory(tmp_path: Path) -> None:
    for name in ("../x", ".step-1.part", "/etc", ".step-00000001.zzzzzzzz.part", ""):
        with pytest.raises(ValueError, match="for a checkpoint under way"):
            checkpoint_folder.CheckpointFolder(tmp_path).part(name)


def die_in_the_middle(folder: str) -> float:
    model, optimizer = make()
    save_checkpoint(folder, 1, model, optimizer)
    if dist.get_rank() == 0:
        checkpoint_folder.CheckpointFolder.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match="rank 0 at step 'said' of save_checkpoint"):
        save_checkpoint(folder, 2, model, optimizer, timeout=2.0)
    return time.monotonic() - start


def test_a_rank_killed_while_saving_ends_the_others_within_the_deadline(tmp_path: Path) -> None:
    killed, seconds = run_ranks(die_in_the_middle, 2, str(tmp_path), killed=[0])
    assert killed == signal.SIGKILL
    assert seconds < 30.0  # not the 60 of the harness
    model = Block(None, seed=9)
    assert load_checkpoint(tmp_path, model).step == 1


def one_rank_cannot_write(folder: str) -> None:
    model, optimizer = make()
    save_checkpoint(folder, 1, model, optimizer)
    if dist.get_rank() == 0:
        checkpoint_folder.CheckpointFolder.publish = _no_space  # type: ignore[method-assign]
    with pytest.raises((WeftError, OSError), match="No space left"):
        save_checkpoint(folder, 2, model, optimizer)
    assert load_checkpoint(folder, model, optimizer).step == 1


def _no_space(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_to_all(tmp_path: Path) -> None:
    run_ranks(one_rank_cannot_write, 2, str(tmp_path))


def move_live() -> None:
    """From two ranks to all three without a file."""
    first, every = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    state = dict(Block(first).state_dict()) if dist.get_rank() < 2 else None
    target = Block(every, seed=5)
    weft.reshard_state_dict(state, dict(target.state_dict()))
    wanted = Block(None)
    for name in SHAPES:
        assert torch.equal(_whole(getattr(target, name)), getattr(wanted, name))


def test_a_live_model_moves_to_another_mesh() -> None:
    run_ranks(move_live, 3)


def save_at_odds(folder: str) -> None:
    """Ranks that were told different things: without a comparison, rank 0 would publish what others did not write."""
    model, _ = make()
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"ranks save different steps: \[1, 2\]"):
        save_checkpoint(folder, 1 + rank, model)
    odd = {"rng": torch.ones(1)} if rank == 1 else {}
    with pytest.raises((WeftError, ValueError), match="extra holds what JSON cannot say"):
        save_checkpoint(folder, 1, model, extra=odd)
    with pytest.raises((WeftError, ValueError), match="is not what rank 0 sees there"):
        save_checkpoint(f"{folder}/{rank}", 1, model)
    assert not has_checkpoint(folder)
    save_checkpoint(folder, 1, model)


def test_ranks_at_odds_save_nothing(tmp_path: Path) -> None:
    run_ranks(save_at_odds, 2, str(tmp_path))
    assert has_checkpoint(tmp_path)
