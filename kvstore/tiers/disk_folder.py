"""The directory of a disk tier: who holds it, of which format it is, which files it has.

::

    format                     {"kvstore_disk_format": 1}
    lock                       pid of the holder; the lock itself is the kernel's
    probe                      two pages that are written and read to see whether the medium works
    slab-00000001-69632.kv     extents of 69632 bytes, as many as the file is long
    index/data.mdb             which extent holds which block
    recency, removed           by extent, when it was last used and whether it holds nothing any more (disk_ledger)
    index.damaged/             empty: the index was not whole, and the one built in its place is not durable yet
    *.new                      files that are not finished; removed at open

Blocking calls throughout: for a thread, not for the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.tiers.files import FileIO, Medium, probe_medium
from kvstore.tiers.slabs import Slab

FORMAT: Final = 1
FORMAT_KEY: Final = "kvstore_disk_format"
FORMAT_FILE: Final = "format"
LOCK_FILE: Final = "lock"
PROBE_FILE: Final = "probe"
INDEX_FOLDER: Final = "index"
DAMAGED_INDEX: Final = "index.damaged"
UNFINISHED: Final = ".new"
_SLAB_NAME: Final = re.compile(r"slab-([0-9a-f]{8})-([1-9][0-9]{3,15})\.kv")
_OURS: Final = {
    FORMAT_FILE,
    LOCK_FILE,
    PROBE_FILE,
    "recency",
    "removed",
    INDEX_FOLDER,
    DAMAGED_INDEX,
    "lost+found",
}
#: What a file may take beside its bytes, for the file system's own books.
_PROMISE_SLACK_BYTES: Final = 64 << 10
#: LMDB's memory map and the kernel's locks are not safe there, and a shared directory would have two owners.
_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "9p", "afs", "beegfs", "gpfs"}


@dataclasses.dataclass(frozen=True, slots=True)
class SlabFile:
    """A slab as its name and length tell of it."""

    path: Path
    number: int
    extent_bytes: int
    extents: int


class DiskFolder:
    """A directory that this process holds, from hold() to release().

    Attributes:
        path: The directory.
        medium: What the file system can do; set by hold().
        filesystem: Its type, such as ext4.
        stray_bytes: Bytes of files in the directory that are not ours; they count against the budget.
    """

    def __init__(self, path: Path, io: FileIO) -> None:
        self.path = path
        self.io = io
        self.medium = Medium(False, "not probed", 1, False, "not probed")
        self.filesystem = ""
        self.stray_bytes = 0
        self._lock_fd = -1

    # -- the directory as a whole --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Takes the directory, or finds out why not.

        Raises:
            ConfigError: it can never be ours: another process holds it, its format is not known, it holds something
                else, it is a file.
            OSError: the medium does not work now.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{self.path} is no folder, or lies below something that is none") from None
        self.filesystem = filesystem_of(self.path)
        if self.filesystem in _NETWORK or self.filesystem.startswith("fuse.sshfs"):
            raise ConfigError(
                f"{self.path} is on {self.filesystem}: the disk tier needs a local file system; hosts share blocks "
                "through the Redis tier"
            )
        self._refuse_foreign()
        self._take_lock()
        try:
            self._check_format()
            self._clean()
            self.medium = probe_medium(self.io, self.path / PROBE_FILE)
        except BaseException:
            self.release()
            raise

    def restore(self) -> None:
        """Makes the directory anew, and takes it, where somebody has removed it or all that was in it.

        Raises:
            OSError: it cannot be made; or it is another one now, or on another file system, and not to be filled.
        """
        if self.is_in_place():
            return
        held = os.fstat(self._lock_fd)
        above = next(each for each in (self.path, *self.path.absolute().parents) if each.exists())
        if above.stat().st_dev != held.st_dev:
            raise OSError(errno.ENODEV, f"{self.path} is on another file system than it was: is it mounted?")
        old, self._lock_fd = self._lock_fd, -1
        try:
            self.hold()
        except BaseException as error:
            self._lock_fd = old
            if isinstance(error, ConfigError):
                raise OSError(errno.ESTALE, str(error)) from error
            raise
        os.close(old)

    def is_in_place(self) -> bool:
        """Whether the directory is the one that was taken; False: its lock file is gone.

        Raises:
            OSError: ESTALE: there is somebody else's in its place.
        """
        try:
            found = os.stat(self.path / LOCK_FILE)
        except FileNotFoundError:
            return False
        if not os.path.samestat(found, os.fstat(self._lock_fd)):
            raise OSError(errno.ESTALE, f"{self.path} is another directory than it was: start the daemon anew")
        return True

    def release(self) -> None:
        """Lets go of the directory. Its files are for somebody else afterwards."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _refuse_foreign(self) -> None:
        if (self.path / FORMAT_FILE).exists():
            return
        foreign = [entry.name for entry in os.scandir(self.path) if not _is_ours(entry.name)]
        if foreign:
            raise ConfigError(
                f"{self.path} is neither empty nor a directory of the disk tier (it has {foreign[0]!r} and no "
                f"{FORMAT_FILE!r} file): name an empty one"
            )

    def _take_lock(self) -> None:
        fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_of(self.path)
            os.close(fd)
            raise ConfigError(
                f"{self.path} is held by another process (pid {holder if holder else 'unknown'}): stop it, or name "
                "another directory"
            ) from None
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd
        # A disk that is full must not keep the tier from reading; who holds it is told as well as can be.
        with contextlib.suppress(OSError):
            os.pwrite(fd, b"%-20d\n" % os.getpid(), 0)

    def _check_format(self) -> None:
        path = self.path / FORMAT_FILE
        if not path.exists():
            self.write_whole(FORMAT_FILE, json.dumps({FORMAT_KEY: FORMAT}).encode() + b"\n")
            return
        try:
            found = json.loads(path.read_bytes())[FORMAT_KEY]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path} does not say what it should; if the directory is the disk tier's, remove that file"
            ) from None
        if found != FORMAT:
            raise ConfigError(
                f"{self.path} has format {found} and this version knows format {FORMAT}: use the version that wrote "
                "it, or name another directory"
            )

    def _clean(self) -> None:
        """Removes what was not finished, counts what is not ours."""
        self.stray_bytes = 0
        for entry in os.scandir(self.path):
            if entry.name.endswith(UNFINISHED) and _is_ours(entry.name):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            elif not _is_ours(entry.name):
                self.stray_bytes += bytes_below(Path(entry.path))
        damaged = self.path / DAMAGED_INDEX
        if damaged.exists():
            self.stray_bytes += bytes_below(damaged)

    def write_whole(self, name: str, data: bytes) -> None:
        """A file that is there as a whole or not at all."""
        fresh = self.path / (name + UNFINISHED)
        fd = self.io.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            self.io.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, self.path / name)
        self.sync_names()

    def sync_names(self) -> None:
        """Makes durable which files there are."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- slabs ------------------------------------------------------------------------------------------

    def slab_files(self) -> list[SlabFile]:
        """The slabs that are there. The only place that lists the directory after hold()."""
        found = []
        for entry in os.scandir(self.path):
            if match := _SLAB_NAME.fullmatch(entry.name):
                extent_bytes = int(match[2])
                if extent_bytes % 4096 == 0 and entry.is_file(follow_symlinks=False):
                    extents = entry.stat(follow_symlinks=False).st_size // extent_bytes
                    found.append(SlabFile(Path(entry.path), int(match[1], 16), extent_bytes, extents))
        return sorted(found, key=lambda file: file.number)

    def slab_path(self, number: int, extent_bytes: int) -> Path:
        return self.path / f"slab-{number:08x}-{extent_bytes}.kv"

    def open_slab(self, file: SlabFile) -> Slab:
        """Opens a slab that is there. Its books are empty.

        Raises:
            OSError: as open does.
        """
        fd = self.io.open(file.path, os.O_RDWR | (os.O_DIRECT if self.medium.direct else 0))
        return Slab(file.number, file.extent_bytes, file.extents, fd, os.fstat(fd).st_ino)

    def create_slab(self, number: int, extent_bytes: int, extents: int) -> Slab:
        """A new file with room for all its extents, reserved where the file system can. sync_names() makes its name
        durable.

        Raises:
            OSError: ENOSPC above all; nothing is left behind.
        """
        path = self.slab_path(number, extent_bytes)
        fresh = path.with_name(path.name + UNFINISHED)
        fd = self.io.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self.medium.direct else 0))
        try:
            if self.medium.allocate:
                self.io.allocate(fd, extents * extent_bytes)
            os.ftruncate(fd, extents * extent_bytes)
            os.rename(fresh, path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                self.io.unlink(fresh)
            raise
        slab = Slab(number, extent_bytes, extents, fd, os.fstat(fd).st_ino)
        slab.named = False
        slab.raw = list(range(extents - 1, -1, -1))
        return slab

    def remove_slab(self, slab: Slab) -> None:
        """Closes and removes a slab; its room is free afterwards. Nobody may be reading or writing it."""
        # Whoever tidies up after a failure must not close what has this number by then.
        fd, slab.fd = slab.fd, -1
        if fd >= 0:
            os.close(fd)
        path = self.slab_path(slab.number, slab.extent_bytes)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == slab.inode:  # else somebody has put another one in its place
                self.io.unlink(path)

    def close_files(self, slabs: Iterable[Slab]) -> None:
        """Closes slabs that stay."""
        for slab in slabs:
            os.close(slab.fd)

    def lengthen_slab(self, slab: Slab) -> int:
        """Gives a file that was cut off its length back. Returns what was left of it in bytes.

        Raises:
            OSError: ENOSPC above all.
        """
        left = os.fstat(slab.fd).st_size
        if self.medium.allocate:
            self.io.allocate(slab.fd, slab.size_bytes)
        else:
            os.ftruncate(slab.fd, slab.size_bytes)
        return left

    def shorten_slab(self, slab: Slab, extents: int) -> None:
        """Cuts the extents from `extents` on off the file."""
        os.ftruncate(slab.fd, extents * slab.extent_bytes)
        slab.extents = extents
        del slab.entries[extents:], slab.used[extents:]

    def slab_fault(self, slab: Slab) -> str | None:
        """What happened to a file under us; None where it is as it was."""
        if os.fstat(slab.fd).st_size < slab.size_bytes:
            return "truncated"
        try:
            now = os.stat(self.slab_path(slab.number, slab.extent_bytes))
        except FileNotFoundError:
            return "deleted"
        return None if now.st_ino == slab.inode else "replaced"

    # -- the index ----------------------------------------------------------------------

    @property
    def index_folder(self) -> Path:
        return self.path / INDEX_FOLDER

    @property
    def damaged_index(self) -> Path:
        return self.path / DAMAGED_INDEX

    def set_index_aside(self) -> None:
        """Removes an index that is not whole: the budget has room for one. What is left says so to the next start."""
        try:
            self.damaged_index.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.forget_index()  # which makes room for the sign; without it the index is simply gone
            self.damaged_index.mkdir(mode=0o700, exist_ok=True)
        self.forget_index()

    def forget_index(self) -> None:
        shutil.rmtree(self.index_folder, ignore_errors=True)

    def forget_damaged_index(self) -> None:
        shutil.rmtree(self.damaged_index, ignore_errors=True)

    def reserve_index(self, size_bytes: int) -> None:
        """Has the file system promise room for the index, so that commits succeed when others have filled the disk, and
        take back what it promised before beyond that.

        Raises:
            OSError: ENOSPC above all.
        """
        if self.medium.allocate:
            fd = self.io.open(self.index_folder / "data.mdb", os.O_RDWR)
            try:
                stat = os.fstat(fd)
                if stat.st_blocks * 512 > max(size_bytes, stat.st_size) + _PROMISE_SLACK_BYTES:
                    os.ftruncate(fd, stat.st_size)  # to the length that it has: what lies behind its end goes
                self.io.allocate(fd, size_bytes, keep_size=True)
            finally:
                os.close(fd)


def holder_of(directory: Path) -> int | None:
    """pid that the lock file of a directory names."""
    with contextlib.suppress(ValueError, OSError):
        return int((directory / LOCK_FILE).read_text())
    return None


def filesystem_of(path: Path) -> str:
    """Type of the file system that a path is on; empty where the kernel does not say."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for point, found in _mounts():
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, found
    return kind


def _mounts() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
            yield point, rest.split()[0]


def bytes_below(path: Path) -> int:
    """Bytes that a file or folder takes on the medium."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_blocks * 512
    return sum(bytes_below(Path(entry.path)) for entry in os.scandir(path))


def _is_ours(name: str) -> bool:
    return (
        name in _OURS
        or _SLAB_NAME.fullmatch(name.removesuffix(UNFINISHED)) is not None
        or (name.removesuffix(UNFINISHED) in _OURS and name.endswith(UNFINISHED))
    )
