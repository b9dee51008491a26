"""Files read into GPU memory with kvikio: by the drive itself where the driver has nvidia-fs (GPUDirect Storage), else
through a bounce buffer on the host (kvikio's compatibility mode).
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from typing import Any, Final

import torch

from engine_plugin.copy.reads import HALVES, STAGE_BYTES, DirectReads, Read

#: Reads at once, each by a thread that sleeps in the kernel or in cuFile. Measured on a disk of 1.7 GB/s, where 4 reach
#: nine tenths of that; fast drives want more.
THREADS: Final = 16
#: A block is read in pieces of so many bytes, each by one thread.
PIECE_BYTES: Final = 4 << 20
#: Files open at a time; a disk tier has about 64, and a few hundred where it is large.
FILES_MAX: Final = 256
#: What cuFile wants of places in memory and in files.
ALIGNMENT: Final = 4096
#: How files are read, as the counts name it.
GDS: Final = "gds"
COMPAT: Final = "gds_compat"


class GdsUnavailable(Exception):
    """Files cannot be read into GPU memory here, or not as fast as was asked for.

    Attributes:
        reason: One word, for counts.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Pieces:
    """Several reads that are one. Kvikio cuts reads by itself too, but where one of its pieces fails, not every version
    waits for the others: they would be written into a buffer that has other blocks by then.
    """

    def __init__(self, reads: list[Read]) -> None:
        self._reads = reads

    def get(self) -> int:
        size_bytes, error = 0, None
        for read in self._reads:
            try:
                size_bytes += read.get()
            except Exception as problem:
                error = error or problem
        if error is not None:
            raise error
        return size_bytes


class KvikioFiles:
    """See the module. From one thread, whose current device the memory is on.

    Its settings are kvikio's own of this process.
    """

    def __init__(self, *, compat: bool) -> None:
        """Looks what there is.

        Args:
            compat: Without nvidia-fs, go through the host.

        Raises:
            GdsUnavailable: no_kvikio; no_nvidia_fs; error.
        """
        try:
            import kvikio
            import kvikio.buffer
            import kvikio.cufile_driver
            import kvikio.defaults
        except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
            raise GdsUnavailable("no_kvikio", f"kvikio cannot be imported ({error}): install the extra `gds`") from None
        self._kvikio = kvikio
        try:
            real = bool(kvikio.cufile_driver.get("is_gds_available"))
            if not real and not compat:
                raise GdsUnavailable("no_nvidia_fs", "the driver has no nvidia-fs")
            mode = kvikio.CompatMode.OFF if real else kvikio.CompatMode.ON
            kvikio.defaults.set({"compat_mode": mode, "num_threads": THREADS, "auto_direct_io_read": True})
        except RuntimeError as error:
            raise GdsUnavailable("error", f"kvikio does not work: {error}") from None
        self.how = GDS if real else COMPAT
        self._open: OrderedDict[tuple[str, int, int], Any] = OrderedDict()

    def read(self, path: str, offset: int, size_bytes: int, into: torch.Tensor) -> Read:
        """Begins to read into contiguous GPU memory. Reads past the page cache where the file system can.

        Raises:
            OSError, RuntimeError: the file cannot be opened.
        """
        file, reads = self._file(path), []
        for begin in range(0, size_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, size_bytes - begin)
            # A task as large as the piece: it is one thread's.
            reads.append(file.pread(into[begin : begin + size], size, offset + begin, size))
        return _Pieces(reads)

    def _file(self, path: str) -> Any:
        status = os.stat(path)  # the daemon may have made a new file of that name
        key = (path, status.st_dev, status.st_ino)
        file = self._open.pop(key, None)
        if file is None:
            file = self._kvikio.CuFile(path, "r")
        self._open[key] = file
        return file

    def tidy(self) -> None:
        """Closes files that were not read for long."""
        while len(self._open) > FILES_MAX:
            self._open.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def register(self, memory: torch.Tensor) -> None:
        """Makes memory known to cuFile, which otherwise goes through a buffer of its own on the GPU."""
        if self.how == GDS:
            with contextlib.suppress(RuntimeError):
                self._kvikio.buffer.memory_register(memory)

    def forget(self, memory: torch.Tensor) -> None:
        """Takes `register` back."""
        if self.how == GDS:
            with contextlib.suppress(RuntimeError):
                self._kvikio.buffer.memory_deregister(memory)


def open_reads(device: str, block_bytes: int, *, compat: bool) -> DirectReads:
    """Direct reads into the memory of a GPU.

    Args:
        compat: As for KvikioFiles.

    Raises:
        GdsUnavailable: no_gpu; block_size; no_memory; or as KvikioFiles.
    """
    if not device.startswith("cuda") or not torch.cuda.is_available():
        raise GdsUnavailable("no_gpu", "KV memory is not on a CUDA GPU")
    if block_bytes % ALIGNMENT:
        raise GdsUnavailable("block_size", f"a block has {block_bytes} bytes, which is no multiple of {ALIGNMENT}")
    from engine_plugin.copy.stage import GpuStage  # which needs Triton

    files = KvikioFiles(compat=compat)
    rows = max(1, STAGE_BYTES // HALVES // block_bytes)
    try:
        stage = GpuStage(torch.device(device), block_bytes, rows, files.forget)
    except torch.OutOfMemoryError:
        raise GdsUnavailable("no_memory", f"no GPU memory for {HALVES * rows * block_bytes} bytes of buffers") from None
    files.register(stage.memory)
    return DirectReads(files, stage, block_bytes)
