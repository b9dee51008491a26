"""Records: lists of tensors, each stored as one head and as many parts as its bytes need.

A record shows when its head does, and its head is stored last; so nobody sees half a record. Keys are never used twice
for other bytes: each record draws an id of 16 random bytes. What is lost of a record (evicted, deleted) is noticed when
it is read.

The namespace of a buffer or pipe has three groups: heads (which hold small tensors themselves), small and large parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvstore.blocks import Namespace
from kvstore.client import Client
from kvstore.errors import Damage, InvalidRequest, KVStoreError, LimitExceeded, RetryLater
from kvstore.insert import InsertResult
from kvstore.tensors import Bytes, Library, TensorSpec, bytes_of, bytes_to_fill, empty

#: Bytes of a block by group. A head is the smallest slot of the pool; a large part costs some 10 us of calls beside
#: 200 us of copying; small parts take what is left of a tensor, so that less than 64 KiB of it is padding.
HEAD_BYTES: Final = 4096
GROUP_BYTES: Final = (HEAD_BYTES, 64 << 10, 2 << 20)
HEADS, SMALL, LARGE = range(3)
RECORD_ID_BYTES: Final = 16

_MAGIC: Final = b"KVR1"
_LENGTH_BYTES: Final = 4
#: Bytes that are pinned at once by a reader; what a client on another host has room for several times over.
_SELECT_BYTES: Final = 32 << 20
#: How long a block that rests in a lower tier may take to come up.
_PROMOTION_S: Final = 10.0
#: Reasons for a refused store that pass by themselves.
PASSING: Final = frozenset({"pinned", "share", "populating", "copying", "queue_full"})


class Lost(KVStoreError):
    """Parts of a record are gone."""


class Refused(RetryLater):
    """The pool did not take a record; nothing of it is left there.

    Attributes:
        reasons: Words of InsertResult.refused.
    """

    def __init__(self, reasons: dict[str, int]) -> None:
        super().__init__(f"the pool took no record: {', '.join(sorted(reasons))}")
        self.reasons = frozenset(reasons)

    @property
    def passing(self) -> bool:
        """Whether it may work a little later."""
        return self.reasons <= PASSING


def namespace_of(kind: str, name: str) -> Namespace:
    """The namespace of a buffer or pipe.

    Raises:
        InvalidRequest: no name.
    """
    if not name:
        raise InvalidRequest(f"a {kind} needs a name: both sides meet under it")
    return Namespace(
        model=f"kvstore.{kind}",
        dtype="records",
        block_size=1,
        block_bytes=GROUP_BYTES[HEADS],
        more_group_bytes=GROUP_BYTES[SMALL:],
        extra=(("name", name),),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of one tensor are: in the head, or in parts (first, count) of each size."""

    spec: TensorSpec
    inline: int | None
    large: tuple[int, int] = (0, 0)
    small: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The head of a record.

    Attributes:
        id: Names its parts.
        notes: What the writer noted beside the tensors.
        counts: Parts by group.
    """

    id: bytes
    notes: dict[str, Any]
    counts: tuple[int, int, int]
    places: tuple[_Place | None, ...]
    body: bytes

    def keys(self, kv_group: int, first: int = 0, count: int | None = None) -> list[bytes]:
        """Names of its parts of one size."""
        count = self.counts[kv_group] - first if count is None else count
        return [self.id + index.to_bytes(4, "big") for index in range(first, first + count)]

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return HEAD_BYTES + sum(count * size for count, size in zip(self.counts, GROUP_BYTES, strict=True))

    @classmethod
    def parse(cls, block: Any) -> Head:
        """Reads a head.

        Raises:
            Damage: it is none.
        """
        raw = bytes(block)
        start = len(_MAGIC) + _LENGTH_BYTES
        stop = start + int.from_bytes(raw[len(_MAGIC) : start], "little")
        try:
            if raw[: len(_MAGIC)] != _MAGIC or stop > len(raw):
                raise InvalidRequest("it does not begin as one")
            tree = json.loads(raw[start:stop])
            places = tuple(
                None if each is None else _Place(TensorSpec.of_json(each[0]), each[1], tuple(each[2]), tuple(each[3]))
                for each in tree["tensors"]
            )
            head = cls(bytes.fromhex(tree["id"]), tree["notes"], tuple(tree["counts"]), places, raw[stop:])
            head._check()
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Damage(f"a block of a buffer or pipe is no head of a record: {error}") from error
        return head

    def _check(self) -> None:
        for place in self.places:
            if place is None:
                continue
            if place.inline is not None:
                room = len(self.body) - place.inline
            else:
                room = place.large[1] * GROUP_BYTES[LARGE] + place.small[1] * GROUP_BYTES[SMALL]
                if sum(place.large) > self.counts[LARGE] or sum(place.small) > self.counts[SMALL]:
                    raise InvalidRequest("a tensor has parts that the record does not")
            if place.spec.nbytes > room:
                raise InvalidRequest("a tensor is larger than its place")


class Draft:
    """A record that is not stored so far: where each tensor will be, and the blocks. The tensors are not copied, but
    for small ones and the ends of those that do not fill their last part.

    Raises:
        InvalidRequest: something is no tensor.
        LimitExceeded: the descriptions do not fit a head.
    """

    def __init__(self, tensors: Sequence[Any], notes: dict[str, Any]) -> None:
        places: list[_Place | None] = []
        blocks: tuple[list[Bytes], list[Bytes], list[Bytes]] = ([], [], [])
        body: list[Bytes] = []
        body_bytes = 0
        # What a head has room for beside 512 bytes of description; small tensors first come, first served.
        room = HEAD_BYTES - len(_MAGIC) - _LENGTH_BYTES - len(json.dumps(notes)) - 512 - 128 * len(tensors)
        for tensor in tensors:
            if tensor is None:
                places.append(None)
                continue
            spec, data = bytes_of(tensor)
            if body_bytes + data.nbytes <= room:
                places.append(_Place(spec, body_bytes))
                body.append(data)
                body_bytes += data.nbytes
                continue
            large = data.nbytes // GROUP_BYTES[LARGE]
            rest = data[large * GROUP_BYTES[LARGE] :]
            cut = {LARGE: data[: large * GROUP_BYTES[LARGE]], SMALL: rest}
            first = {group: len(blocks[group]) for group in cut}
            for group, piece in cut.items():
                blocks[group].extend(_cut(piece, GROUP_BYTES[group]))
            ranges = {group: (first[group], len(blocks[group]) - first[group]) for group in cut}
            places.append(_Place(spec, None, ranges[LARGE], ranges[SMALL]))
        self.blocks = blocks
        id_ = secrets.token_bytes(RECORD_ID_BYTES)
        counts = (0, len(blocks[SMALL]), len(blocks[LARGE]))
        text = json.dumps(
            {
                "id": id_.hex(),
                "notes": notes,
                "counts": counts,
                "tensors": [
                    None if place is None else [place.spec.as_json(), place.inline, place.large, place.small]
                    for place in places
                ],
            },
            separators=(",", ":"),
        ).encode()
        whole = b"".join([_MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *map(bytes, body)])
        if len(whole) > HEAD_BYTES:
            raise LimitExceeded(f"the description of these tensors has {len(whole)} bytes; at most {HEAD_BYTES} fit")
        self.head_block = whole.ljust(HEAD_BYTES, b"\0")
        self.head = Head.parse(self.head_block)

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return self.head.nbytes


def _cut(data: Bytes, size: int) -> Iterator[Bytes]:
    """Pieces of one size; the last one is a padded copy."""
    for start in range(0, data.nbytes, size):
        piece = data[start : start + size]
        if piece.nbytes < size:
            padded = np.zeros(size, dtype=np.uint8)
            padded[: piece.nbytes] = piece
            piece = padded
        yield piece


class Records:
    """Stores and reads records through a client of their namespace. As safe from several threads as the client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def store_parts(self, draft: Draft) -> None:
        """Everything of a record but its head. May be called again after Refused.

        Raises:
            Refused: not all of it could be stored; what was stored was removed.
        """
        tickets = [
            self._client.insert(draft.head.keys(group), draft.blocks[group], kv_group=group)
            for group in (LARGE, SMALL)
            if draft.blocks[group]
        ]
        # Both are waited for before anything is said: the blocks are read until then.
        results = [ticket.wait() for ticket in tickets]
        refused = _refused(results)
        if refused:
            self.delete_parts(draft.head)
            raise Refused(refused)

    def show(self, key: bytes, draft: Draft) -> InsertResult:
        """Stores the head: from here on the record is there."""
        return self._client.insert([key], [draft.head_block]).wait()

    def read(
        self, head: Head, library: Library | None, *, only: Sequence[int] | None = None, out: Any = None
    ) -> list[Any]:
        """Copies the tensors of a record out of the pool.

        Args:
            only: Indexes of the tensors that are wanted; None: all.
            out: Tensor to fill instead of a new one, where one is wanted.

        Raises:
            Lost: parts of them are gone.
            InvalidRequest: a tensor cannot be made here, or does not fit `out`.
        """
        tensors: list[Any] = []
        for index in range(len(head.places)) if only is None else only:
            place = head.places[index]
            if place is None:
                if out is not None:
                    raise InvalidRequest("out is given and what comes is None")
                tensors.append(None)
                continue
            if out is not None:
                tensor, target = out, bytes_to_fill(out, place.spec)
            else:
                tensor, target = empty(place.spec, library)
            if place.inline is not None:
                target[:] = np.frombuffer(head.body, np.uint8, place.spec.nbytes, place.inline)
            else:
                large = min(target.nbytes, place.large[1] * GROUP_BYTES[LARGE])
                self._fill(target[:large], head, LARGE, place.large)
                self._fill(target[large:], head, SMALL, place.small)
            tensors.append(tensor)
        return tensors

    def heads(self, keys: Sequence[bytes]) -> list[Head | None]:
        """The leading run of heads that is there; None for what is no head."""
        heads: list[Head | None] = []

        def parse(_: int, view: memoryview) -> None:
            heads.append(None)
            with contextlib.suppress(Damage):
                heads[-1] = Head.parse(view)

        self._each(keys, HEADS, parse)
        return heads

    def _fill(self, target: Bytes, head: Head, kv_group: int, range_: tuple[int, int]) -> None:
        keys = head.keys(kv_group, *range_)
        size = GROUP_BYTES[kv_group]

        def copy(index: int, view: memoryview) -> None:
            piece = target[index * size : (index + 1) * size]
            np.copyto(piece, np.frombuffer(view, np.uint8, piece.nbytes))

        if self._each(keys, kv_group, copy) < len(keys):
            raise Lost(f"{len(keys)} parts of a record are not all there any more")

    def _each(self, keys: Sequence[bytes], kv_group: int, use: Callable[[int, memoryview], object]) -> int:
        """Shows blocks one by one, pinned. Returns how many of the leading run there were."""
        step = max(1, _SELECT_BYTES // GROUP_BYTES[kv_group])
        done = 0
        wait_s = 0.0  # most are in the pool
        while done < len(keys):
            with self._client.select(keys[done : done + step], wait_s, kv_group=kv_group) as found:
                for index in range(len(found)):
                    use(done + index, found[index])
                got = len(found)
            done += got
            if not got:
                # It rests in a lower tier, or a client on another host has no room for it just now; or it is nowhere,
                # and a select would wait for its whole time in vain.
                if wait_s or not self._client.lookup(keys[done : done + 1], kv_group=kv_group):
                    break
                wait_s = _PROMOTION_S
            else:
                wait_s = 0.0
        return done

    def delete_parts(self, *heads: Head) -> None:
        """Removes everything of records but their heads. A daemon that cannot be told will evict it in time."""
        with contextlib.suppress(RetryLater):
            for group in (LARGE, SMALL):
                self._client.delete([key for head in heads for key in head.keys(group)], kv_group=group)


def _refused(results: Sequence[InsertResult]) -> dict[str, int]:
    return {reason: count for result in results for reason, count in result.refused.items()}
