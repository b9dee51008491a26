"""Makes a pool known to the GPU, in the background.

Pinning 20 GB takes about a second, and pinning what has no memory yet would take as long as giving it some: the thread
follows the daemon's population in chunks, and the engine serves meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from engine_plugin.copy.contract import Pool

log = logging.getLogger("vllm.kvstore")

#: One registration. Small enough that the driver's locks are held for some ten milliseconds at a time, since the
#: engine's own calls wait for them; a copy must not span two.
CHUNK_BYTES: Final = 256 << 20
#: How often to look whether the daemon has populated more.
_POLL_S: Final = 0.02
_FIRST_NOTE_S: Final = 5.0


class Runtime(Protocol):
    """What is needed of the CUDA runtime."""

    def register(self, address: int, size_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class Registration:
    """The registration of one pool, which grows from its start to its end. Keeps the mapping until `close`.

    Threads: the owner's, and one of its own, which alone registers and unregisters.

    Attributes:
        registered_bytes: From the pool's start on, what is registered. Only grows, until the registration ends.
        error: Why it stopped early; empty if it did not.
        seconds: Time spent in registering so far.
        jobs: Jobs that still refer to the pool; counted by the owner.
    """

    def __init__(
        self, pool: Pool, runtime: Runtime, enter: Callable[[], object], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Starts the thread.

        Args:
            enter: Called first on the thread; sets its device.
        """
        self.pool = pool
        self.registered_bytes = 0
        self.error = ""
        self.seconds = 0.0
        self.jobs = 0
        self.chunk_bytes = chunk_bytes
        self._runtime = runtime
        self._enter = enter
        self._chunks: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether more will be registered."""
        return not self.error and not self._stop.is_set() and self.registered_bytes < self.pool.size_bytes

    def end(self) -> None:
        """Unregisters everything and lets go of the pool, in the background. No job may refer to it any more."""
        self._stop.set()

    def join(self) -> None:
        """Waits until end() has been done."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter()
            self._register_all()
        except Exception as error:
            self._fail(error)
        self._stop.wait()
        self.registered_bytes = 0
        for address in reversed(self._chunks):
            try:
                self._runtime.unregister(address)
            except Exception as error:
                log.warning("kvstore: a registration could not be taken back: %s", error)
        del self.pool

    def _register_all(self) -> None:
        pool = self.pool
        begun = noted = time.monotonic()
        while self.registered_bytes < pool.size_bytes and not self._stop.is_set():
            start = self.registered_bytes
            length = min(self.chunk_bytes, pool.size_bytes - start)
            if pool.populated_bytes < start + length:
                self._stop.wait(_POLL_S)
                continue
            started = time.monotonic()
            self._runtime.register(pool.address + start, length)
            self._chunks.append(pool.address + start)
            now = time.monotonic()
            self.seconds += now - started
            self.registered_bytes = start + length
            if now - noted > _FIRST_NOTE_S:
                noted = now
                log.info("kvstore: %.0f %% of the pool is registered", 100 * self.registered_bytes / pool.size_bytes)
        if not self._stop.is_set():
            log.info(
                "kvstore: the pool (%.1f GB) is registered with the GPU: %.2f s of work within %.1f s",
                pool.size_bytes / 1e9,
                self.seconds,
                time.monotonic() - begun,
            )

    def _fail(self, error: Exception) -> None:
        self.error = str(error) or repr(error)
        log.error(
            "kvstore: only %.1f of %.1f GB of the pool could be registered with the GPU (%s); copies of the rest are "
            "several times slower. Raise the limit of locked memory (ulimit -l, or the container's memlock), or make "
            "the pool smaller",
            self.registered_bytes / 1e9,
            self.pool.size_bytes / 1e9,
            self.error,
        )
