"""A batch as micro-batches: cut along dim 0, or given one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def split_batch(value: Any, count: int, what: str) -> list[Any]:
    """`count` micro-batches of a batch.

    value: a tensor, cut along dim 0 as evenly as it goes; or a list with one entry for each micro-batch, of any
           shapes; or None, which every micro-batch gets. A list is how micro-batches of different shapes are given.

    >>> [part.shape[0] for part in split_batch(torch.zeros(7, 2), 3, "batch")]
    [3, 2, 2]
    """
    if value is None:
        return [None] * count
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] < count:
            raise ValueError(
                f"{what} has shape {tuple(value.shape)}, expected at least {count} rows in dim 0, one for each "
                f"micro-batch; give a larger batch, or a list of {count} micro-batches"
            )
        return list(torch.tensor_split(value, count))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValueError(
                f"{what} is a list of {len(value)}, expected one entry for each of the {count} micro-batches of the "
                f"schedule"
            )
        return list(value)
    raise ValueError(f"{what} is a {type(value).__name__}, expected a tensor or a list of {count} micro-batches")


def check_rows(cut: Mapping[str, Any], count: int) -> None:
    """Raises where tensors that are cut together would be cut in different places.

    >>> check_rows({"batch": torch.zeros(4, 2), "targets": torch.zeros(8)}, 2)
    """
    rows = {name: value.shape[0] for name, value in cut.items() if isinstance(value, Tensor) and value.dim() > 0}
    if len(set(rows.values())) > 1 and any(size % count for size in rows.values()):
        sizes = ", of ".join(f"{name} {'are ' if i == 0 else ''}{size}" for i, (name, size) in enumerate(rows.items()))
        raise ValueError(
            f"rows of {sizes}: cut into {count} micro-batches they would not belong together; expected equally many, "
            f"or multiples of {count}; give lists of micro-batches for anything else"
        )


def split_keywords(values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """For each micro-batch the keyword arguments of the stages."""
    parts = {name: split_batch(value, count, name) for name, value in values.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]


def as_arguments(microbatch: Any) -> tuple[Any, ...]:
    """A micro-batch as positional arguments: a tuple is several, anything else one."""
    return microbatch if isinstance(microbatch, tuple) else (microbatch,)
