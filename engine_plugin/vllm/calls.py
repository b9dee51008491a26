"""Calls to the daemon on the link's thread: what went wrong with one becomes a word and a count."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine_plugin.vllm.guard import limited_log
from kvstore.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    KVStoreError,
    RetryLater,
    StaleGeneration,
)


class Calls:
    """Makes calls and counts events.

    Threads: `call` and `count` for the link's, `take_counts` for the scheduler's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
        """Result and problem of a call; the problem is empty if there is a result."""
        try:
            return call(*args, **kwargs), ""
        except KVStoreError as error:
            problem = _problem_of(error)
            if problem == "refused":
                limited_log(f"refused {name}", logging.WARNING, "kvstore: the daemon refused %s: %s", name, error)
        except Exception:
            problem = "error"
            limited_log(f"call {name}", logging.ERROR, "kvstore: %s failed", name, exc_info=True)
        self.count("calls_failed", problem)
        return None, problem

    def count(self, metric: str, label: str, amount: int = 1) -> None:
        """Counts an event."""
        if amount:
            with self._lock:
                self._counts[metric, label] += amount

    def take_counts(self) -> Counter[tuple[str, str]]:
        """Events since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


def _problem_of(error: KVStoreError) -> str:
    kinds = (
        (DaemonUnavailable, "unavailable"),
        (DeadlineExceeded, "deadline"),
        (StaleGeneration, "stale"),
        (Draining, "draining"),
        (RetryLater, "later"),
    )
    return next((name for kind, name in kinds if isinstance(error, kind)), "refused")
