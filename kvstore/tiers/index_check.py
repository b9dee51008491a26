"""What an index file holds, and whether it is whole, found out without mapping it.

LMDB trusts its file: it has no checksums, and a page that was torn or cut off ends the process, by an assertion or by
SIGBUS. So before LMDB sees a file that an earlier process left, every page that it could ever follow is read here with
plain reads and checked: the tree of the records, its overflow pages, and the tree of free pages, from which it takes
what it writes next. What the records say is not checked here; every record is doubted anyway until the footer of its
extent confirms it.

Since all of it passes by here, the records are handed over from here as well, some thousands at a time and as arrays:
with LMDB's cursor a million of them take a second more. Most of the work is numpy's, without the GIL, so a few threads
share it.

The layout is that of LMDB 0.9 data files (version 1, 64 bits, little-endian). A file of another version is refused by
LMDB itself at open.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.tiers.side_threads import SideThreads

Pages = npt.NDArray[np.uint64]
R = TypeVar("R")

_HEADER_BYTES: Final = 16
_META: Final = struct.Struct("<IIQQ")
_TREE: Final = struct.Struct("<IHHQQQQQ")
_META_END: Final = struct.Struct("<QQ")
_MAGIC: Final = 0xBEEFC0DE
_NO_ROOT: Final = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG_DATA: Final = 1
_NODE_BYTES: Final = 8
_KEY_BYTES_MAX: Final = 511
_DEPTH_MAX: Final = 32
#: What the tree of free pages is called.
_FREE: Final = "free pages"
#: Pages read at a time, and the gap between two wanted pages that is read along rather than sought over.
_SPAN_PAGES: Final = 2048
_GAP_PAGES: Final = 16
#: Threads that read and look at leaves, and how many spans they may be ahead of who takes the records.
_THREADS: Final = 2
_AHEAD: Final = 3


class IndexDamaged(Exception):
    """The file is not one that LMDB may be given. The message says where and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaves:
    """Records of some pages, those on overflow pages left out.

    Attributes:
        data: The pages, one after the other.
        keys, values: Where in `data` the key and the value of each record start.
        key_bytes, value_bytes: How long they are.
    """

    data: npt.NDArray[np.uint8]
    keys: npt.NDArray[np.int64]
    key_bytes: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]
    value_bytes: npt.NDArray[np.int64]


def read_index_file(path: Path, take: Callable[[Leaves], R]) -> Iterator[R]:
    """Reads all of a data file that LMDB could reach. Only who came to the end knows that it is whole. Any thread.

    Args:
        take: Makes something of the records of some pages, on other threads. What it makes comes in the order of the
            pages.

    Raises:
        IndexDamaged: it is not whole; what was handed over may be wrong.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The end of the block waits for the threads, so that none of them uses a descriptor that is closed.
        with SideThreads(_THREADS, "kvstore-index") as threads:
            yield from _Checker(fd, threads).run(take)
    finally:
        os.close(fd)


def check_index_file(path: Path) -> None:
    """As read_index_file, for the check alone."""
    for _ in read_index_file(path, lambda _: None):
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Found(Generic[R]):
    """What one span of leaves has.

    Attributes:
        nodes: How many records.
        big: First page and length of each value that lies on pages of its own.
        taken: What `take` made of the others.
    """

    nodes: int
    big: list[tuple[int, int]]
    taken: R


class _Checker:
    def __init__(self, fd: int, threads: SideThreads) -> None:
        self._fd = fd
        self._threads = threads
        self._page_bytes = 4096
        self._last_page = 0
        self._seen: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    def run(self, take: Callable[[Leaves], R]) -> Iterator[R]:
        # Which pages exist for LMDB is what the newer of the two heads says.
        head = os.pread(self._fd, _HEADER_BYTES + _META.size + _TREE.size, 0)
        if len(head) < _HEADER_BYTES + _META.size + _TREE.size:
            raise IndexDamaged("the file ends within its head")
        self._page_bytes = _TREE.unpack_from(head, _HEADER_BYTES + _META.size)[0]
        if self._page_bytes not in (4096, 8192, 16384, 32768, 65536):
            raise IndexDamaged(f"page size is {self._page_bytes}")
        newest: tuple[int, list[tuple[int, ...]], int] | None = None
        for number in (0, 1):
            meta = self._meta(number)
            if newest is None or meta[0] > newest[0]:
                newest = meta
        assert newest is not None
        _, (free, main), self._last_page = newest
        size_pages = os.fstat(self._fd).st_size // self._page_bytes
        if self._last_page > (1 << 40):
            raise IndexDamaged(f"the last page is {self._last_page}")
        self._seen = np.zeros(min(self._last_page + 1, size_pages), dtype=np.bool_)
        self._mark(np.array([0, 1], dtype=np.uint64))
        for lists in self._walk(free, _FREE, _values):
            for data in lists:
                self._free_list(data)
        yield from self._walk(main, "records", take)

    def _meta(self, number: int) -> tuple[int, list[tuple[int, ...]], int]:
        page = os.pread(self._fd, self._page_bytes, number * self._page_bytes)
        if len(page) < self._page_bytes:
            raise IndexDamaged("the file ends within its head")
        if struct.unpack_from("<QHH", page, 0)[::2] != (number, _META_PAGE):
            raise IndexDamaged(f"page {number} is no head")
        magic, version, _, _ = _META.unpack_from(page, _HEADER_BYTES)
        if magic != _MAGIC or version != 1:
            raise IndexDamaged(f"head {number} has magic {magic:#x}, version {version}")
        at = _HEADER_BYTES + _META.size
        trees = [_TREE.unpack_from(page, at), _TREE.unpack_from(page, at + _TREE.size)]
        last_page, transaction = _META_END.unpack_from(page, at + 2 * _TREE.size)
        return transaction, trees, last_page

    def _mark(self, pages: Pages) -> None:
        """Each page belongs to one owner."""
        if pages.size == 0:
            return
        if int(pages.max()) >= self._seen.size:
            raise IndexDamaged(f"page {int(pages.max())} is named and the file has {self._seen.size}")
        ordered = np.sort(pages)
        if self._seen[ordered].any() or (ordered[1:] == ordered[:-1]).any():
            raise IndexDamaged("a page is named twice")
        self._seen[ordered] = True

    def _walk(self, tree: tuple[int, ...], what: str, take: Callable[[Leaves], R]) -> Iterator[R]:
        _, flags, depth, _, _, _, entries, root = tree
        if root == _NO_ROOT:
            return
        # LMDB keeps the keys of the free pages as integers; nothing else of ours has flags.
        if depth > _DEPTH_MAX or (flags & ~0x08) != 0:
            raise IndexDamaged(f"the tree of {what} has depth {depth} and flags {flags:#x}")
        level: Pages = np.array([root], dtype=np.uint64)
        for _ in range(depth - 1):
            self._mark(level)
            children = [_branch_children(self._read(span), span, what) for span in _spans(np.sort(level))]
            level = np.concatenate(children)
        counted = 0
        if depth:
            self._mark(level)
            # Not too far ahead: what they have read stays in memory until it is taken.
            for found in self._threads.map(lambda span: self._leaf(span, what, take), _spans(np.sort(level)), _AHEAD):
                counted += found.nodes
                for page, length in found.big:
                    data = self._overflow(page, length)
                    if what == _FREE:
                        self._free_list(data)
                yield found.taken
        if counted != entries:
            raise IndexDamaged(f"the tree of {what} says {entries} entries and has {counted}")

    def _leaf(self, numbers: Pages, what: str, take: Callable[[Leaves], R]) -> _Found[R]:
        """Records of some leaves."""
        pages = self._read(numbers)
        rows, nodes = _nodes(pages, numbers, _LEAF, what)
        words = pages.view("<u2")
        at = nodes // 2
        data_bytes = words[rows, at].astype(np.int64) | (words[rows, at + 1].astype(np.int64) << 16)
        flags = words[rows, at + 2]
        key_bytes = words[rows, at + 3].astype(np.int64)
        big = flags == _BIG_DATA
        inline = np.where(big, 8, data_bytes)
        _check_nodes(pages, rows, nodes, _NODE_BYTES + key_bytes + inline, key_bytes, what)
        if ((flags != 0) & ~big).any():
            raise IndexDamaged(f"a record of {what} has flags that are not ours")
        starts = nodes + _NODE_BYTES + key_bytes
        elsewhere = [
            (int.from_bytes(pages[row, start : start + 8].tobytes(), "little"), int(length))
            for row, start, length in zip(rows[big], starts[big], data_bytes[big], strict=True)
        ]
        small = ~big
        keys = rows[small] * self._page_bytes + nodes[small] + _NODE_BYTES
        lengths = key_bytes[small]
        leaves = Leaves(pages.reshape(-1), keys, lengths, keys + lengths, data_bytes[small])
        return _Found(int(nodes.size), elsewhere, take(leaves))

    def _overflow(self, page: int, length: int) -> bytes:
        count = -(-(length + _HEADER_BYTES) // self._page_bytes)
        if page + count > self._seen.size:
            raise IndexDamaged(f"page {page} is named and the file has {self._seen.size}")
        self._mark(np.arange(page, page + count, dtype=np.uint64))
        data = os.pread(self._fd, _HEADER_BYTES + length, page * self._page_bytes)
        if len(data) < _HEADER_BYTES + length:
            raise IndexDamaged(f"the file ends within page {page}")
        number, _, flags, pages = struct.unpack_from("<QHHI", data, 0)
        if number != page or flags != _OVERFLOW or pages != count:
            raise IndexDamaged(f"page {page} does not continue a record")
        return data[_HEADER_BYTES:]

    def _free_list(self, data: bytes) -> None:
        """A list of free pages: how many, then they, falling."""
        words = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
        if words.size == 0 or int(words[0]) > words.size - 1:
            raise IndexDamaged("a list of free pages is longer than its record")
        pages: Pages = words[1 : 1 + int(words[0])]
        if pages.size == 0:
            return
        if (pages[1:] >= pages[:-1]).any() or int(pages[0]) > self._last_page or int(pages[-1]) < 2:
            raise IndexDamaged("a list of free pages is out of order")
        # Pages that were never written lie beyond the end of the file, and may be free.
        self._mark(pages[pages < self._seen.size])

    def _read(self, numbers: Pages) -> npt.NDArray[np.uint8]:
        """The pages of a span."""
        first, last = int(numbers[0]), int(numbers[-1])
        wanted = (last + 1 - first) * self._page_bytes
        data = os.pread(self._fd, wanted, first * self._page_bytes)
        if len(data) < wanted:
            raise IndexDamaged(f"the file ends at page {first + len(data) // self._page_bytes}")
        pages = np.frombuffer(data, dtype=np.uint8).reshape(-1, self._page_bytes)
        return pages if last + 1 - first == numbers.size else pages[numbers - np.uint64(first)]


def _spans(numbers: Pages) -> Iterator[Pages]:
    """Cuts sorted numbers of pages into what one read gets."""
    at = 0
    while at < numbers.size:
        window = numbers[at : at + _SPAN_PAGES]
        within = (np.diff(window) <= _GAP_PAGES) & (window[1:] - window[0] < _SPAN_PAGES)
        window = window[: int(np.argmin(within)) + 1 if not within.all() else window.size]
        yield window
        at += window.size


def _values(leaves: Leaves) -> list[bytes]:
    return [
        leaves.data[at : at + length].tobytes()
        for at, length in zip(leaves.values.tolist(), leaves.value_bytes.tolist(), strict=True)
    ]


def _nodes(
    pages: npt.NDArray[np.uint8], numbers: Pages, kind: int, what: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and offset of every node, once the heads of the pages and the offsets were found right."""
    words = pages.view("<u2")
    own = pages[:, :8].copy().view("<u8")[:, 0]
    lower, upper = words[:, 6].astype(np.int64), words[:, 7].astype(np.int64)
    bad = (own != numbers) | (words[:, 5] != kind) | (lower < _HEADER_BYTES + 2) | (lower % 2 != 0)
    bad |= (upper < lower) | (upper > pages.shape[1])
    if bad.any():
        raise IndexDamaged(f"page {int(numbers[bad.argmax()])} in the tree of {what} is none")
    counts = (lower - _HEADER_BYTES) // 2
    rows = np.repeat(np.arange(pages.shape[0]), counts)
    columns = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes = words[rows, _HEADER_BYTES // 2 + columns].astype(np.int64)
    if ((nodes < upper[rows]) | (nodes > pages.shape[1] - _NODE_BYTES) | (nodes % 2 != 0)).any():
        raise IndexDamaged(f"a page in the tree of {what} points outside of itself")
    return rows, nodes


def _check_nodes(
    pages: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    nodes: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    key_bytes: npt.NDArray[np.int64],
    what: str,
) -> None:
    """Nodes end within their page and fill exactly what it says is filled."""
    if (nodes + sizes > pages.shape[1]).any() or (key_bytes > _KEY_BYTES_MAX).any():
        raise IndexDamaged(f"a record in the tree of {what} is longer than its page")
    filled = np.bincount(rows, weights=sizes + sizes % 2, minlength=pages.shape[0])
    if (filled != pages.shape[1] - pages.view("<u2")[:, 7].astype(np.int64)).any():
        raise IndexDamaged(f"the records of a page in the tree of {what} do not fill it")


def _branch_children(pages: npt.NDArray[np.uint8], numbers: Pages, what: str) -> Pages:
    rows, nodes = _nodes(pages, numbers, _BRANCH, what)
    words = pages.view("<u2")
    at = nodes // 2
    key_bytes = words[rows, at + 3].astype(np.int64)
    _check_nodes(pages, rows, nodes, _NODE_BYTES + key_bytes, key_bytes, what)
    low, middle, high = (words[rows, at + step].astype(np.uint64) for step in range(3))
    children: Pages = low | (middle << np.uint64(16)) | (high << np.uint64(32))
    return children
