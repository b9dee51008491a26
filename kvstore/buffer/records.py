"""Records: lists of tensors, each stored as one head and as many parts as its bytes need.

A record shows when its head does, and its head is stored last; so nobody sees half a record. Keys are never used twice
for other bytes: each record draws an id of 16 random bytes. What is lost of a record (evicted, deleted) is noticed when
it is read.

The namespace of a buffer or pipe has three groups: heads (which hold small tensors themselves), small and large parts.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.arena import ArenaView, Epochs, Offsets
from kvstore.blocks import POOL_LIFE_BYTES, Namespace
from kvstore.buffer.slots import Slots, Taken
from kvstore.client import Client
from kvstore.errors import Damage, InvalidRequest, KVStoreError, LimitExceeded, RetryLater
from kvstore.following import Spot
from kvstore.tensors import Bytes, Library, TensorSpec, bytes_of, bytes_to_fill, empty

#: Bytes of a block by group. A head is the smallest slot of the pool; a large part costs some 10 us of calls beside
#: 200 us of copying; small parts take what is left of a tensor, so that less than 64 KiB of it is padding.
HEAD_BYTES: Final = 4096
GROUP_BYTES: Final = (HEAD_BYTES, 64 << 10, 2 << 20)
HEADS, SMALL, LARGE = range(3)
RECORD_ID_BYTES: Final = 16

#: Offsets and epochs of slots.
Parts: TypeAlias = tuple[Offsets, Epochs]

_MAGIC: Final = b"KVR1"
_LENGTH_BYTES: Final = 4
#: What a block that says everything by its name is filled with.
_EMPTY: Final = np.zeros(HEAD_BYTES, np.uint8)
#: Bytes that are pinned at once by a reader; what a client on another host has room for several times over.
_SELECT_BYTES: Final = 32 << 20
#: How long a block that rests in a lower tier may take to come up.
_PROMOTION_S: Final = 10.0
#: Most parts whose places a head notes, so that a reader on the daemon's host finds them without a call. More are asked
#: for by their names, many at once.
_PLACES_MAX: Final = 64


class Lost(KVStoreError):
    """Parts of a record are gone."""


def namespace_of(kind: str, name: str, *, copy_down: bool = True) -> Namespace:
    """The namespace of a buffer or pipe.

    Args:
        copy_down: Whether what is in it may rest in the tiers below the pool.

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
        copy_down=copy_down,
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
        pool: Life of the pool that `parts` are places in; empty: nothing is known of them.
        parts: By group, where its parts were stored. Whoever looks there checks the epochs after the copy.
    """

    id: bytes
    notes: dict[str, Any]
    counts: tuple[int, int, int]
    places: tuple[_Place | None, ...]
    body: bytes
    pool: bytes = b""
    parts: Mapping[int, Parts] = dataclasses.field(default_factory=dict)

    def keys(self, kv_group: int, first: int = 0, count: int | None = None) -> list[bytes]:
        """Names of its parts of one size."""
        count = self.counts[kv_group] - first if count is None else count
        return _part_keys(self.id, first, count)

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
            counts = tuple(tree["counts"])
            pool = bytes.fromhex(tree.get("pool", ""))
            parts = _parts_of(base64.b64decode(tree["at"]), counts) if pool else {}
            head = cls(bytes.fromhex(tree["id"]), tree["notes"], counts, places, raw[stop:], pool, parts)
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
        self.id = secrets.token_bytes(RECORD_ID_BYTES)
        self._body = b"".join(map(bytes, body))
        self._tree = {
            "id": self.id.hex(),
            "notes": notes,
            "counts": (0, len(blocks[SMALL]), len(blocks[LARGE])),
            "tensors": [
                None if place is None else [place.spec.as_json(), place.inline, place.large, place.small]
                for place in places
            ],
        }
        self._plain = self._packed(self._tree)
        if len(self._plain) > HEAD_BYTES:
            raise LimitExceeded(
                f"the description of these tensors has {len(self._plain)} bytes; at most {HEAD_BYTES} fit"
            )

    def _packed(self, tree: dict[str, Any]) -> bytes:
        text = json.dumps(tree, separators=(",", ":")).encode()
        return b"".join([_MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, self._body])

    def head_block(self, taken: Mapping[int, Taken]) -> Bytes:
        """The head as a block, with the places of its parts if there is room for them.

        Args:
            taken: By group, the slots that its parts are in.
        """
        whole = self._plain
        if taken and sum(len(slots.offsets) for slots in taken.values()) <= _PLACES_MAX:
            (generation,) = {slots.generation for slots in taken.values()}
            groups = [taken[group] for group in (SMALL, LARGE) if group in taken]
            packed = b"".join(
                [*(each.offsets.tobytes() for each in groups), *(each.epochs.tobytes() for each in groups)]
            )
            longer = self._packed(
                {**self._tree, "pool": generation[:POOL_LIFE_BYTES].hex(), "at": base64.b64encode(packed).decode()}
            )
            if len(longer) <= HEAD_BYTES:
                whole = longer
        return np.frombuffer(whole.ljust(HEAD_BYTES, b"\0"), np.uint8)

    def keys(self, kv_group: int) -> list[bytes]:
        """Names of its parts of one size."""
        return _part_keys(self.id, 0, len(self.blocks[kv_group]))

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return HEAD_BYTES + sum(len(blocks) * size for blocks, size in zip(self.blocks, GROUP_BYTES, strict=True))


def _part_keys(id_: bytes, first: int, count: int) -> list[bytes]:
    return [id_ + index.to_bytes(4, "big") for index in range(first, first + count)]


def _parts_of(packed: bytes, counts: Sequence[int]) -> dict[int, Parts]:
    """Reads the places of parts back: the offsets of all, then the epochs of all."""
    total = counts[SMALL] + counts[LARGE]
    offsets = np.frombuffer(packed, "<u8", total)
    epochs = np.frombuffer(packed, "<u4", total, 8 * total)
    return {
        SMALL: (offsets[: counts[SMALL]], epochs[: counts[SMALL]]),
        LARGE: (offsets[counts[SMALL] :], epochs[counts[SMALL] :]),
    }


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
        self._slots = Slots(client)

    def store(self, *records: tuple[bytes, Draft], keep: bool = False, wait: bool = False) -> None:
        """Stores records under keys, in order: the parts of all of them, then the heads. May be called again after
        Refused. For one thread at a time.

        Args:
            keep: They stay in the pool until they are removed or this session ends.
            wait: Until the daemon has said that they are there; see Slots.publish.

        Raises:
            Refused: the pool has no room for all of them; nothing is left there.
            RetryLater: the daemon has gone, and with it what was stored; or, on another host, that is not known.
        """
        held: dict[int, Taken] = {}
        blocks = {group: [block for _, draft in records for block in draft.blocks[group]] for group in (LARGE, SMALL)}
        try:
            for group, wanted in (LARGE, len(blocks[LARGE])), (SMALL, len(blocks[SMALL])), (HEADS, len(records)):
                if wanted:
                    held[group] = self._slots.take(group, wanted)
            for group in (LARGE, SMALL):
                if blocks[group]:
                    self._slots.fill(held[group], blocks[group])
            self._slots.fill(held[HEADS], self._head_blocks(records, held))
            keys = {group: [key for _, draft in records for key in draft.keys(group)] for group in (LARGE, SMALL)}
            keys[HEADS] = [key for key, _ in records]
            self._slots.publish(
                [(group, held[group], keys[group]) for group in (LARGE, SMALL, HEADS) if group in held],
                keep=keep,
                wait=wait,
            )
        except BaseException:
            # What was committed is not the session's slot any more, and nothing happens to it here.
            for group, taken in held.items():
                self._slots.give_back(group, taken)
            with contextlib.suppress(KVStoreError):
                for _, draft in records:
                    for group in (LARGE, SMALL):
                        if draft.blocks[group]:
                            self._client.post_delete(draft.keys(group), kv_group=group)
            raise

    @staticmethod
    def _head_blocks(records: Sequence[tuple[bytes, Draft]], held: Mapping[int, Taken]) -> list[Bytes]:
        heads = []
        done = {LARGE: 0, SMALL: 0}
        for _, draft in records:
            own = {}
            for group in (SMALL, LARGE):
                if count := len(draft.blocks[group]):
                    start, taken = done[group], held[group]
                    part = slice(start, start + count)
                    own[group] = Taken(taken.generation, taken.offsets[part], taken.epochs[part])
                    done[group] += count
            heads.append(draft.head_block(own))
        return heads

    def give_stock_back(self) -> None:
        """As Slots.give_stock_back. For one thread at a time."""
        self._slots.give_stock_back()

    def mark(self, key: bytes, *, keep: bool = True) -> None:
        """Stores a block that says everything by its name. For one thread at a time.

        Raises:
            As store().
        """
        taken = self._slots.take(HEADS, 1)
        try:
            self._slots.fill(taken, [_EMPTY])
            self._slots.publish([(HEADS, taken, [key])], keep=keep, wait=False)
        except BaseException:
            self._slots.give_back(HEADS, taken)
            raise

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

    def head_at(self, spot: Spot, generation: bytes) -> Head | None:
        """The head at a place that Client.follow told, read without a call; None where it is not there any more.

        Raises:
            Damage: what is there is no head.
        """
        if spot.offset is None:
            return None
        block = bytearray(HEAD_BYTES)
        offsets, epochs = np.array([spot.offset], np.uint64), np.array([spot.epoch], np.uint32)
        if not self._copy_from(offsets, epochs, np.frombuffer(block, np.uint8), HEAD_BYTES, generation):
            return None
        return Head.parse(block)

    def _fill(self, target: Bytes, head: Head, kv_group: int, range_: tuple[int, int]) -> None:
        size = GROUP_BYTES[kv_group]
        if not range_[1]:
            return
        if kv_group in head.parts:
            part = slice(range_[0], sum(range_))
            offsets, epochs = head.parts[kv_group]
            if self._copy_from(offsets[part], epochs[part], target, size, head.pool):
                return
        keys = head.keys(kv_group, *range_)

        def copy(index: int, view: memoryview) -> None:
            piece = target[index * size : (index + 1) * size]
            np.copyto(piece, np.frombuffer(view, np.uint8, piece.nbytes))

        if self._each(keys, kv_group, copy) < len(keys):
            raise Lost(f"{len(keys)} parts of a record are not all there any more")

    def _copy_from(self, offsets: Offsets, epochs: Epochs, target: Bytes, size: int, pool_life: bytes) -> bool:
        """Copies blocks from where they were stored, side by side. Nothing pins them: the epochs say afterwards whether
        anybody else was given one of these slots.
        """
        arena = self._client.arena
        if not isinstance(arena, ArenaView) or arena.generation[:POOL_LIFE_BYTES] != pool_life[:POOL_LIFE_BYTES]:
            return False
        if (offsets > arena.size_bytes - size).any():
            return False
        pool = arena.as_numpy()
        for index, offset in enumerate(offsets.tolist()):
            piece = target[index * size : (index + 1) * size]
            np.copyto(piece, pool[offset : offset + piece.nbytes])
        return np.array_equal(arena.epochs_of(offsets), epochs)

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
                if keys := [key for head in heads for key in head.keys(group)]:
                    self._client.post_delete(keys, kv_group=group)
