"""A U-Transformer in stages, whose skips cross them, trained to find shapes in noisy pixels.

    python examples/03b_utransformer.py                         4 stages on 4 hosts, eager-1F1B, cards of 1 Gbit/s
    python examples/03b_utransformer.py --stages 2 --schedule eager-1f1b+delay
    python examples/03b_utransformer.py --loopback              without network namespaces
    python examples/03b_utransformer.py --size 2.1b             the size of the paper, for machines that have the memory

The losses are those of one process, exactly: no sum is taken in another order.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import weft
from weft.lab import Cluster, Rank
from weft.pipeline import lower
from weft.pipeline.models import UConfig, loss_of_pixels, u_graph, u_stage
from weft.reference import step_reference
from weft.report.drawing import curve_svg, curve_text


@dataclass(frozen=True)
class Job:
    size: str
    stages: int
    schedule: str
    microbatches: int
    steps: int


def batch_of(config: UConfig, job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Pixels [B, 3, H, W] with a disc and a bar in noise, and the mask [B, 1, H, W] of where they are."""
    generator = torch.Generator().manual_seed(step)
    count, size = 2 * job.microbatches, config.pixels
    where = torch.rand(count, 4, generator=generator) * size
    radius = size * (0.1 + 0.15 * torch.rand(count, 1, 1, generator=generator))
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    disc = (y - where[:, 0, None, None]) ** 2 + (x - where[:, 1, None, None]) ** 2 < radius**2
    bar = (y - where[:, 2, None, None]).abs() + 0.2 * (x - where[:, 3, None, None]).abs() < size / 10
    mask = (disc | bar).float()[:, None]
    tint = torch.rand(count, 3, 1, 1, generator=generator)
    return mask * tint + 0.3 * torch.randn(count, 3, size, size, generator=generator), mask


def losses_of_one_process(job: Job) -> list[float]:
    config = UConfig.named(job.size)
    stages = [u_stage(config, i, job.stages) for i in range(job.stages)]
    optimiser = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=2e-3)
    losses = []
    for step in range(job.steps):
        optimiser.zero_grad()
        losses.append(
            step_reference(
                stages,
                *batch_of(config, job, step),
                microbatches=job.microbatches,
                loss_fn=loss_of_pixels,
                graph=u_graph(config, job.stages),
            )
            .mean()
            .item()
        )
        optimiser.step()
    return losses


def train(rank: Rank, job: Job) -> tuple[list[float], float]:
    """What every rank runs: its own stage; returns the losses, and the share of pixels that it gets right."""
    config = UConfig.named(job.size)
    module = u_stage(config, rank.rank, job.stages)
    optimiser = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = weft.schedule(job.schedule, stages=job.stages, microbatches=job.microbatches)
    losses = []
    with weft.Pipeline(
        {rank.rank: module},
        list(range(job.stages)),
        schedule,
        edges=u_graph(config, job.stages),
        loss_fn=loss_of_pixels,
        timeout=60.0,
    ) as pipe:
        for step in range(job.steps):
            optimiser.zero_grad()
            found = pipe.step(*batch_of(config, job, step))
            optimiser.step()
            losses.append(found.mean().item() if pipe.has_last_stage else 0.0)
        pixels, mask = batch_of(config, job, job.steps)  # never seen
        outputs = pipe.eval_step(pixels).outputs
    right = ((torch.cat(outputs) > 0) == (mask > 0.5)).float().mean().item() if outputs else 0.0
    return losses, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", help="tiny, small or 2.1b")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--schedule", default="eager-1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--loopback", action="store_true", help="no namespaces and no limit on the cards")
    parser.add_argument("--plot", default="", metavar="FILE.svg")
    given = parser.parse_args()
    job = Job(given.size, given.stages, given.schedule, given.microbatches, given.steps)

    graph = u_graph(UConfig.named(job.size), job.stages)
    print(graph)
    lowered = lower(weft.schedule(job.schedule, stages=job.stages, microbatches=1), graph)
    print("one micro-batch goes", ", ".join(map(str, lowered.transfers)))
    torch.set_num_threads(1)  # as on the ranks: a convolution's sums depend on the number of threads
    alone = losses_of_one_process(job)
    with Cluster(hosts=job.stages, devices=1, gbps=None if given.loopback else given.gbps) as cluster:
        print(cluster)
        together, right = cluster.run(train, job, timeout=1800.0)[-1]
    print("step  one process  pipeline")
    for step in sorted({0, 1, job.steps // 2, job.steps - 1}):
        print(f"{step:4d}  {alone[step]:11.6f}  {together[step]:8.6f}")
    print(curve_text(together))
    print(f"{right:.1%} of the pixels of pictures that it never saw are right")
    if given.plot:
        Path(given.plot).write_text(
            curve_svg({"pipeline": together, "one process": alone}, title="U-Transformer: loss")
        )
    assert torch.allclose(torch.tensor(alone), torch.tensor(together), rtol=1e-4), "the losses are the same"
    print("bit by bit the same losses" if alone == together else "the same losses up to rounding")


if __name__ == "__main__":
    main()
