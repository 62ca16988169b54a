"""Records to batches of tokens, in the order of the input: packing needs no sorting.

An input that was seen a little before is not tokenized, nor computed: its result is kept. Which results are kept, and
where, is decided here, where inputs come by in order; `Kept` follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from weft.jobs.texts.formats import Rows
from weft.jobs.texts.parts import Shard
from weft.jobs.texts.readers import BadRecord, Record, TextRecord

_AT_ONCE = 256  # records that are tokenized at once, or fewer that are long
_CHARACTERS_AT_ONCE = 1 << 20
_BAD_AT_ONCE = 256  # bad records that a batch may hold
_ROWS_AT_ONCE = 4096  # results that were kept, in a batch
_KEPT_BYTES = 16 << 20
_MOST_KEPT = 8192


class TextTask(Protocol):
    """What is done to each record: which inputs it has, their tokens, and what is computed of these.

    What `tokenize` gives for an input has a length, which counts its tokens. `numbers` is how many float32 a result
    has, None where results differ in that; then none is kept.
    """

    @property
    def numbers(self) -> int | None: ...

    def inputs(self, record: TextRecord) -> Sequence[Any]: ...

    def tokenize(self, inputs: Sequence[Any]) -> Sequence[Any]: ...


@dataclass
class TextBatch:
    """Inputs that are computed at once, and the records that they are of.

    `places` says for each input of each record where its result is: in that of `fresh`, by its index, or among those
    that were kept, in slot -1 - place. `slots` says where the result of each fresh one is kept.
    """

    fresh: list[Any] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # inputs of each record of this part
    bad: list[BadRecord] = field(default_factory=list)
    records: int = 0
    tokens: int = 0  # of all inputs, those that were kept included
    computed: int = 0  # tokens of fresh ones; inputs without tokens are not free either
    bytes_read: int = 0
    identity: str = ""  # of the input up to the end of this batch


class Kept:
    """Results of inputs that came by lately, [slots, numbers]."""

    def __init__(self, numbers: int | None) -> None:
        size = 0 if not numbers else min(_MOST_KEPT, _KEPT_BYTES // (4 * numbers))
        self.slots = size
        self._rows = np.empty((size, numbers or 0), np.float32)  # memory that nobody has written to is not taken

    def placed(self, batch: TextBatch, results: Rows) -> Rows:
        """What each input of a batch has, of the results of its fresh ones; these are kept."""
        if not isinstance(results, np.ndarray) or not self.slots:
            return results
        if len(batch.places) == len(batch.fresh) <= self.slots:  # nothing was seen before, and no slot is used twice
            self._rows[batch.slots] = results
            return results
        rows = np.empty((len(batch.places), results.shape[1]), np.float32)
        for k, place in enumerate(batch.places):  # in order: a slot may be used again within a batch
            if place >= 0:
                self._rows[batch.slots[place]] = results[place]
            rows[k] = results[place] if place >= 0 else self._rows[-1 - place]
        return rows


@dataclass(frozen=True)
class _Input:
    """Tokens, where they are needed, and how many there are. `slot`: where the result is kept, or is to be."""

    ids: Any
    tokens: int
    slot: int


@dataclass(frozen=True)
class _Taken:
    """A record by its hash and its inputs; None where it is of another part. The text may be long, and is not held."""

    identity: bytes
    inputs: Sequence[_Input] | None
    bytes_read: int


class Batches:
    """The batches of some records, of about `budget` tokens each.

    `identity` is that of the records before. `done` texts came before; `shard` says which of them are of this part.
    """

    def __init__(self, task: TextTask, slots: int, *, budget: int, skip_bad: bool, shard: Shard | None) -> None:
        self._task, self._budget, self._skip_bad, self._shard = task, budget, skip_bad, shard
        self._seen = _Seen(slots)

    def of(self, records: Iterable[Record], identity: InputIdentity, done: int) -> Iterator[TextBatch]:
        batch = TextBatch()
        for item in self._tokenized(records, done):
            if not self._fits(batch, item):
                batch.identity = str(identity)
                yield batch
                batch = TextBatch()
            self._add(batch, item)
            identity.add(record_identity(item) if isinstance(item, BadRecord) else item.identity)
        if batch.records:
            batch.identity = str(identity)
            yield batch

    def _tokenized(self, records: Iterable[Record], done: int) -> Iterator[_Taken | BadRecord]:
        """The records in order, tokenized a few hundred at a time."""
        for group in _groups(records):
            mine = []
            for record in group:
                if isinstance(record, TextRecord):
                    mine.append(self._shard is None or self._shard.takes(done))
                    done += 1
                elif not self._skip_bad:
                    yield from self._taken(group[: group.index(record)], mine)
                    raise ValueError(
                        f"line {record.line} of the input cannot be read: {record.reason}; "
                        f"mend it, or pass --errors skip; what is done is kept"
                    )
            yield from self._taken(group, mine)

    def _taken(self, group: Sequence[Record], mine: Sequence[bool]) -> Iterator[_Taken | BadRecord]:
        texts = [record for record in group if isinstance(record, TextRecord)]
        inputs = {
            i: self._task.inputs(record) for i, (record, is_mine) in enumerate(zip(texts, mine, strict=True)) if is_mine
        }
        digests = [record_identity(record) for record in texts]
        keys = [key for i in inputs for key in _keys(digests[i], inputs[i], texts[i])]
        found = iter(self._seen.of(keys, [one for some in inputs.values() for one in some], self._task))
        at = iter(range(len(texts)))
        for record in group:
            if isinstance(record, BadRecord):
                yield record
                continue
            i = next(at)
            of_it = [next(found) for _ in inputs[i]] if i in inputs else None
            yield _Taken(digests[i], of_it, record.bytes_read)

    def _fits(self, batch: TextBatch, item: _Taken | BadRecord) -> bool:
        if isinstance(item, BadRecord):
            return len(batch.bad) < _BAD_AT_ONCE
        if item.inputs is None or not batch.counts:
            return True
        fresh = sum(max(one.tokens, 1) for one in item.inputs if one.ids is not None)
        # A batch begins with any record, however long: what is computed at once is cut again, by inputs.
        return (not batch.fresh or batch.computed + fresh <= self._budget) and len(batch.places) < _ROWS_AT_ONCE

    @staticmethod
    def _add(batch: TextBatch, item: _Taken | BadRecord) -> None:
        batch.records += 1
        if isinstance(item, BadRecord):
            batch.bad.append(item)
            return
        batch.bytes_read = item.bytes_read
        if item.inputs is None:
            return
        batch.counts.append(len(item.inputs))
        for one in item.inputs:
            batch.tokens += max(one.tokens, 1)
            if one.ids is None:
                batch.places.append(-1 - one.slot)
            else:
                batch.computed += max(one.tokens, 1)
                batch.places.append(len(batch.fresh))
                batch.fresh.append(one.ids)
                batch.slots.append(one.slot)


class _Seen:
    """Which inputs came by lately, each by its hash. Results lie in slots that are used in turn."""

    def __init__(self, slots: int) -> None:
        self._found: dict[bytes, _Entry] = {}
        self._in_slot: list[bytes | None] = [None] * slots
        self._next = 0

    def of(self, keys: Sequence[bytes], inputs: Sequence[Any], task: TextTask) -> list[_Input]:
        """Each input, tokenized where it is new."""
        entries = [self._found.get(key) or self._new(key, i) for i, key in enumerate(keys)]
        is_fresh = [entry.first == i for i, entry in enumerate(entries)]
        fresh = [i for i in range(len(keys)) if is_fresh[i]]
        ids = dict(zip(fresh, task.tokenize([inputs[i] for i in fresh]) if fresh else [], strict=True))
        for i in fresh:
            entries[i].tokens, entries[i].first = len(ids[i]), -1
        return [_Input(ids.get(i), entry.tokens, entry.slot) for i, entry in enumerate(entries)]

    def _new(self, key: bytes, first: int) -> _Entry:
        if not self._in_slot:
            return _Entry(0, first)
        slot, self._next = self._next, (self._next + 1) % len(self._in_slot)
        before = self._in_slot[slot]
        if before is not None:
            del self._found[before]
        self._in_slot[slot] = key
        entry = self._found[key] = _Entry(slot, first)
        return entry


@dataclass(eq=False)
class _Entry:
    """The slot of a result, and how many tokens it is of. `first`: which of a group is its first, -1 afterwards."""

    slot: int
    first: int
    tokens: int = 0


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records a few hundred at a time; fewer where they are long, so that memory is bounded by characters."""
    group: list[Record] = []
    characters = 0
    for record in records:
        group.append(record)
        if isinstance(record, TextRecord):
            characters += len(record.text) + sum(map(len, record.beside))
        if len(group) == _AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


class InputIdentity:
    """A hash of the records so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, record: bytes) -> None:
        """The next one, as `record_identity` has it."""
        self._hash.update(record)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def record_identity(record: Record) -> bytes:
    """A hash of a record's texts. Bad records are alike: none of them gives a row."""
    if isinstance(record, BadRecord):
        return b"bad"
    own = hashlib.sha256(record.text.encode()).digest()
    if not record.beside:
        return own
    return hashlib.sha256(b"".join([own, *(hashlib.sha256(text.encode()).digest() for text in record.beside)])).digest()


def _keys(identity: bytes, inputs: Sequence[Any], record: TextRecord) -> list[bytes]:
    """A hash of each input of a record: what equal ones have in common."""
    if not record.beside:
        return [identity] * len(inputs)
    own = hashlib.sha256(record.text.encode()).digest()
    return [hashlib.sha256(own + hashlib.sha256(text.encode()).digest()).digest() for text in record.beside]
