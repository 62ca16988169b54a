"""Groups with real processes: messages, agreement, and what dead, slow and stopped ranks do to the others."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from weft.comm import Group, PeerLost
from weft.comm.group import differences
from weft.comm.tags import Line, Mark
from weft.comm.tell import store_of
from weft.errors import PeerMismatch, PeerTimeout, WeftError

LONG = 30.0
"""A deadline that only a hang reaches."""


def world_group(timeout: float = LONG) -> Group:
    return Group(dist.group.WORLD, timeout=timeout)


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# One process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "sides"),
    [
        (["a", "b"], [":", "rank 0: a", "rank 1: b"]),
        (["x", "y", "x", "z"], [":", "rank 0, 2: x", "rank 1: y", "rank 3: z"]),
        (["1\n2\n3", "1\nB\n3"], [", first at line 2:", "rank 0: 2", "rank 1: B"]),
        (["1\n2", "1"], [", first at line 2:", "rank 0: 2", "rank 1: (nothing)"]),
        (["1\n", "1"], [", first at line 2:", "rank 0: ", "rank 1: (nothing)"]),
    ],
)
def test_a_mismatch_shows_the_first_line_that_differs(texts: list[str], sides: list[str]) -> None:
    head, *lines = sides
    expected = f"ranks are about to do different things{head}" + "".join(f"\n  {line}" for line in lines)
    assert differences(texts) == expected


# Messages ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64]


def payload(dtype: torch.dtype, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    # 0 and 1 are the only bytes that every dtype, bool among them, can hold.
    return torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def swap_everything() -> None:
    group = world_group()
    peer = 1 - group.rank
    assert (group.size, group.hosts, group.timeout) == (2, (0, 0), LONG)
    for dtype in DTYPES:
        for shape in [(), (1,), (3, 5), (0, 4), (257, 33)]:
            mine, theirs = payload(dtype, group.rank, shape), torch.zeros(shape, dtype=dtype)
            transfers = [group.recv(theirs, peer, tag=3), group.send(mine, peer, tag=3)]
            for transfer in transfers:
                transfer.wait(what=f"{dtype} {shape}")
            assert same_bits(theirs, payload(dtype, peer, shape)), (dtype, shape)
    parameter = torch.nn.Parameter(torch.full((4,), float(group.rank)))
    received = torch.zeros(4)
    for transfer in [group.recv(received, peer), group.send(parameter, peer)]:
        transfer.wait(what="a parameter, outside of its graph")
    assert received.tolist() == [peer] * 4


def test_every_dtype_and_shape_arrives() -> None:
    run_ranks(swap_everything, 2)


def tags_in_any_order() -> None:
    group = world_group()
    if group.rank == 0:
        sends = [group.send(torch.full((8,), 10 * tag + i), 1, tag=tag) for tag in (1, 2, 3) for i in range(2)]
        for transfer in sends:
            transfer.wait(what="a tagged message")
        return
    for tag in (3, 1, 2):
        for i in range(2):
            got = torch.zeros(8, dtype=torch.int64)
            group.recv(got, 0, tag=tag).wait(what=f"tag {tag}")
            assert got.tolist() == [10 * tag + i] * 8, "equal tags arrive in the order in which they were sent"


def test_tags_are_matched() -> None:
    run_ranks(tags_in_any_order, 2)


def wait_twice() -> None:
    group = world_group()
    peer, got = 1 - group.rank, torch.zeros(4)
    transfers = [group.recv(got, peer), group.send(torch.ones(4), peer)]
    for transfer in transfers + transfers:
        transfer.wait(what="a message that is there", timeout=LONG)
    nothing = group.recv(torch.empty(0), peer)
    nothing.wait(what="nothing", timeout=LONG)


def test_waiting_again_returns_at_once() -> None:
    run_ranks(wait_twice, 2)


def ring_of_a_subgroup() -> int:
    part = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return -1
    group = Group(part, timeout=LONG)
    mine, got = torch.tensor([dist.get_rank()]), torch.tensor([0])
    there = group.send(mine, (group.rank + 1) % group.size)
    group.recv(got, (group.rank - 1) % group.size).wait(what="the left neighbour")
    there.wait(what="the right neighbour")
    return int(got)


def test_ranks_count_within_the_group() -> None:
    assert run_ranks(ring_of_a_subgroup, 4) == [-1, 3, 1, 2]


def bad_arguments() -> None:
    group = world_group()
    x = torch.zeros(4, 4)
    for peer in (-1, 2, group.rank):
        for call in (group.send, group.recv):
            with pytest.raises(ValueError, match=f"peer is rank {peer}, expected 0 to 1 except this rank"):
                call(x, peer)
    for tag in (-1, 1 << 30):
        with pytest.raises(ValueError, match=f"tag is {tag}, expected 0 <= tag"):
            group.send(x, 1 - group.rank, tag=tag)
    for call in (group.send, group.recv):
        with pytest.raises(ValueError, match=r"strides .* are \(1, 4\), expected a contiguous one; call contiguous"):
            call(x.t(), 1 - group.rank)
    for timeout in (0.0, float("inf")):
        with pytest.raises(ValueError, match="expected a number of seconds above 0"):
            group.barrier(timeout=timeout)
        with pytest.raises(ValueError, match="expected a number of seconds above 0"):
            Group(dist.group.WORLD, timeout=timeout)
    group.barrier("after all these errors")


def test_bad_arguments_are_refused_before_a_byte_moves() -> None:
    run_ranks(bad_arguments, 2)


# Agreement --------------------------------------------------------------------------------------------------


def agree_and_disagree() -> list[str]:
    group = world_group()
    texts = []
    for step in range(20):
        group.agree("step", str(step))
    plan = [f"unit {i}" for i in range(50)]
    if group.rank == 1:
        plan[41] = "unit of rank 1"
    for what, value in [("dtype", "bf16" if group.rank == 2 else "fp32"), ("plan", "\n".join(plan))]:
        with pytest.raises(PeerMismatch) as caught:
            group.agree(what, value)
        texts.append(str(caught.value))
    what, value = ("barrier", "end of step 4") if group.rank == 0 else ("plan", "of step 5")
    with pytest.raises(PeerMismatch) as caught:
        group.barrier(value) if what == "barrier" else group.agree(what, value)
    texts.append(str(caught.value))
    group.barrier("a mismatch leaves the group usable")
    return texts


def test_a_mismatch_names_both_sides_on_all_ranks() -> None:
    start = "ranks are about to do different things"
    for texts in run_ranks(agree_and_disagree, 3):
        assert texts == [
            f"{start}:\n  rank 0, 1: dtype: fp32\n  rank 2: dtype: bf16",
            f"{start}, first at line 42:\n  rank 0, 2: unit 41\n  rank 1: unit of rank 1",
            f"{start}:\n  rank 0: barrier: end of step 4\n  rank 1, 2: plan: of step 5",
        ]


def barrier_orders() -> bool:
    group = world_group()
    if group.rank == 1:
        time.sleep(0.3)
        store_of(group.pg).set("late", "1")
    group.barrier("the late rank")
    return store_of(group.pg).check(["late"])


def test_no_rank_leaves_a_barrier_before_the_last_has_come() -> None:
    assert run_ranks(barrier_orders, 3) == [True] * 3


def alone() -> tuple[int, ...]:
    group = world_group()
    group.agree("anything", "at all")
    group.barrier()
    return group.hosts


def test_a_group_of_one() -> None:
    assert run_ranks(alone, 1) == [(0,)]


# Slow, stopped and dead ranks -------------------------------------------------------------------------------


def slow_rank_and_a_new_group() -> list[str]:
    """Rank 1 does not send, so rank 0 gives up; 1 and 2 are told that rank 0 is gone; a new group works."""
    group = world_group()
    got, heard = torch.zeros(4), []
    if group.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            group.recv(got, 1).wait(what="activation 3", timeout=0.5)
        heard.append(told(caught.value))
    for peer in [0] if group.rank else [1, 2]:
        with pytest.raises(PeerLost) as lost:
            group.recv(got, peer, tag=1).wait(what="activation 4")
        heard.append(told(lost.value))
    fresh = Group(dist.new_group(), timeout=LONG)
    fresh.agree("the new group", "works")
    right, left = (fresh.rank + 1) % 3, (fresh.rank - 1) % 3
    there = fresh.send(torch.full((4,), float(fresh.rank)), right)
    fresh.recv(got, left).wait(what="the ring")
    there.wait(what="the ring")
    assert got.tolist() == [left] * 4
    return heard


def test_a_slow_rank_ends_all_and_a_new_group_works() -> None:
    results = run_ranks(slow_rank_and_a_new_group, 3)
    assert results[0][0] == "PeerTimeout: waited 0.5 s for activation 3 (receive from rank 1)"
    for text, peer in zip([*results[0][1:], *results[1], *results[2]], [1, 2, 0, 0], strict=True):
        assert text.startswith(("PeerLost: activation 4 ", f"PeerLost: receive from rank {peer}")), text
        assert f"receive from rank {peer}" in text
        assert "a new process group is needed" in text


def nobody_receives() -> str:
    group = world_group()
    if group.rank == 0:
        with pytest.raises(PeerTimeout) as caught:  # larger than what the kernel buffers
            group.send(torch.zeros(1 << 24), 1).wait(what="the weights", timeout=0.5)
        return told(caught.value)
    with pytest.raises(PeerLost):
        group.recv(torch.zeros(4), 0, tag=9).wait(what="something else")
    return ""


def test_a_send_that_nobody_takes_ends() -> None:
    assert run_ranks(nobody_receives, 2)[0] == "PeerTimeout: waited 0.5 s for the weights (send to rank 1)"


def receive_from_the_dead() -> list[str]:
    group = world_group()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = []
    for _ in range(2):
        with pytest.raises(PeerLost) as caught:
            group.recv(torch.zeros(4), 1).wait(what="gradient 2")
        heard.append(told(caught.value))
    with pytest.raises(WeftError) as ended:
        group.agree("plan", "with a dead rank")
    heard.append(told(ended.value))
    return heard


def test_a_dead_rank_is_named_at_once() -> None:
    results = run_ranks(receive_from_the_dead, 3, killed=[1])
    assert results[1] == signal.SIGKILL
    for first, second, third in (results[0], results[2]):
        assert first.startswith("PeerLost: gradient 2 (receive from rank 1): the connection failed"), first
        assert "rank 1" in second
        assert third.startswith("PeerLost: "), third


def survivors_go_on() -> str:
    group = world_group()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost):
        group.recv(torch.zeros(4), 1).wait(what="gradient 2")
    peer, got = 2 - group.rank, torch.zeros(4)
    there = group.send(torch.ones(4), peer)
    group.recv(got, peer).wait(what="the other survivor")
    there.wait(what="the other survivor")
    return f"{got.tolist()}"


def test_the_others_can_still_talk_after_a_death() -> None:
    results = run_ranks(survivors_go_on, 3, killed=[1])
    assert [results[0], results[2]] == ["[1.0, 1.0, 1.0, 1.0]"] * 2


def agree_with_a_stopped_rank() -> str:
    group = world_group()
    store = store_of(group.pg)
    if group.rank == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(WeftError) as caught:
            group.agree("plan", "a")
        return told(caught.value)
    pid = int(store.get("pid"))
    with pytest.raises(PeerTimeout) as caught:
        group.agree("plan", "a", timeout=1.0)
    if store.add("gave up", 1) == 2:
        os.kill(pid, signal.SIGCONT)
    return told(caught.value)


def test_a_stopped_rank_is_named() -> None:
    results = run_ranks(agree_with_a_stopped_rank, 3)
    # Whoever gives up first is lost to a rank that was held up since, and all are lost to the stopped one.
    assert "PeerTimeout: waited 1 s for agreement on plan (receive from rank 1)" in results
    assert all(text.startswith(("PeerTimeout: ", "PeerLost: ")) for text in results), results


# What a rank believes of others ------------------------------------------------------------------------------------


def believe_anything(seed: int) -> int:
    """Rank 1 says random bytes where rank 0 expects the length of a text, or a text."""
    group, dice = world_group(), random.Random(seed)
    tag, refused = Line.GROUP.mark(Mark.TEXT), 0
    for number in range(200):
        kind = dice.choice(["length", "bytes", "good"])
        length = dice.choice([0, 5, 504, 1 << 20, 1 << 62, (1 << 64) - 1]) if kind == "length" else 5
        body = bytes(dice.randrange(256) for _ in range(5)) if kind == "bytes" else b"fives"
        if group.rank == 1:
            frame = (length.to_bytes(8, "big") + body).ljust(512, b"\0")
            mine, theirs = torch.frombuffer(bytearray(frame), dtype=torch.uint8), torch.empty(512, dtype=torch.uint8)
            for transfer in [group.recv(theirs, 0, tag=tag), group.send(mine, 0, tag=tag)]:
                transfer.wait(what="a frame")
            continue
        try:
            told = group.tell(f"text {number}", "mine", most=1000)
        except PeerMismatch as error:
            refused += "rank 1" in str(error)
        else:
            assert told[0] == "mine"
            assert length <= 504
    return refused


def test_lengths_and_texts_of_others_are_checked() -> None:
    assert run_ranks(believe_anything, 2, 1)[0] > 50


def tell_long_and_short() -> None:
    group = world_group()
    for length in (0, 1, 503, 504, 505, 5000):
        texts = [f"{rank}" * length if rank == 1 else f"{rank}" for rank in range(group.size)]
        assert group.tell("texts", texts[group.rank]) == texts
    with pytest.raises(ValueError, match="expected up to 10"):
        group.tell("texts", "x" * 11, most=10)


def test_texts_of_any_length_are_told() -> None:
    run_ranks(tell_long_and_short, 3)
