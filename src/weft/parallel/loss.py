"""Cross-entropy of logits whose columns the ranks share; they are never gathered.

    logits_r [T, V_r], targets [T]     -> the sum of losses over counted targets, the same on all ranks
    forward   lse_r = log sum exp(logits_r), and the target's logit where this rank has it: [2, T] travel
              loss = sum over counted t of (log sum_r exp(lse_r[t]) - logit[t, target])
    dgrad     dlogits_r = (exp(logits_r - lse) - one_hot(target)) dloss, 0 where the target is not counted

Beside the logits there is one array of their size, the gradient, and in the forward none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.parallel.exchange import gather
from weft.parallel.rank import Words

IGNORED = -100
_BLOCK_ELEMENTS = 1 << 20  # of logits that are widened and exponentiated at once


def cross_entropy(
    logits: Tensor, targets: Tensor, words: Words, *, group: ProcessGroup, items: Tensor | float | None = None
) -> Tensor:
    """The mean over targets [T] that are not -100, or their sum over `items`; logits [T, V_r] are of `words`.

    As Hugging Face counts: without a counted target the mean is nan.
    """
    count = (targets != IGNORED).sum() if items is None else items
    summed: Tensor = _CrossEntropy.apply(logits, targets, words, group)  # type: ignore[no-untyped-call]
    return summed / count


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raises unless each is a word or -100."""
    counted = targets[targets != IGNORED]
    if counted.numel():
        low, high = (int(v) for v in counted.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"labels: got {low} to {high}, expected 0 to {vocabulary - 1}, or {IGNORED} for none")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, words: Words, group: ProcessGroup) -> Tensor:
        tokens = logits.shape[0]
        own = ((targets >= words.first) & (targets < words.end)).nonzero().squeeze(1)
        columns = targets[own] - words.first
        mine = logits.new_zeros(2, tokens, dtype=torch.float32)
        for part in _blocks(logits):
            mine[0, part] = logits[part].float().logsumexp(1)
        mine[1, own] = logits[own, columns].float()
        parts = torch.stack(gather(group, mine, what=f"loss of {tokens} tokens"))
        lse, hit = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)  # one rank has the target, the others 0
        counted = targets != IGNORED
        ctx.save_for_backward(logits, lse, counted, own, columns)
        return torch.where(counted, lse - hit, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, lse, counted, own, columns = ctx.saved_tensors
        scale = (counted * grads[0]).float()
        out = torch.empty_like(logits)
        for part in _blocks(logits):
            block = out[part] if out.dtype == torch.float32 else logits[part].float()
            torch.sub(logits[part], lse[part, None], out=block)
            block.exp_().mul_(scale[part, None])
            if out.dtype != torch.float32:
                out[part] = block
        out[own, columns] -= scale[own].to(out.dtype)
        return out, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(at, at + step) for at in range(0, logits.shape[0], step)]
