"""Loads past the pool (GPUDirect Storage), the two ends of deciding about them.

A worker finds out whether it can (`Opening`, which looks on a thread, since that takes a second) and reports it. The
scheduler's side (`DirectLoads`) says to the link, with every question to the daemon, whether blocks on the disk should
be leased there or brought up.

Knows nothing of vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from engine_plugin.vllm.rates import PROBE_S, LoadPolicy

log = logging.getLogger("vllm.kvstore")

#: Less than this is not read past the pool: the detour costs little, and the blocks are in the pool for the next one.
READ_BYTES_MIN: Final = 4 << 20
#: Reports of workers that can.
WORKING: Final = ("gds", "gds_compat")


class Opening:
    """The worker's end.

    Threads: all methods are for the worker's thread; `open_reads` runs on one of its own.

    Args:
        setting: What the engine was told, auto, on or off; None: the daemon decides.
        open_reads: Given whether reading through the host will do, gives engine_plugin.copy.reads.DirectReads, or
            raises an error with a `reason`.
    """

    def __init__(self, setting: str | None, open_reads: Callable[[bool], Any]) -> None:
        self._setting = setting
        self._open_reads = open_reads
        self._mode = ""
        self._thread: threading.Thread | None = None
        self._opened: tuple[Any, str] | None = None  # written by the thread
        self._told: tuple[str, str] | None = None
        self._hanging: Any = None  # what a hanging medium still writes into
        #: None: there is no way past the pool, or it is not known so far.
        self.reads: Any = None

    def settle(self, daemon: str | None) -> tuple[str, str] | None:
        """Looks once what can be done.

        Args:
            daemon: What the daemon says; None: not attached.

        Returns:
            What was asked for and what there is, where that is news.
        """
        mode = self._setting or daemon
        if not mode and daemon is None:
            return None
        mode = mode or "off"  # a daemon that has never heard of it
        if self._opened is not None and self._opened[1] == "no_nvidia_fs" and self._mode == "auto" and mode == "on":
            self._opened = None  # another daemon asks for more
        if self._thread is None and self._opened is None and mode != "off":
            self._mode = mode
            thread = threading.Thread(target=self._open, args=(mode == "on",), name="kvstore-gds-open", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:  # there is none to be had
                self._give_up(error, mode == "on")
        if self._thread is not None:
            if self._opened is None:
                return None
            self._thread = None
            self.reads = self._opened[0]
        state = self._opened[1] if self._opened is not None and mode != "off" else "off"
        if mode == "auto" and state == "gds_compat":
            state = "no_nvidia_fs"  # it was opened for a daemon that asked for it
        if self._told == (mode, state):
            return None
        self._told = (mode, state)
        return self._told

    def poll(self) -> None:
        """Looks whether the medium hangs: then every read is over, and there are no others before it has come back."""
        if self.reads is not None and self.reads.poll():
            self._hanging, self.reads, self._opened = self.reads, None, (None, "hangs")
            log.warning("kvstore: a read past the pool hangs; blocks on disk come up through the pool")
        elif self._hanging is not None and not self._hanging.hangs:
            hanging, self._hanging, self._opened = self._hanging, None, None
            try:
                hanging.close()
            except Exception as error:
                log.warning("kvstore: what reads past the pool have used could not be given back: %s", error)

    def wait(self, jobs: Collection[Any]) -> None:
        """Returns once these reads are over. Those of a medium that hangs are."""
        if self.reads is not None:
            self.reads.wait(jobs)

    def _open(self, compat: bool) -> None:
        try:
            reads = self._open_reads(compat)
            self._opened = (reads, reads.how)
            log.info("kvstore: blocks on disk are read past the pool (%s)", reads.how)
        except BaseException as error:  # whatever a driver's library raises: nobody else would ever say it
            self._give_up(error, compat)

    def _give_up(self, error: BaseException, compat: bool) -> None:
        """Says once why there is no way past the pool; `settle` reports it, and the scheduler counts it."""
        reason = getattr(error, "reason", "")
        # What is known to be missing is news only to those who asked for it; a defect is to everybody.
        level = logging.ERROR if not reason else logging.WARNING if compat or reason == "error" else logging.INFO
        log.log(
            level,
            "kvstore: blocks on disk come up through the pool, not past it: %s (%s)",
            str(error) or type(error).__name__,
            reason or "error",
            exc_info=None if reason else error,
        )
        self._opened = (None, reason or "error")

    def close(self) -> None:
        """Ends the reads under way."""
        if self._thread is not None:
            self._thread.join()
            self.reads = self._opened[0] if self._opened is not None else None
        for reads in (self.reads, self._hanging):
            if reads is not None:
                reads.close()


class DirectLoads:
    """The scheduler's end.

    Threads: `extents_min` is for the link's thread, all else for the scheduler's.

    Args:
        ranks: Number of workers.
        policy: Knows which way is faster.
    """

    def __init__(self, ranks: int, block_bytes: int, policy: LoadPolicy, now: Callable[[], float]) -> None:
        self._ranks = ranks
        self._least = max(1, -(-READ_BYTES_MIN // block_bytes))
        self._policy = policy
        self._now = now
        self._reports: dict[int, tuple[str, str]] = {}
        self._mode = ""
        self._reason = "starting"
        self._not_before = 0.0
        #: Why blocks were not read past the pool: once for each report, and once for each load that failed.
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def on(self) -> bool:
        """Whether blocks may be read past the pool."""
        return not self._reason

    def report(self, rank: int, mode: str, state: str) -> None:
        """What a worker has found out."""
        self._reports[rank] = (mode, state)
        if len(self._reports) < self._ranks:
            return
        states = [state for _, state in self._reports.values()]
        before = (self._mode, self._reason)
        self._mode = mode
        self._reason = next((state for state in states if state not in WORKING), "")
        if not self._reason and mode == "auto" and self._ranks > 1:
            self._reason = "several_ranks"  # each of them would read the blocks of all
        if self._reason not in ("", "off") and (self._mode, self._reason) != before:
            self.counts["gds_fallbacks", self._reason] += 1

    def extents_min(self) -> int:
        """How many blocks on the disk are worth reading past the pool; 0: none are."""
        if self._reason or self._now() < self._not_before:
            return 0
        if self._mode == "auto" and not self._policy.direct_is_faster():
            return 0
        return self._least

    def failed(self, reason: str) -> None:
        """A load past the pool has failed: for a while the others go through it."""
        self.counts["gds_fallbacks", reason] += 1
        self._not_before = self._now() + PROBE_S
