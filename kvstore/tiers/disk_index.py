"""The durable index of a disk tier: which extent holds which block. The only place that knows LMDB.

One data file in a folder of its own. Records: ``b`` + name of a block -> where it lies; ``N`` + digest -> the text of a
namespace. No lock file: the directory's own lock keeps other processes out, and within this one the index is read once,
at open, and written by one thread afterwards, so no reader is ever open beside a writer, no stale one keeps pages from
being used again, and the map may grow at any time. The records are read from the file, before LMDB maps it.

LMDB ends the process over a page that is not as it left it, or that cannot be read. So each commit makes sure first
that nobody else has changed the file since the last one (its length and the time of its last change say so), and that
all of it is in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.tier import TierNamespace
from kvstore.tiers.index_check import IndexDamaged, Leaves, check_index_file, read_index_file
from kvstore.tiers.page_cache import bring_in

DATA_FILE: Final = "data.mdb"
#: Slab, extent, size_bytes, sequence.
RECORD: Final = struct.Struct("<IIQQ")
#: The same, as a column of an array.
RECORD_TYPE: Final = np.dtype([("slab", "<u4"), ("extent", "<u4"), ("size_bytes", "<u8"), ("sequence", "<u8")])
assert RECORD_TYPE.itemsize == RECORD.size
_BLOCK: Final = b"b"  # sorts after _NAMESPACE, so blocks run to the end
_NAMESPACE: Final = b"N"
#: Records in one transaction of write_index().
_CHUNK: Final = 8192
_MAP_BYTES_MIN: Final = 16 << 20

Record = tuple[bytes, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """Records of blocks whose names are of one length.

    Attributes:
        names: The names, as an array of that many plain bytes each.
        table: The record of each, of RECORD_TYPE.
        odd: Names of other records, whose values are no RECORD.
    """

    names: npt.NDArray[np.void]
    table: npt.NDArray[np.void]
    odd: list[bytes]


def read_columns(path: Path) -> Iterator[Columns]:
    """Names of blocks and their records, as the data file of an index has them, which is checked on the way.

    Raises:
        IndexDamaged: it is not whole; forget what was handed over.
        OSError: it cannot be read.
    """
    for columns in read_index_file(path, _columns):
        yield from columns


def _columns(leaves: Leaves) -> list[Columns]:
    blocks = (leaves.key_bytes > 1) & (leaves.data[leaves.keys] == _BLOCK[0])
    found = []
    for key_bytes in np.flatnonzero(np.bincount(leaves.key_bytes[blocks])).tolist():
        rows = blocks & (leaves.key_bytes == key_bytes)
        right = rows & (leaves.value_bytes == RECORD.size)
        odd = rows & ~right
        name = np.dtype((np.void, key_bytes - len(_BLOCK)))
        found.append(
            Columns(
                _gather(leaves.data, leaves.keys[right] + len(_BLOCK), name),
                _gather(leaves.data, leaves.values[right], RECORD_TYPE),
                _gather(leaves.data, leaves.keys[odd] + len(_BLOCK), name).tolist() if odd.any() else [],
            )
        )
    return found


def _gather(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], kind: np.dtype[np.void]
) -> npt.NDArray[np.void]:
    """What lies at some places, which need not be aligned."""
    shape = max(0, data.size - kind.itemsize + 1)
    anywhere: npt.NDArray[np.void] = np.ndarray(shape, dtype=kind, buffer=data, strides=1)
    return anywhere[starts]


class DiskIndex:
    """An open index. One thread at a time, but for what says otherwise.

    Attributes:
        map_bytes: What LMDB may map; grows where it must.
    """

    def __init__(self, folder: Path, map_bytes: int, *, checked: bool = False) -> None:
        """Opens the index in a folder, where it is made if there is none.

        Args:
            checked: The caller has just read all of it with read_columns.

        Raises:
            IndexDamaged: what is there is not whole.
            OSError: it cannot be read or made.
        """
        self.path = folder / DATA_FILE
        if not checked and self.path.exists():
            check_index_file(self.path)
        self.map_bytes = max(map_bytes, _MAP_BYTES_MIN)
        self._folder = folder
        #: Held from a look at the file until what is done to it was noted.
        self._changing = threading.Lock()
        self._env = self._opened()
        self._note_file()

    def _note_file(self) -> None:
        stat = self.path.stat()
        self._file = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def check_file(self) -> None:
        """Whether the file is what the last commit left. Any thread; waits for a commit that goes on.

        Raises:
            IndexDamaged: it is another one, or it was written to or cut off.
        """
        with self._changing:
            self._check_file()

    def _check_file(self) -> None:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            raise IndexDamaged("the file was removed") from None
        if (stat.st_dev, stat.st_ino) != self._file[:2] or stat.st_size < self._file[2]:
            raise IndexDamaged("the file was replaced or cut off")
        if stat.st_mtime_ns != self._file[3]:
            raise IndexDamaged("somebody else wrote to the file")

    def _opened(self) -> Any:
        """Opens it with a map of map_bytes, or of as much as there is address space for (ulimit -v)."""
        while True:
            try:
                return self._mapped(self.map_bytes)
            except (MemoryError, OSError, lmdb.Error) as error:
                if _errno_of(error) != errno.ENOMEM or self.map_bytes <= _MAP_BYTES_MIN:
                    raise _translated(error) from error
                self.map_bytes = max(_MAP_BYTES_MIN, self.map_bytes // 4)  # it grows when it is full

    def _mapped(self, map_bytes: int) -> Any:
        return lmdb.open(
            str(self._folder),
            map_size=map_bytes,
            lock=False,
            readahead=False,
            meminit=True,  # no bytes of this process's heap in a file
            max_dbs=0,
            mode=0o600,
        )

    def _grow(self) -> None:
        """Maps more. Opened anew, since LMDB is left without a map where it cannot have a larger one.

        Raises:
            OSError: there is no address space for more; the index is as it was.
        """
        before = self.map_bytes
        self._env.close()
        for larger in (2 * before, before + before // 4, before + _MAP_BYTES_MIN):
            try:
                self._env = self._mapped(larger)
                self.map_bytes = larger
                return
            except (MemoryError, OSError, lmdb.Error) as error:
                if _errno_of(error) != errno.ENOMEM:
                    raise _translated(error) from error
        self._env = self._opened()
        raise OSError(errno.ENOMEM, f"index: no address space for a map of more than {before} bytes")

    def namespaces(self) -> list[TierNamespace]:
        """What was remembered. Text that makes no sense is left out."""
        found = []
        with _translating(), self._env.begin(buffers=False) as transaction:
            cursor = transaction.cursor()
            if cursor.set_range(_NAMESPACE):
                for key, value in cursor.iternext(keys=True, values=True):
                    if not key.startswith(_NAMESPACE):
                        break
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        text = json.loads(value)
                        sizes = tuple(int(size) for size in text["group_bytes"])
                        found.append(TierNamespace(key[1:], str(text["identity"]), sizes))
        return found

    def commit(
        self, deletes: Iterable[bytes], puts: Iterable[Record], namespaces: Iterable[TierNamespace | bytes] = ()
    ) -> None:
        """Applies deletes, then puts, as one step, and makes it durable before it returns.

        Args:
            namespaces: To remember; or digests, to forget.

        Raises:
            OSError: nothing of it was applied.
            IndexDamaged: nothing of it was applied, nor will anything be: somebody changed the file.
        """
        deletes, puts, namespaces = list(deletes), list(puts), list(namespaces)
        with self._changed():
            bring_in(self.path, self._file[2])
            self._commit(deletes, puts, namespaces)

    def reserve(self, call: Callable[[], None]) -> None:
        """Makes a call that reserves room for the file. Any thread; waits for a commit that goes on.

        Raises:
            IndexDamaged: as check_file does.
            OSError: as the call does.
        """
        with self._changed():
            call()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        with self._changing:
            self._check_file()
            try:
                yield
            finally:
                # What became of it meanwhile by somebody else's doing is left for the next check_file().
                with contextlib.suppress(OSError):
                    stat = self.path.stat()
                    if (stat.st_dev, stat.st_ino) == self._file[:2] and stat.st_size >= self._file[2]:
                        self._note_file()

    def _commit(
        self, deletes: Iterable[bytes], puts: Iterable[Record], namespaces: Iterable[TierNamespace | bytes]
    ) -> None:
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for key in deletes:
                        transaction.delete(_BLOCK + key)
                    for key, value in puts:
                        transaction.put(_BLOCK + key, value)
                    for namespace in namespaces:
                        if isinstance(namespace, bytes):
                            transaction.delete(_NAMESPACE + namespace)
                        else:
                            transaction.put(_NAMESPACE + namespace.digest, namespace_text(namespace))
                return
            except lmdb.MapFullError:
                self._grow()  # nothing else is open
            except lmdb.Error as error:
                raise _translated(error) from error

    @property
    def known_bytes(self) -> int:
        """Length of the data file after the last commit. Any thread."""
        return self._file[2]

    def reopen(self) -> None:
        """After a failure within LMDB, which may refuse everything until it is opened anew.

        Raises:
            IndexDamaged: the file is not whole, or some of it cannot be read; the index is closed.
            OSError: it cannot be opened.
        """
        with self._changing:
            self._check_file()
            self.close()
            try:
                check_index_file(self.path)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise IndexDamaged(f"it cannot be read: {error}") from error
            self._env = self._opened()
            self._note_file()

    def close(self) -> None:
        self._env.close()


def namespace_text(namespace: TierNamespace) -> bytes:
    """How a namespace is kept."""
    text = {"identity": namespace.identity, "group_bytes": list(namespace.group_bytes)}
    return json.dumps(text, separators=(",", ":")).encode()


def write_index(folder: Path, records: Sequence[Record], namespaces: Sequence[TierNamespace], map_bytes: int) -> None:
    """Writes an index anew in place of the one in a folder. The old one stays until the new one is whole.

    Raises:
        OSError: it cannot be written; the old one is still there.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        index = DiskIndex(fresh, map_bytes)
        try:
            index.commit((), (), namespaces)
            ordered = sorted(records)
            for at in range(0, len(ordered), _CHUNK):
                index.commit((), ordered[at : at + _CHUNK])
        finally:
            index.close()
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)  # others may need the room
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(fresh, folder)
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _errno_of(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, MemoryError | lmdb.MemoryError):
        return errno.ENOMEM
    # LMDB hands the system's errors on as text only.
    text = str(error)
    for code in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENOMEM, errno.EACCES, errno.EFBIG):
        if os.strerror(code) in text:
            return code
    return errno.EIO


def _translated(error: BaseException) -> Exception:
    if isinstance(error, lmdb.CorruptedError | lmdb.InvalidError | lmdb.VersionMismatchError | lmdb.PageNotFoundError):
        return IndexDamaged(str(error))
    return OSError(_errno_of(error), f"index: {error}")


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _translated(error) from error
