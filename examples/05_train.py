r"""A Llama trained on text: tensor x pipeline x data parallel, packed documents, checkpoints, figures of every step.

    torchrun --nproc-per-node 4 examples/05_train.py --tp 2 --pp 2
    torchrun --nproc-per-node 4 examples/05_train.py --tp 2 --dp 2 --model small --checkpoint run --figures run.jsonl
    torchrun --nproc-per-node 4 examples/05_train.py --tp 2 --dp 2 --model small --checkpoint run --resume --steps 200
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id 1 \
        examples/05_train.py --tp 4 --pp 2 --data *.txt             # on both hosts; docs/hosts.md has more launchers

What runs is `weft.jobs.train`: `weft.parallelize` (or the stages of a `weft.Pipeline`) over the axis tp, torch's
FSDP2 over dp. Tokens are bytes, so that any text will do; without --data it is Python's own reference manual. Losses
do not depend on how the ranks are used, and a run that was killed goes on with --resume to the losses that it would
have had. It says at the start how many steps it will make, and after each how long it has to go.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch.distributed as dist

from weft.jobs.train import StepFigures, TrainJob, train
from weft.jobs.train.job import ON_FAILURE, SIZES, parse_copies
from weft.jobs.train.run import LossLog, RunProgress, read_log
from weft.report.drawing import curve_text


def main() -> None:
    job, log = parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))  # torchrun says who and where
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    job = job.on(ranks)
    progress = RunProgress(job, ranks)
    if is_first:
        print(progress, flush=True)
    written: list[LossLog] = []

    def report(figures: StepFigures) -> None:
        if is_first:
            print(progress.line(figures), flush=True)
        if is_first and log:
            if not written:
                written.append(LossLog(log, after=figures.step - 1))
            written[0].add(figures)

    trained = train(job, report=report)
    if is_first:
        losses = [figures.loss for figures in read_log(log)] if log and written else trained.losses
        print(f"loss\n{curve_text(losses)}" if losses else f"{job.checkpoint} is at step {job.steps} already")
    dist.destroy_process_group()


def parse() -> tuple[TrainJob, str]:
    """The job, and the file for its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    standard = TrainJob()
    parser.add_argument("--model", default="small", choices=SIZES)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument(
        "--dp", type=parse_copies, default=1, help="copies of the model, or auto: as ranks are left for"
    )
    parser.add_argument("--steps", type=int, default=50, help="of the whole run")
    parser.add_argument("--microbatches", type=int, default=standard.microbatches, help="of a step, over all copies")
    parser.add_argument("--tokens", type=int, default=1024, help="of a packed micro-batch")
    parser.add_argument("--context", type=int, default=512, help="tokens of a document at most")
    parser.add_argument("--lr", type=float, default=standard.lr)
    parser.add_argument("--seed", type=int, default=standard.seed)
    parser.add_argument("--schedule", default=standard.schedule, help="of the pipeline")
    parser.add_argument("--overlap", default=standard.overlap, choices=("on", "off"), help="without stages")
    parser.add_argument("--data", nargs="*", default=[], metavar="FILE", help="text files")
    parser.add_argument("--init", default="", metavar="DIR", help="start from the safetensors of a Llama")
    parser.add_argument("--checkpoint", default="", metavar="DIR", help="where to save; all ranks must see it")
    parser.add_argument("--every", type=int, default=standard.every, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=standard.keep, help="how many checkpoints stay")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--timeout", type=float, default=standard.timeout, help="seconds to wait for another rank")
    parser.add_argument(
        "--on-failure",
        default=standard.on_failure,
        choices=ON_FAILURE,
        help="of a rank: shrink goes on without its copy",
    )
    parser.add_argument("--figures", default="", metavar="FILE.jsonl", help="write the figures of each step")
    given = vars(parser.parse_args())
    log = given.pop("figures")
    return TrainJob(**{**given, "data": tuple(given["data"])}), log


if __name__ == "__main__":
    main()
