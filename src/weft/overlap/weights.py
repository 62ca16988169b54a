"""Packed weights, kept as long as the dense ones that they come from."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft._torch import storage_id, weak_storage
from weft.kernels import PackedWeight
from weft.kernels.freshness import Stamp


@dataclass(frozen=True)
class _Entry:
    storage: Any  # a weak reference to it
    stamp: Stamp
    packed: PackedWeight


def pack(dense: Tensor) -> PackedWeight:
    """dense [N, K] in packed form, for ops that compute their own gradients: it watches no source."""
    return PackedWeight.from_dense(dense.detach())


class WeightCache:
    """Packs a plain weight on its first use in inference, and again when it has changed; in training, in every call.

    It goes by memory, not by the tensor object: a module may hand over a new view of its weight in every call (DTensor
    does). `weft.kernels.freshness` says what counts as a change.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._lock = threading.Lock()

    def packed(self, w: Tensor, *, transposed: bool = False) -> PackedWeight:
        """w [N, K], or its transpose, in packed form. `w` must not be written to meanwhile.

        A weight that requires a gradient is being trained: whoever wants no gradient hands it over detached.
        """
        dense = w.detach().t() if transposed else w.detach()
        if w.requires_grad:
            return pack(dense)
        storage = w.untyped_storage()
        key = (storage_id(storage), w.storage_offset(), w.shape, w.stride(), w.dtype, transposed)
        with self._lock:
            found = self._entries.get(key)
        if found is not None and not found.storage.expired() and found.stamp.holds([w]):
            return found.packed
        stamp = Stamp.of([w])  # before it is packed: a write in between must show
        packed = pack(dense)
        if packed.data.data_ptr() == dense.data_ptr():  # the same memory, which an entry here would keep for ever
            return packed
        with self._lock:
            for gone in [k for k, e in self._entries.items() if e.storage.expired()]:
                del self._entries[gone]
            self._entries[key] = _Entry(weak_storage(storage), stamp, packed)
        return packed
