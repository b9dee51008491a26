"""Reads every block of a directory of the disk tier and says which are right; on request mends the index.

For a directory that no daemon uses: it takes the directory's lock. Blocking, for a process of its own.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import xxhash

from kvstore.errors import ConfigError
from kvstore.tier import TierNamespace
from kvstore.tiers.disk_folder import FORMAT_FILE, DiskFolder
from kvstore.tiers.disk_index import DATA_FILE, RECORD, DiskIndex, Record, read_columns, write_index
from kvstore.tiers.disk_ledger import Known, Ledger
from kvstore.tiers.disk_load import FIXED_BYTES
from kvstore.tiers.extent import ALIGN_BYTES, FOOTER_BYTES, Footer, extent_bytes_for, parse_footer
from kvstore.tiers.files import FileIO, aligned_memory
from kvstore.tiers.index_check import IndexDamaged
from kvstore.tiers.slabs import INDEX_BYTES_PER_BLOCK, Slab

#: Called with bytes checked so far and bytes in all.
Progress = Callable[[int, int], None]
#: Bytes of an extent that are read at a time.
_READ_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block that the index names and that is not right.

    Attributes:
        key: Its full name.
        slab, extent: Where it should be.
        why: What is wrong with it.
    """

    key: bytes
    slab: int
    extent: int
    why: str


@dataclasses.dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        directory: Where.
        slabs, extents: How many there are.
        blocks_ok, bytes_ok: Blocks that the index names and that are right.
        damaged: Blocks that the index names and that are not.
        unnamed: Whole blocks that are not brought back, since a whole index does not name them (evicted, deleted, or
            not committed when the process ended), or since they are known to be gone.
        index_fault: Why the index cannot be used; empty where it can.
        rebuilt_blocks: Blocks that the index was built anew from; with repair only.
        repaired: Whether something was changed on the medium.
    """

    directory: Path
    slabs: int = 0
    extents: int = 0
    blocks_ok: int = 0
    bytes_ok: int = 0
    damaged: list[DamagedBlock] = dataclasses.field(default_factory=list)
    unnamed: int = 0
    index_fault: str = ""
    rebuilt_blocks: int = 0
    repaired: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is nothing to repair, or nothing any more."""
        return self.repaired or not (self.damaged or self.index_fault)


def verify(directory: Path, repair: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Checks everything that a directory holds.

    Args:
        repair: Removes damaged blocks from the index; builds an index anew that is lost or damaged, from the blocks
            that are whole and not known to be gone.
        progress: Told now and then.

    Raises:
        ConfigError: the directory is held by another process (named by its pid), of a newer format, or not one of ours.
        OSError: the medium does not work.
    """
    if not (directory / FORMAT_FILE).exists():
        raise ConfigError(f"{directory} is not a directory of the disk tier: it has no {FORMAT_FILE!r} file")
    folder = DiskFolder(directory, FileIO())
    folder.hold()
    slabs: list[Slab] = []
    try:
        slabs += (folder.open_slab(file) for file in folder.slab_files())
        return _verify(folder, slabs, repair, progress)
    finally:
        folder.close_files(slabs)
        folder.release()


def _verify(folder: DiskFolder, slabs: list[Slab], repair: bool, progress: Progress | None) -> VerifyReport:
    report = VerifyReport(folder.path, len(slabs), sum(slab.extents for slab in slabs))
    named: dict[tuple[int, int], tuple[bytes, int]] = {}
    namespaces: list[TierNamespace] = []
    map_bytes = FIXED_BYTES + INDEX_BYTES_PER_BLOCK * (report.extents + 1)
    index: DiskIndex | None = None
    try:
        if folder.damaged_index.exists():
            raise IndexDamaged("it was set aside and the one built in its place is not finished")
        if not (folder.index_folder / DATA_FILE).exists():
            raise IndexDamaged("it is gone")
        for columns in read_columns(folder.index_folder / DATA_FILE):
            if columns.odd:
                raise IndexDamaged("a record has not the length of one")
            for key, (number, extent, size_bytes, _) in zip(
                columns.names.tolist(), columns.table.tolist(), strict=True
            ):
                named[number, extent] = (key, size_bytes)
        index = DiskIndex(folder.index_folder, map_bytes, checked=True)
        namespaces = index.namespaces()
    except IndexDamaged as damage:
        report.index_fault = str(damage)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        report.index_fault = f"it cannot be read: {error}"
    try:
        known = Ledger(folder).read()
        whole = _check_slabs(folder, slabs, named, known, report, progress)
        if repair and report.index_fault:
            newest: dict[bytes, tuple[int, Record]] = {}
            for sequence, record in whole:
                if record[0] not in newest or newest[record[0]][0] < sequence:
                    newest[record[0]] = (sequence, record)
            folder.set_index_aside()
            write_index(folder.index_folder, [record for _, record in newest.values()], namespaces, map_bytes)
            folder.forget_damaged_index()
            report.rebuilt_blocks = len(newest)
            report.repaired = True
        elif repair and report.damaged:
            assert index is not None
            index.commit([block.key for block in report.damaged], ())
            report.repaired = True
    finally:
        if index is not None:
            index.close()
    return report


def _check_slabs(
    folder: DiskFolder,
    slabs: list[Slab],
    named: dict[tuple[int, int], tuple[bytes, int]],
    known: Known,
    report: VerifyReport,
    progress: Progress | None,
) -> list[tuple[int, Record]]:
    """Fills the report. Whole blocks with their sequence, where there is no index that could name them."""
    whole: list[tuple[int, Record]] = []
    total = sum(slab.size_bytes for slab in slabs)
    done = 0
    buffer = aligned_memory(_READ_BYTES)
    for slab in slabs:
        for extent in range(slab.extents):
            expected = named.pop((slab.number, extent), None)
            footer, fault = _check_extent(folder, slab, extent, buffer)
            if expected is None:
                if footer is not None and not fault:
                    if report.index_fault and not known.gone(slab.number, extent, footer.sequence):
                        value = RECORD.pack(slab.number, extent, footer.size_bytes, footer.sequence)
                        whole.append((footer.sequence, (footer.key, value)))
                    else:
                        report.unnamed += 1
            else:
                key, size_bytes = expected
                if footer is not None and (footer.key, footer.size_bytes) != (key, size_bytes):
                    fault = "the extent holds another block"
                if fault:
                    report.damaged.append(DamagedBlock(key, slab.number, extent, fault))
                else:
                    report.blocks_ok += 1
                    report.bytes_ok += size_bytes
            done += slab.extent_bytes
            if progress is not None:
                progress(done, total)
    for (number, extent), (key, _) in named.items():
        report.damaged.append(DamagedBlock(key, number, extent, "the slab is gone, or ends before the extent"))
    return whole


def _check_extent(folder: DiskFolder, slab: Slab, extent: int, buffer: memoryview) -> tuple[Footer | None, str]:
    """The footer, and what is wrong with the block; an extent that never held one has neither footer nor right."""
    start = extent * slab.extent_bytes
    end = start + slab.extent_bytes
    page = buffer[:ALIGN_BYTES]
    try:
        if folder.io.preadv(slab.fd, [page], end - ALIGN_BYTES) != ALIGN_BYTES:
            return None, "the file ends before the extent"
        footer = parse_footer(page[ALIGN_BYTES - FOOTER_BYTES :])
        if footer is None:
            return None, "the footer is not whole"
        if (footer.slab, footer.extent) != (slab.number, extent):
            return footer, "the block was meant to be elsewhere"
        if extent_bytes_for(footer.size_bytes) != slab.extent_bytes:
            return footer, "the length does not fit the extent"
        check = xxhash.xxh3_64()
        left = footer.size_bytes
        for at in range(start, end, len(buffer)):
            length = min(len(buffer), end - at)
            if folder.io.preadv(slab.fd, [buffer[:length]], at) != length:
                return footer, "the file ends before the extent"
            check.update(buffer[: min(left, length)])
            left -= min(left, length)
    except OSError as error:
        return None, f"reading: {error.strerror}"
    return footer, "" if check.intdigest() == footer.check else "the bytes are not those that were written"
