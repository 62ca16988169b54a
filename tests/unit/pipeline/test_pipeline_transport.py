"""The pure parts of running a pipeline: routes, placing, headers, buffers, micro-batches, how models are cut."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing as mp
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM

from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh, ShardSizes
from weft.pipeline import SCHEDULES, Direction, Edge, StageGraph, chain, lower, schedule
from weft.pipeline.cut import cut, cut_layers
from weft.pipeline.models import GPTConfig, gpt_stage
from weft.pipeline.run.microbatch import split_batch, split_keywords
from weft.pipeline.transport.connections import FailureStore
from weft.pipeline.transport.exchange import HEADER_LENGTH, Header, is_cut, whole_shape
from weft.pipeline.transport.routes import Placing, Route, Routes, join
from weft.pipeline.transport.threads import ArrivalBuffers

GRAPH = StageGraph(4, (*chain(4).edges, Edge(0, 2, "skip"), Edge(0, 3, "skip")))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_channels_are_numbered_alike_for_training_and_evaluation(name: str) -> None:
    made = schedule(name, stages=4, microbatches=6)
    train, evaluate = join(lower(made, GRAPH), lower(made.forward_only(), GRAPH))
    assert train.first_channel == evaluate.first_channel
    numbers = [train.first_channel[route] + i for route, count in train.channels.items() for i in range(count)]
    assert numbers == list(range(train.total))
    for routes in (train, evaluate):
        for route, messages in routes.of.items():
            assert [message.number for message in messages] == list(range(len(messages)))
            assert all(message.channel == message.number % routes.channels[route] for message in messages)
        assert {message.transfer for messages in routes.of.values() for message in messages} == set(
            routes.lowered.transfers
        )


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "eager-1f1b+delay", "zero-bubble"])
def test_a_channel_is_free_whenever_the_schedule_sends(name: str) -> None:
    """By the orders of both sides: transfer n+k exists only after transfer n is used."""
    made = schedule(name, stages=4, microbatches=9)
    routes = Routes(lower(made, GRAPH))
    for route, messages in routes.of.items():
        count = routes.channels[route]
        producer = made.ranks[made.rank_of(route.producer)]
        for n, message in enumerate(messages[count:]):
            old, new = messages[n].transfer.microbatch, message.transfer.microbatch
            gradient = [
                a for a in producer if a.stage == route.producer and a.microbatch == old and a.kind.value in "BI"
            ]
            forward = [a for a in producer if a.stage == route.producer and a.microbatch == new and a.kind.value == "F"]
            assert producer.index(gradient[0]) < producer.index(forward[0]), (route, old, new)


def test_a_route_whose_tensors_are_passed_on() -> None:
    routes = Routes(lower(schedule("1f1b", stages=4, microbatches=2), GRAPH))
    assert routes.passed_on
    for transfer, messages in routes.passed_on.items():
        for message in messages:
            assert message.transfer.source == transfer.target
            assert message.route.direction is Direction.FORWARD
            assert message.transfer.source != message.transfer.producer


# Placing ------------------------------------------------------------------------------------------------------


def meshes(*ranks: list[int]) -> list[Mesh]:
    return [Mesh.of(each, hosts=each) for each in ranks]


def test_layouts_of_a_route() -> None:
    made = schedule("1f1b", stages=3, microbatches=2)
    graph = StageGraph(3, (Edge(0, 1), Edge(1, 2), Edge(0, 1, "skip"), Edge(0, 2, "skip")))
    placing = Placing.of(
        made,
        graph,
        meshes([0, 1], [2], [3, 4]),
        {2: {"skip": [Shard(0)]}},
        {0: {"skip": [Partial()], "x": [Shard(1)]}},
    )
    assert placing.layouts(Route(0, "x", 0, 1)).src.placements == (Shard(1),)
    assert placing.layouts(Route(0, "skip", 1, 2)).src.mesh.ranks == (2,)
    back = placing.layouts(Route(0, "skip", 2, 0))
    assert (back.src.placements, back.dst.placements) == ((Shard(0),), (Replicate(),))
    assert placing.schedule_rank(4) == 2
    assert placing.schedule_rank(9) is None


def test_stages_of_one_rank_share_a_mesh() -> None:
    made = schedule("interleaved-1f1b", stages=4, microbatches=2)
    same = meshes([0], [1], [0], [1])
    assert Placing.of(made, chain(4), same).ranks_of(2) == (0,)
    with pytest.raises(ValueError, match="expected the same mesh"):
        Placing.of(made, chain(4), meshes([0], [1], [2], [1]))
    graph = StageGraph(4, (*chain(4).edges, Edge(0, 2, "skip")))
    wide = meshes([0, 1], [2, 3], [0, 1], [2, 3])
    with pytest.raises(ValueError, match="expected the same placements, as nothing is sent there"):
        Placing.of(made, graph, wide, {2: {"skip": [Shard(0)]}})


# Headers, buffers, batches ------------------------------------------------------------------------------------


def test_whole_shapes() -> None:
    grid = Mesh.of([[0, 1], [2, 3]], hosts=[[0, 0], [1, 1]])
    layout = Layout(grid, [Shard(0), Shard(1)])
    shards = {rank: layout.local_shape((5, 3), rank) for rank in range(4)}
    assert whole_shape(layout, shards, "x") == (5, 3)
    assert is_cut(layout)
    assert not is_cut(Layout(grid, [Replicate(), Partial()]))
    row = Mesh.of([0, 1], hosts=[0, 0])
    with pytest.raises(ValueError, match="give ShardSizes in layouts="):
        whole_shape(Layout(row, [Shard(0)]), {0: (1, 4), 1: (4, 4)}, "x")
    assert whole_shape(Layout(row, [ShardSizes(0, (1, 4))]), {0: (1, 4), 1: (4, 4)}, "x") == (5, 4)
    with pytest.raises(ValueError, match="expected up to 8 dims"):
        Header(0, True, torch.float32, (1,) * 9).to_tensor()


@given(
    st.lists(
        st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 20), min_size=HEADER_LENGTH, max_size=HEADER_LENGTH
    )
)
@settings(max_examples=500, deadline=None)
def test_headers_from_peers_are_checked(numbers: list[int]) -> None:
    """Whatever comes is refused by name, or is a tensor that there could be and that says the same again."""
    given = torch.tensor(numbers, dtype=torch.int64)
    try:
        header = Header.from_tensor(given)
    except PeerMismatch as error:
        assert "a peer announces a tensor as" in str(error)  # noqa: PT017
    else:
        assert header.to_tensor().tolist() == numbers
        assert all(size >= 0 for size in header.shape)
        assert math.prod(header.shape) * header.dtype.itemsize <= 1 << 40


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, -1), (1, 2), (2, -1), (2, 12), (3, -1), (3, 9), (4, -1), (4, 1 << 62), (7, 5)],
)
def test_a_header_with_one_bad_number(place: int, value: int) -> None:
    numbers = Header(3, True, torch.float64, (4, 5)).to_tensor()
    numbers[place] = value
    with pytest.raises(PeerMismatch, match="a peer announces"):
        Header.from_tensor(numbers)


def test_shards_of_different_dims_are_refused() -> None:
    row = Mesh.of([0, 1], hosts=[0, 0])
    with pytest.raises(ValueError, match="with the same number of dims"):
        whole_shape(Layout(row, [Shard(0)]), {0: (2, 3), 1: (2,)}, "x")


def test_a_store_that_hangs_costs_one_thread() -> None:
    """The server of a store is stopped; a rank that asks it says that it does not know, and goes on."""
    ours, theirs = mp.get_context("spawn").Pipe()
    server = mp.get_context("spawn").Process(target=serve_store, args=(theirs,), daemon=True)
    server.start()
    try:
        failures = FailureStore(dist.TCPStore("127.0.0.1", ours.recv(), is_master=False), rank=0)
        assert failures.read() is None
        assert failures.post("stage 3 fell over") == "stage 3 fell over"
        assert failures.read() == "stage 3 fell over"
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # its threads stop one by one
        for _ in range(4):
            assert failures.read() is None
        asking = [thread for thread in threading.enumerate() if thread.name == "weft-pipeline-failures"]
        assert len(asking) == 1
        os.kill(server.pid, signal.SIGCONT)
        asking[0].join(10.0)
        assert failures.read() == "stage 3 fell over"
    finally:
        server.kill()
        server.join()


def serve_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(60)


def test_buffers_are_used_again_only_when_nothing_refers_to_them() -> None:
    buffers = ArrivalBuffers()
    x = buffers.take((4, 4), torch.float32)
    leaf = x.detach().requires_grad_()
    y = (leaf * leaf).sum()  # keeps leaf
    address = x.data_ptr()
    del x, leaf
    assert buffers.take((4, 4), torch.float32).data_ptr() != address
    y.backward()
    del y
    again = buffers.take((16,), torch.float32)
    assert buffers.count == 2
    view = again[3:]
    del again
    assert buffers.take((4, 4), torch.float32).data_ptr() != view.data_ptr() - 12
    assert buffers.take((0, 3), torch.bfloat16).shape == (0, 3)
    assert buffers.take((), torch.int64).shape == ()


def keep_saved(x: torch.Tensor) -> object:
    leaf = x.detach().requires_grad_()
    return (leaf * leaf).sum()  # saves the leaf for its backward pass


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "storage": lambda x: x.untyped_storage(),
    "typed storage": lambda x: x.storage(),
    "view": lambda x: x[1:, ::2],
    "saved tensor": keep_saved,
    "numpy": lambda x: x.numpy()[1:],
    "dlpack": lambda x: x.__dlpack__(),
    "numpy from dlpack": lambda x: np.from_dlpack(x),
    "tensor from dlpack": lambda x: torch.from_dlpack(x),
    "alias": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (4,)),
    "closure": lambda x: lambda: x,
}


@pytest.mark.parametrize("how", KEEPERS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_memory_that_can_be_reached_is_not_handed_out_again(how: str) -> None:
    buffers = ArrivalBuffers()
    x = buffers.take((4, 4), torch.float32)
    address = x.untyped_storage().data_ptr()
    kept = KEEPERS[how](x)
    del x
    gc.collect()
    later = [buffers.take((4, 4), torch.float32) for _ in range(3)]
    assert address not in [each.untyped_storage().data_ptr() for each in later]
    del kept
    gc.collect()
    assert buffers.take((4, 4), torch.float32).untyped_storage().data_ptr() == address
    assert buffers.count == 4


def test_memory_of_sizes_that_no_longer_come_is_let_go() -> None:
    buffers = ArrivalBuffers()
    for length in range(1, 200):
        kept = [buffers.take((length, 64), torch.float32) for _ in range(3)]
        del kept
    assert buffers.nbytes <= 2 * 3 * 1.13 * 199 * 64 * 4


def test_batches() -> None:
    words = split_keywords({"a": torch.arange(5), "b": None, "c": [1, 2]}, 2)
    assert [len(word["a"]) for word in words] == [3, 2]
    assert [(word["b"], word["c"]) for word in words] == [(None, 1), (None, 2)]
    for bad in (torch.tensor(1), torch.ones(1, 2), [1], 7):
        with pytest.raises(ValueError, match="batch"):
            split_batch(bad, 2, "batch")


def test_a_cut_is_the_best_that_there_is() -> None:
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(2, 7)
        stages = rng.randint(1, count)
        costs, speeds = [rng.randint(0, 9) for _ in range(count)], [rng.choice((0.5, 1.0, 2.0)) for _ in range(stages)]

        def slowest(runs: list[range], costs: list[int] = costs, speeds: list[float] = speeds) -> float:
            return max(sum(costs[i] for i in run) / speed for run, speed in zip(runs, speeds, strict=True))

        every = (
            [range(a, b) for a, b in itertools.pairwise((0, *ends, count))]
            for ends in itertools.combinations(range(1, count), stages - 1)
        )
        assert slowest(cut_layers(costs, stages, speeds=speeds)) == min(map(slowest, every))


def test_a_model_with_a_large_vocabulary_is_cut_by_cost() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(vocab_size=1_600, **sizes, tie_word_embeddings=False))
    layer, head = 4 * 32 * 32 + 3 * 32 * 64, 1_600 * 32  # five layers' worth
    assert [len(run) for run in cut(large, 4)] == [2, 2, 3, 1]  # not 2, 2, 2, 2: the head alone is five
    assert cut(large, 4) == cut(large, 4, [0.0, *[layer] * 8, head])
    assert [len(run) for run in cut(large, 2, speeds=[1.0, 10.0])] == [1, 7]
    with pytest.raises(
        ValueError, match=r"got 8 costs; expected those of 8 layers, of what comes before .* 10 numbers"
    ):
        cut(large, 4, [1.0] * 8)
    with pytest.raises(ValueError, match=r"got a Linear; expected an nn\.Sequential, or a language model"):
        cut(torch.nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match=r"got the speeds \[1\.0\]; expected one above 0 for each of the 2 stages"):
        cut(large, 2, speeds=[1.0])


def test_cuts_are_balanced() -> None:
    assert cut_layers([1.0] * 6, 4) == [range(1), range(1, 2), range(2, 4), range(4, 6)]
    assert cut_layers([1, 1, 4, 1, 1], 3) == [range(2), range(2, 3), range(3, 5)]
    with pytest.raises(ValueError, match="expected 1 to 2"):
        cut_layers([1.0, 1.0], 3)


def test_a_model_has_the_same_weights_however_it_is_cut() -> None:
    config = GPTConfig(width=16, heads=2, layers=4, context=8)
    whole = gpt_stage(config, 0, 1).state_dict()
    parts: dict[str, torch.Tensor] = {}
    for stage in range(3):
        state = gpt_stage(config, stage, 3).state_dict()
        assert not parts.keys() & state.keys()
        parts |= state
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
