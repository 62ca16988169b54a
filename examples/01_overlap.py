"""A transformer block, tensor-parallel over two hosts, trained for 20 steps with the losses of one process.

    python examples/01_overlap.py

Two hosts of the lab, each behind a card of 1 Gbit/s. Every linear layer of the block communicates while it computes;
the parameters stay DTensors, so the optimiser is torch's own. The trace of one step is drawn and summed up at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn import functional as F

import weft
from weft.lab import Cluster, Rank
from weft.overlap import ColwiseOverlap, RowwiseOverlap

WIDTH, HEADS, BATCH, LENGTH, STEPS = 128, 4, 2, 64, 20


class Block(nn.Module):
    """Attention and MLP with pre-normalisation; `heads` are those of this rank."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_block(ranks: int) -> Block:
    torch.manual_seed(0)
    return Block(HEADS // ranks)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def losses_of_one_process() -> list[float]:
    block, (x, target) = make_block(1), data()
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = F.mse_loss(block(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def train(rank: Rank) -> tuple[list[float], str]:
    """The same training on all ranks together; each holds a part of the sequence and of every weight."""
    mesh = torch.distributed.init_device_mesh("cpu", (rank.world,))
    into, out_of = ColwiseOverlap(), RowwiseOverlap()
    plan = {"norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True)}
    plan |= {"q": into, "k": into, "v": into, "up": into, "out": out_of, "down": out_of}
    block = parallelize_module(make_block(rank.world), mesh, plan)
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-3)
    x, target = (t.chunk(rank.world, dim=1)[rank.rank] for t in data())
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        with weft.trace(name="one step") as trace:
            # The loss is a mean over all ranks' rows: a sum of their shares.
            loss = F.mse_loss(block(x), target) / rank.world
            loss.backward()
        optimiser.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=rank.group)
        losses.append(total.item())
    assert isinstance(block.up.weight, DTensor)
    return losses, f"{trace.timeline}\n\n{trace.summary()}"


def main() -> None:
    alone = losses_of_one_process()
    with Cluster(hosts=2, devices=1, gbps=1.0) as cluster:
        together, drawn = cluster.run(train, timeout=120.0)[0]
    print("step  one process  two hosts")
    for step in (0, 1, 5, 10, STEPS - 1):
        print(f"{step:4d}  {alone[step]:11.6f}  {together[step]:9.6f}")
    print(f"\n{drawn}")
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=1e-4), "the losses are the same"


if __name__ == "__main__":
    main()
