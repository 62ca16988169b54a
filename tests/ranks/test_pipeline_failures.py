"""What is refused before anything starts, and what happens when a stage raises, dies or stops in the middle."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from pipeline_cases import Layer, loss_fn, make_batch, make_layers
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

from weft.comm.tell import store_of
from weft.errors import PeerMismatch, WeftError
from weft.pipeline import Edge, StageFailed, schedule
from weft.pipeline.run.api import Pipeline

TIMEOUT = 3.0


class Failing(nn.Module):
    """A layer that does something terrible when it sees its n-th micro-batch, forwards or backwards."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.layer, self.how, self.at, self.seen = Layer(), how, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.seen == self.at and self.how != "raise backward":
            self.fail()
        self.seen += 1
        y = self.layer(x)
        if self.how == "raise backward" and self.seen == self.at + 1:
            y.register_hook(lambda grad: self.fail())
        return y

    def fail(self) -> None:
        if self.how.startswith("raise"):
            raise ArithmeticError("this layer has had enough")
        store_of(dist.group.WORLD).set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


def fail_in_the_middle(victim: int, how: str, meshes: list[list[int]], name: str) -> tuple[str, float]:
    """Every rank's error, and when it came."""
    me = dist.get_rank()
    layers = make_layers(len(meshes))
    place = next(stage for stage, ranks in enumerate(meshes) if me in ranks)
    if me == victim:
        layers[place] = Failing(how, at=2)
    made = schedule(name, stages=len(meshes), microbatches=6)
    pipe = Pipeline(layers, meshes, made, loss_fn=loss_fn, timeout=TIMEOUT)
    start = time.monotonic()
    text = "no error"
    try:
        for _ in range(20):  # a rank that is done with its part would otherwise wait for nothing
            pipe.step(*make_batch(6))
    except (WeftError, ArithmeticError) as error:
        text = f"{type(error).__name__}: {error}" + "".join(getattr(error, "__notes__", []))
    seconds = time.monotonic() - start
    with pytest.raises(WeftError, match="the pipeline cannot be used any more"):
        pipe.step(*make_batch(6))
    pipe.close()
    store = store_of(dist.group.WORLD)
    if how == "stop" and me != victim and store.add("gave up", 1) == sum(map(len, meshes)) - 1:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return text, seconds


CHAIN = [[0], [1], [2], [3]]


@pytest.mark.parametrize(("victim", "how", "action"), [(1, "raise", "1F2"), (3, "raise backward", "3B2")])
def test_a_stage_that_raises_ends_all(victim: int, how: str, action: str) -> None:
    results = run_ranks(fail_in_the_middle, 4, victim, how, CHAIN, "1f1b")
    does = "forward" if "F" in action else "backward"
    for rank, (text, seconds) in enumerate(results):
        kind = "ArithmeticError" if rank == victim else "StageFailed"
        assert text.startswith(f"{kind}: "), (rank, text)
        assert f"{action} (stage {victim}, {does}, micro-batch 2)" in text, (rank, text)
        assert "this layer has had enough" in text
        assert seconds < 3 * TIMEOUT


@pytest.mark.parametrize(("victim", "how"), [(0, "kill"), (3, "kill"), (1, "stop")])
def test_a_stage_that_dies_or_stops_ends_all(victim: int, how: str) -> None:
    killed = [victim] if how == "kill" else []
    results = run_ranks(fail_in_the_middle, 4, victim, how, CHAIN, "eager-1f1b", killed=killed)
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        text, seconds = result
        assert text.split(":")[0] in ("StageFailed", "PeerLost", "PeerTimeout"), (rank, text)
        # What was waited for is the victim's; who waits further away follows the chain of waits.
        assert f"rank {victim}" in text, (rank, text)
        assert f"(stage {victim}, " in text, (rank, text)
        assert "micro-batch " in text, (rank, text)
        assert seconds < 3 * TIMEOUT, (rank, seconds)


def test_a_rank_of_a_larger_mesh_dies() -> None:
    results = run_ranks(fail_in_the_middle, 4, 2, "kill", [[0], [1, 2], [3]], "1f1b", killed=[2])
    for text, _ in (results[0], results[1], results[3]):
        assert text.split(":")[0] in ("StageFailed", "PeerLost", "PeerTimeout"), text
        # Its twin has all that the others need: they may come to the end of the step, and hear of it there.
        assert "micro-batch " in text or "waited for rank 2 (stage 1) to be through with the step" in text, text


# Refusals -----------------------------------------------------------------------------------------------------


def refuse_all() -> list[str]:
    """Each rank's error for each bad call, and then a step that works."""
    layers = make_layers(3)
    two, three = schedule("1f1b", stages=2, microbatches=2), schedule("1f1b", stages=3, microbatches=2)
    me = dist.get_rank()
    cases = {
        "twice": lambda: Pipeline(layers, [0, 0], two, loss_fn=loss_fn),
        "few meshes": lambda: Pipeline(layers, [0], two, loss_fn=loss_fn),
        "stranger": lambda: Pipeline(layers, [0, 7], two, loss_fn=loss_fn),
        "no module": lambda: Pipeline({0: layers[0]}, [0, 1], two, loss_fn=loss_fn),
        "no loss": lambda: Pipeline(layers, [0, 1], two),
        "backwards": lambda: Pipeline(layers, [0, 1], two, edges=[Edge(1, 0)], loss_fn=loss_fn),
        "useless": lambda: Pipeline(layers, [0, 1, 2], three, edges=[Edge(0, 2)], loss_fn=loss_fn),
        "same name": lambda: Pipeline(
            layers, [0, 1, 2], three, edges=[Edge(0, 1), Edge(1, 2), Edge(0, 2)], loss_fn=loss_fn
        ),
        "no tensor": lambda: Pipeline(layers, [0, 1], two, output_layouts={0: {"y": [Shard(0)]}}, loss_fn=loss_fn),
        "terms": lambda: Pipeline(layers, [0, 1], two, input_layouts={1: [Partial()]}, loss_fn=loss_fn),
        "no list": lambda: Pipeline(layers, 5 if me == 1 else [0, 1], two, loss_fn=loss_fn),
        "seed": lambda: Pipeline(layers, [0, 1], two, loss_fn=loss_fn, seed=1 << 40),
        "option": lambda: Pipeline(layers, [0, 1], two, transfers="later", loss_fn=loss_fn),
        "different": lambda: Pipeline(
            layers, [0, 1], schedule("gpipe", stages=2, microbatches=2 + (me == 1)), loss_fn=loss_fn
        ),
    }
    texts = []
    for case, make in cases.items():
        try:
            make()
            texts.append(f"{case}: no error")
        except (ValueError, TypeError, PeerMismatch) as error:
            texts.append(f"{case}: {type(error).__name__}: {error}")
    with Pipeline(layers, [0, 1], two, loss_fn=loss_fn, timeout=20.0) as pipe:
        for bad in ({"batch": torch.ones(1, 3, 8)}, {"batch": [torch.ones(1, 3, 8)]}, {"batch": None}):
            if me == 0:
                with pytest.raises(ValueError, match="batch"):
                    pipe.step(**bad)
        losses = pipe.step(*make_batch(2))
        assert len(losses) == (2 if me == 1 else 0)
    return texts


EXPECTED = {
    "twice": "ValueError: stages 0 and 1 are on different ranks of the schedule, but their meshes share the ranks [0]",
    "few meshes": "ValueError: got 1 meshes, expected one for each of the 2 stages",
    "stranger": "ValueError: the meshes have the ranks [7], which are not in the process group of ranks [0, 1, 2]",
    "no module": ("ValueError: stage 1 is None on rank 1", "PeerMismatch: ranks are about to do different things"),
    "no loss": ("ValueError: rank 1 has the last stage and no loss_fn", "PeerMismatch: "),
    "backwards": "ValueError: got an edge from stage 1 to stage 0",
    "useless": "ValueError: no edge begins at stage 1",
    "same name": "ValueError: stage 2 gets 'x' from several stages",
    "no tensor": "ValueError: output_layouts has 'y' of stage 0, expected one of ['x']",
    "terms": "ValueError: input_layouts has (Partial(sum),) for 'x' of stage 1",
    "no list": ("TypeError: 'int' object is not iterable", "PeerMismatch: "),
    "seed": "ValueError: seed is 1099511627776, expected None, or a number of 32 bits",
    "option": "ValueError: transfers is 'later', expected one of overlapped, synchronous",
    "different": "PeerMismatch: ranks are about to do different things",
}


def test_refusals_come_before_anything_starts() -> None:
    for rank, texts in enumerate(run_ranks(refuse_all, 3)):
        for text, (case, message) in zip(texts, EXPECTED.items(), strict=True):
            expected = message if isinstance(message, str) else message[0 if rank == 1 else 1]
            assert text.startswith(f"{case}: {expected}"), (rank, text)


def mix_up() -> str:
    """One rank evaluates while the other trains."""
    layers = make_layers(2)
    pipe = Pipeline(layers, [0, 1], schedule("1f1b", stages=2, microbatches=2), loss_fn=loss_fn, timeout=TIMEOUT)
    call = pipe.step if dist.get_rank() == 0 else pipe.eval_step
    with pytest.raises((PeerMismatch, StageFailed)) as caught:
        call(*make_batch(2))
    pipe.close()
    return str(caught.value)


def test_a_step_meets_an_evaluation() -> None:
    for text in run_ranks(mix_up, 2):
        assert "rank 1 is in eval_step number 0 and rank 0 in step number 0" in text


def returns_nonsense(kind: str) -> str:
    """The stage's own mistakes are told with its name."""

    class Bad(nn.Module):
        def forward(self, x: Tensor) -> object:
            return {"integers": x.long(), "name": {"z": x}, "number": 3}[kind]

    layers: list[nn.Module] = [Bad(), Layer()]
    pipe = Pipeline(layers, [0, 1], schedule("1f1b", stages=2, microbatches=2), loss_fn=loss_fn, timeout=TIMEOUT)
    with pytest.raises((ValueError, StageFailed)) as caught:
        pipe.step(*make_batch(2))
    pipe.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integers", "edge 0->1 x carries torch.int64, expected a floating type"),
        ("name", "stage 0 returned ['z'], expected a tensor or a dict with 'x'"),
        ("number", "stage 0 returned a int, expected a tensor or a dict with 'x'"),
    ],
)
def test_a_stage_that_returns_nonsense(kind: str, message: str) -> None:
    for text in run_ranks(returns_nonsense, 2, kind):
        assert message in text
