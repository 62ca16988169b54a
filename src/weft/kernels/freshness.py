"""Has a weight changed since something was made of it?

torch has no cheap and certain answer. A version counter misses fused optimisers, FSDP's refills (it keeps the counter
on purpose), optimisers that write to a DTensor's shard, inference tensors, and every write through `.data`. So there
are two rules, and everybody who keeps something made of a weight goes through here:

- *While training, nothing is kept.* A weight that a gradient flows to is packed in every call: one or two passes over
  it, 1 to 2 % of a matmul with 2,048 rows.
- *In inference* a `Stamp` says whether what was made still holds. It goes by the tensor's memory, its version, and a
  sample of its content (8 cache lines a tensor, a microsecond), which every dense update changes; an optimiser that
  steps, and weft where it writes itself, tell the stamps of the memory that they wrote to.

Tensors that were made in inference mode have no version: they are compared in full, at 0.2 ms a MB.

What is left: a write past the version counter (`.data`, another library) that changes only a part of a weight, or so
little of it that no sampled line differs. Whoever does that calls `weft.refresh(model)`.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft import _core
from weft._torch import local_tensor, version_of

# Whoever writes must find the stamps of what was written, and only knows the memory. So stamps are listed here, weakly.
_stamps: weakref.WeakSet[Stamp] = weakref.WeakSet()
_lock = threading.Lock()
_WHOLE = 512  # bytes of which a sample reads all


class Stamp:
    """What some tensors were like when it was made: `holds` says whether they are still like that.

    It keeps no tensor alive: the caller hands over the same ones again, in the same order.

    >>> w = torch.randn(8, 4)
    >>> stamp = Stamp.of([w])
    >>> stamp.holds([w])
    True
    >>> _ = w.data.mul_(2)
    >>> stamp.holds([w])
    False
    """

    __slots__ = ("__weakref__", "_doubtful", "_marks", "_sample", "_sizes", "_starts", "_storages", "_written")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._marks = [_mark(t) for t in tensors]
        spans = [(*_span(local), version_of(local)) for local in map(local_tensor, tensors)]
        self._starts, self._sizes = array("q"), array("q")
        for start, size, _, version in spans:
            step = _WHOLE if version < 0 else max(size, 1)  # what nobody counts is compared in full
            self._starts.extend(range(start, start + max(size, 1), step))
            self._sizes.extend(min(step, size - at) for at in range(0, max(size, 1), step))
        self._storages = frozenset(storage for _, _, storage, _ in spans)
        self._sample = self._read()
        self._written = False  # somebody wrote to this memory, and said so
        self._doubtful = False  # somebody wrote to memory that may be the source of this one
        with _lock:
            _stamps.add(self)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Stamp:
        """The stamp of some tensors, of any shapes and devices; of a DTensor, the shard that is here."""
        return cls(list(tensors))

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors are the ones that it was made of, with the same content as far as anybody can tell."""
        return not self._doubtful and not self.is_broken(tensors)

    def is_broken(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is certain that they are others, or have changed."""
        if self._written or len(tensors) != len(self._marks):
            return True
        if any(_mark(tensor) != mark for tensor, mark in zip(tensors, self._marks, strict=True)):
            return True
        return self._read() != self._sample  # after the marks: only then are the addresses known to be good

    def _read(self) -> int:
        return _core.sample(self._starts.buffer_info()[0], self._sizes.buffer_info()[0], len(self._starts))


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    """Its memory and version; of a DTensor, both versions: an optimiser counts up one of them, others the other."""
    local = local_tensor(tensor)
    version = version_of(local)
    return local.data_ptr(), version, version if local is tensor else version_of(tensor)


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """Where it starts, how many bytes may be sampled, and where its storage starts."""
    storage = tensor.untyped_storage()
    if not tensor.is_cpu or tensor.numel() == 0:
        return 0, 0, storage.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if storage.nbytes() < needed:  # freed for a while, as FSDP does
        return 0, 0, storage.data_ptr()
    return tensor.data_ptr(), (last + 1) * tensor.element_size(), storage.data_ptr()


def written(tensors: Iterable[Tensor]) -> None:
    """Tells that these were written to by ways that torch does not count: what was made of them is made again.

    >>> w = torch.randn(8, 4)
    >>> stamp = Stamp.of([w])
    >>> written([w])
    >>> stamp.holds([w])
    False
    """
    storages = {local_tensor(t).untyped_storage().data_ptr() for t in tensors}
    for stamp in _listed():
        if not stamp._storages.isdisjoint(storages):
            stamp._written = True


def refresh(model: nn.Module) -> None:
    """Tells that weights of the model may have changed in a way that nobody could notice; see `weft.kernels.freshness`.

    Needed only after a write past torch's version counters (through `.data`, or by another library) that changes a
    part of a weight. Optimisers, `load_state_dict`, FSDP and in-place ops are noticed without it. Where ranks share
    the model, each of them calls it.

    >>> model = nn.Linear(4, 4)
    >>> model.weight.data[0, 0] = 1.0
    >>> refresh(model)
    """
    written([*model.parameters(), *model.buffers()])


def _listed() -> list[Stamp]:
    with _lock:
        return list(_stamps)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # a compiled step cannot tell; the sample sees it
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    written(parameters)
    # FSDP fills other memory from these, later, without raising a version.
    if any(local_tensor(p) is not p for p in parameters):
        for stamp in _listed():
            stamp._doubtful = True


register_optimizer_step_post_hook(_after_step)
