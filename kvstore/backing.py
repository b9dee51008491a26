"""Memory for the pool: one anonymous shared file, on the largest pages that can be had, populated in the background.

What the pages are decides disk speed by 2x and first-touch time by 4x, so what was got is read back from the kernel
and shown in stats, never assumed. In order of preference:

``hugetlb``      a memfd on reserved huge pages (``vm.nr_hugepages``); never swapped, never split.
``tmpfs-huge``   an unnamed file on a detached tmpfs mounted ``huge=advise``. Needs the right to mount, leaves no mount
                 point and no name behind, and works where the kernel's setting for memfds is ``never`` (the default).
``thp``          a memfd with MADV_HUGEPAGE, where the kernel's shmem setting lets that do something.
``4k``           a plain memfd.

The file has no name in any of these, so nothing is left behind when the process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Final, Literal

from kvstore.errors import ConfigError

HugePages = Literal["auto", "hugetlb", "thp", "off"]
BackingKind = Literal["hugetlb", "tmpfs-huge", "thp", "4k"]

HUGE_PAGE_BYTES: Final = 2 << 20
SMALL_PAGE_BYTES: Final = 4096

_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_MFD_HUGETLB: Final = 0x4
_MFD_HUGE_2MB: Final = 21 << 26
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_POPULATE_STEP_BYTES: Final = 2 * HUGE_PAGE_BYTES
_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
# The new mount API has the same numbers on every architecture.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_CLOEXEC_FLAG: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long


@dataclasses.dataclass(frozen=True, slots=True)
class Backing:
    """What the pool rests on.

    Attributes:
        kind: One of the names in the module's docstring.
        page_bytes: Size of a page where the kernel could give one of that size.
        note: Why not something better; empty where there is nothing better.
    """

    kind: BackingKind
    page_bytes: int
    note: str


class SharedMemory:
    """One shared mapping and the descriptor to hand to others. Owns both; close() gives them back.

    Attributes:
        fd: Descriptor of the file; other processes map it.
        size_bytes: Length of the mapping.
        address: Where it lies in this process.
    """

    def __init__(self, fd: int, size_bytes: int, backing: Backing, map_: mmap.mmap) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.backing = backing
        self._map = map_
        self.address = address_of(map_)

    @property
    def buffer(self) -> memoryview:
        """The mapping, writable."""
        return memoryview(self._map)

    def populate(self, offset: int, length: int) -> None:
        """Gives every page of a range its memory, without changing a byte. Any thread; releases the GIL.

        Raises:
            MemoryError: the machine, the cgroup or the huge page pool has no more.
        """
        populate_pages(self.address + offset, length)

    def discard(self, offset: int, length: int) -> None:
        """Gives the memory of a range back to the machine; it reads as zeros afterwards."""
        self._map.madvise(mmap.MADV_REMOVE, offset, length)

    def huge_bytes(self) -> int:
        """How much of the mapping is on huge pages now, as the kernel tells. Walks the page tables: not for a loop."""
        if self.backing.kind == "hugetlb":
            return self.size_bytes
        pattern = re.compile(rf"^{self.address:x}-", re.MULTILINE)
        text = Path("/proc/self/smaps").read_text()
        match = pattern.search(text)
        if match is None:
            return 0
        figures = re.search(r"^ShmemPmdMapped:\s+(\d+) kB", text[match.start() :], re.MULTILINE)
        return int(figures.group(1)) << 10 if figures else 0

    def close(self) -> None:
        """Unmaps and closes. Raises BufferError while someone in this process still holds a view."""
        self._map.close()
        os.close(self.fd)


def address_of(map_: mmap.mmap) -> int:
    """Where a writable mapping starts in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(map_))


def populate_pages(address: int, length: int) -> None:
    """MADV_POPULATE_WRITE on any shared mapping of this process; same promise as SharedMemory.populate."""
    # In small steps: the kernel holds the lock on the address space through each, and every other thread of the process
    # that maps or unmaps anything has to wait for it.
    for start in range(0, length, _POPULATE_STEP_BYTES):
        step = min(_POPULATE_STEP_BYTES, length - start)
        while _libc.madvise(address + start, step, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code == errno.EINVAL:  # a kernel before 5.14: pages come at first touch instead
                return
            raise MemoryError(f"cannot populate {step} bytes of the pool: {os.strerror(code)}")


def open_pool_memory(size_bytes: int, huge_pages: HugePages) -> SharedMemory:
    """Opens the pool's memory; nothing is populated.

    Args:
        size_bytes: Multiple of HUGE_PAGE_BYTES.
        huge_pages: ``auto`` takes the best there is, ``hugetlb`` and ``thp`` insist, ``off`` takes 4 KiB pages.

    Raises:
        ConfigError: what was insisted on cannot be had; the message says what to change.
    """
    assert size_bytes > 0 and size_bytes % HUGE_PAGE_BYTES == 0
    if huge_pages == "off":
        return _open_plain(size_bytes, "switched off by --hugepages off")
    notes = []
    if huge_pages in ("auto", "hugetlb"):
        try:
            return _open_hugetlb(size_bytes)
        except OSError as error:
            notes.append(f"hugetlb: {_why_no_hugetlb(size_bytes, error)}")
    if huge_pages == "hugetlb":
        raise ConfigError(f"--hugepages hugetlb: {notes[0]}")
    setting = _shmem_setting()
    if setting in ("always", "within_size", "advise", "force"):
        return _open_thp(size_bytes)
    notes.append(f"thp: /sys/kernel/mm/transparent_hugepage/shmem_enabled is {setting!r}, so memfds get none")
    try:
        return _open_tmpfs_huge(size_bytes)
    except OSError as error:
        notes.append(f"tmpfs huge=advise: {error.strerror} (needs CAP_SYS_ADMIN)")
    if huge_pages == "thp":
        raise ConfigError(f"--hugepages thp: {'; '.join(notes[1:] or notes)}")
    return _open_plain(size_bytes, "; ".join(notes))


def open_table_memory(size_bytes: int) -> tuple[SharedMemory, int]:
    """Memory that only this process can write: the mapping, and a descriptor that others can map for reading only."""
    fd = _memfd("kvstore-epochs", _MFD_ALLOW_SEALING)
    size_bytes = -(-size_bytes // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
    os.ftruncate(fd, size_bytes)
    memory = _mapped(fd, size_bytes, Backing("4k", SMALL_PAGE_BYTES, ""))
    # After this seal no new writable mapping can be made, through any descriptor; ours stays.
    with contextlib.suppress(OSError):  # a kernel before 5.1 has no such seal
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
    read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    return memory, read_only_fd


def _memfd(name: str, flags: int) -> int:
    return os.memfd_create(name, flags | _MFD_CLOEXEC)


def _mapped(fd: int, size_bytes: int, backing: Backing) -> SharedMemory:
    try:
        map_ = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(fd)
        raise
    # A core dump of the daemon would otherwise be as large as the pool, and a forked child would share it.
    map_.madvise(mmap.MADV_DONTDUMP)
    map_.madvise(mmap.MADV_DONTFORK)
    return SharedMemory(fd, size_bytes, backing, map_)


def _seal_size(fd: int) -> None:
    # A client that truncates the file would kill every other process that touches it with SIGBUS.
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


def _open_plain(size_bytes: int, note: str) -> SharedMemory:
    fd = _memfd("kvstore-pool", _MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    _seal_size(fd)
    return _mapped(fd, size_bytes, Backing("4k", SMALL_PAGE_BYTES, note))


def _open_hugetlb(size_bytes: int) -> SharedMemory:
    fd = _memfd("kvstore-pool", _MFD_HUGETLB | _MFD_HUGE_2MB | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        _seal_size(fd)
    except OSError:
        os.close(fd)
        raise
    # mmap reserves the pages, so a pool that is too small is refused here and not by a SIGBUS later.
    return _mapped(fd, size_bytes, Backing("hugetlb", HUGE_PAGE_BYTES, ""))


def _open_thp(size_bytes: int) -> SharedMemory:
    fd = _memfd("kvstore-pool", _MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    _seal_size(fd)
    memory = _mapped(fd, size_bytes, Backing("thp", HUGE_PAGE_BYTES, ""))
    _libc.madvise(memory.address, size_bytes, _MADV_HUGEPAGE)
    return memory


def _open_tmpfs_huge(size_bytes: int) -> SharedMemory:
    context = _checked(_libc.syscall(_SYS_FSOPEN, b"tmpfs", _CLOEXEC_FLAG))
    try:
        for key, value in ((b"huge", b"advise"), (b"size", b"%d" % size_bytes), (b"mode", b"0700")):
            _checked(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, key, value, 0))
        _checked(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0))
        mount = _checked(_libc.syscall(_SYS_FSMOUNT, context, _CLOEXEC_FLAG, 0))
    finally:
        os.close(context)
    try:
        # O_TMPFILE: no name, so the file goes with its last descriptor; the mount goes with its last file.
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    finally:
        os.close(mount)
    os.ftruncate(fd, size_bytes)
    memory = _mapped(fd, size_bytes, Backing("tmpfs-huge", HUGE_PAGE_BYTES, ""))
    _libc.madvise(memory.address, size_bytes, _MADV_HUGEPAGE)
    return memory


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _shmem_setting() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "absent"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else "unknown"


def _why_no_hugetlb(size_bytes: int, error: OSError) -> str:
    needed = size_bytes // HUGE_PAGE_BYTES
    try:
        free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except (OSError, ValueError):
        return f"this kernel offers none ({error.strerror})"
    return f"{needed} pages of 2 MiB are needed and {free} are reserved and free (sysctl vm.nr_hugepages)"
