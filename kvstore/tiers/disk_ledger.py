"""What a disk tier keeps of its extents beside the index: when each was last used, and which hold nothing any more.

Two files. `recency` has one number for each extent, as Slab.used has it: the order of use, for each start; and whether
the extent was emptied, for the day on which the index is lost and the footers have to say what is there. Footers of
blocks that were deleted, flushed or evicted are still whole then. `removed` says which extents were emptied since
`recency` was written: its groups are appended and synced before the index forgets the blocks, so that what was reported
as deleted is known to be gone by both.

A mark names a sequence: nothing that was written up to it is to come back from that place. What is written there later
has a higher one, since no sequence is ever given out twice in a directory; `recency` therefore also says where the next
process has to begin, above all that this one may have given out without being able to tell.

Blocking calls: for a thread, one at a time, except `room`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import struct
from array import array
from collections.abc import Mapping
from typing import Final

import xxhash

from kvstore.tiers.disk_folder import FORMAT, DiskFolder
from kvstore.tiers.slabs import GONE, SEQUENCE_MASK

RECENCY_FILE: Final = "recency"
REMOVED_FILE: Final = "removed"
#: Length of `removed`, which is written as a whole once, so that appending asks for no room on a disk that is full.
REMOVED_BYTES: Final = 128 << 10
#: How far ahead of itself a process claims sequences. More than it gives out until `recency` is written the next time,
#: which is a minute at millions of uses a second.
SEQUENCES_CLAIMED: Final = 1 << 36
_RECENCY_HEAD: Final = struct.Struct("<8sII")
_RECENCY_SLAB: Final = struct.Struct("<II")
#: ceiling, generation of the groups that are in it already
_RECENCY_END: Final = struct.Struct("<QQ")
_RECENCY_MAGIC: Final = b"kvrecent"
#: magic, marks, generation, xxh3 of the marks
_GROUP: Final = struct.Struct("<8sQQQ")
_GROUP_MAGIC: Final = b"kvremove"
#: slab, extent, sequence
_MARK: Final = struct.Struct("<QQQ")
#: Numbers of one mark in an array.
MARK_WORDS: Final = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What is known of extents.

    Attributes:
        used: By slab, a column as Slab.used; it may be shorter than the slab.
        ceiling: All sequences that were ever given out are below; 0 where that is not known.
    """

    used: dict[int, array[int]]
    ceiling: int

    def gone(self, slab: int, extent: int, sequence: int) -> bool:
        """Whether what was written with a sequence was emptied since."""
        column = self.used.get(slab, ())
        word = column[extent] if extent < len(column) else 0
        return bool(word & GONE) and sequence <= word & SEQUENCE_MASK


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be written to `recency`.

    Attributes:
        used: By slab, the bytes of its `used`.
        sequence: The next one that will be given out.
    """

    used: Mapping[int, bytes]
    sequence: int


class Ledger:
    """The two files of a directory that is held."""

    def __init__(self, folder: DiskFolder) -> None:
        self._folder = folder
        self._generation = 0
        self._at = REMOVED_BYTES  # nothing is appended before `recency` was written once

    @property
    def room(self) -> int:
        """Marks that can be appended before `recency` has to be written anew."""
        return max(0, (REMOVED_BYTES - self._at - _GROUP.size) // _MARK.size)

    def read(self) -> Known:
        """What both files say. A `recency` that is not whole says nothing, and then neither does `removed`."""
        with contextlib.suppress(OSError):
            known, written = _parse_recency((self._folder.path / RECENCY_FILE).read_bytes())
            if written is not None:
                self._generation = written + 1
                with contextlib.suppress(OSError):
                    self._read_removed((self._folder.path / REMOVED_FILE).read_bytes(), known.used)
            return known
        return Known({}, 0)

    def _read_removed(self, data: bytes, used: dict[int, array[int]]) -> None:
        """Only groups that came after `recency`. What older ones said may have come to nothing: a process that ends
        between the mark and the index leaves a block that is there.
        """
        at = 0
        while at + _GROUP.size <= len(data):
            magic, count, generation, check = _GROUP.unpack_from(data, at)
            end = at + _GROUP.size + count * _MARK.size
            if magic != _GROUP_MAGIC or end > len(data) or generation != self._generation:
                break
            marks = data[at + _GROUP.size : end]
            if xxhash.xxh3_64_intdigest(marks, seed=generation) != check:
                break  # it was never finished, and nobody was told that it was
            for slab, extent, sequence in _MARK.iter_unpack(marks):
                if extent < 1 << 32:
                    column = used.setdefault(slab, array("Q"))
                    if len(column) <= extent:
                        column.frombytes(bytes(8 * (extent + 1 - len(column))))
                    column[extent] = GONE | max(column[extent] & SEQUENCE_MASK, sequence)
            at = end

    def write(self, snapshot: Snapshot) -> None:
        """Writes `recency`; `removed` begins anew, since all that it had is in there.

        Raises:
            OSError: the old file is still there, and what is appended goes behind what there was.
        """
        self._folder.is_in_place()
        path = self._folder.path / REMOVED_FILE
        if not self._generation or not path.exists() or path.stat().st_size != REMOVED_BYTES:
            self._at = REMOVED_BYTES
            self._folder.write_whole(REMOVED_FILE, bytes(REMOVED_BYTES))
        parts = [_RECENCY_HEAD.pack(_RECENCY_MAGIC, FORMAT, len(snapshot.used))]
        for number, column in snapshot.used.items():
            parts += [_RECENCY_SLAB.pack(number, len(column) // 8), column]
        parts.append(_RECENCY_END.pack(snapshot.sequence + SEQUENCES_CLAIMED, self._generation))
        data = b"".join(parts)
        self._folder.write_whole(RECENCY_FILE, data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data)))
        self._generation += 1
        self._at = 0

    def append(self, marks: array[int]) -> None:
        """Has marks outlive the index. Durable when it returns.

        Args:
            marks: MARK_WORDS numbers for each; no more than there is room for.

        Raises:
            OSError: they do not.
        """
        if len(marks) // MARK_WORDS > self.room:  # `recency` could not be written since the caller looked
            raise OSError(errno.EAGAIN, f"{REMOVED_FILE}: no room")
        self._folder.is_in_place()
        data = marks.tobytes()
        check = xxhash.xxh3_64_intdigest(data, seed=self._generation)
        group = _GROUP.pack(_GROUP_MAGIC, len(marks) // MARK_WORDS, self._generation, check) + data
        try:
            fd = self._folder.io.open(self._folder.path / REMOVED_FILE, os.O_RDWR)
        except FileNotFoundError:
            self._at = REMOVED_BYTES  # somebody removed it: the next try finds no room, and writes both anew
            raise
        try:
            if os.pwrite(fd, group, self._at) != len(group):
                raise OSError(f"{REMOVED_FILE}: not all of it was taken")
            self._folder.io.fdatasync(fd)
        finally:
            os.close(fd)
        self._at += len(group)


def _parse_recency(data: bytes) -> tuple[Known, int | None]:
    """What it says, and the generation of the groups that are in it already; None where it does not say."""
    if len(data) < _RECENCY_HEAD.size + 8 or data[:8] != _RECENCY_MAGIC:
        return Known({}, 0), None
    body = memoryview(data)[:-8]
    if struct.unpack("<Q", data[-8:])[0] != xxhash.xxh3_64_intdigest(body):
        return Known({}, 0), None
    used: dict[int, array[int]] = {}
    at = _RECENCY_HEAD.size
    for _ in range(_RECENCY_HEAD.unpack_from(body)[2]):
        number, extents = _RECENCY_SLAB.unpack_from(body, at)
        at += _RECENCY_SLAB.size
        used[number] = array("Q", body[at : at + 8 * extents].tobytes())
        at += 8 * extents
    if at + _RECENCY_END.size > len(body):
        return Known(used, 0), None  # an earlier version wrote it
    ceiling, generation = _RECENCY_END.unpack_from(body, at)
    return Known(used, ceiling), generation
