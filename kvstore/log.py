"""Structured log lines on stderr: readable on a terminal, one JSON object a line in a pipe.

Only a process that is ours (the daemon, the command line) calls :func:`configure`. A library inside somebody else's
engine logs through :mod:`logging` and leaves the handlers alone.
"""

from __future__ import annotations

import collections
import logging
import sys
import threading
from collections.abc import Hashable
from typing import Any, Final, TextIO

import structlog

from kvstore.clock import Clock, SystemClock

#: Keys that a RateLimited remembers. An error that names a new thing each time must not eat memory.
KEYS_MAX: Final = 1024


def configure(level: str = "info", log_format: str = "auto", stream: TextIO | None = None) -> None:
    """Sends the lines of structlog and of :mod:`logging` (gRPC, asyncio) through one set of processors to one stream.

    Args:
        level: Least important level that is written: debug, info, warning, error.
        log_format: console, json, or auto: console where the stream is a terminal.
        stream: None: this process's stderr.
    """
    stream = sys.stderr if stream is None else stream
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
    ]
    renderers: list[structlog.typing.Processor]
    if console:
        renderers = [
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    else:
        # The traceback as text: one as a tree would print local variables, and tokens with them.
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.PositionalArgumentsFormatter(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At debug it only says which selector it uses, in every process.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose methods take an event and key=value pairs."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


class RateLimited:
    """Logs one line per key and interval, and says with the next one how many were left out.

    May be used from any thread.

    Args:
        logger: Where the lines go.
        every_s: Least time between two lines of one key.
        clock: Where time comes from.
    """

    def __init__(self, logger: Any, every_s: float = 10.0, clock: Clock | None = None) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = SystemClock() if clock is None else clock
        self._lock = threading.Lock()
        # By key: when its last line was written, and how many were left out since. Guarded by the lock, oldest first.
        self._written: collections.OrderedDict[Hashable, tuple[float, int]] = collections.OrderedDict()

    def debug(self, event: str, *, key: Hashable = None, **fields: Any) -> bool:
        return self._log("debug", event, key, fields)

    def info(self, event: str, *, key: Hashable = None, **fields: Any) -> bool:
        return self._log("info", event, key, fields)

    def warning(self, event: str, *, key: Hashable = None, **fields: Any) -> bool:
        return self._log("warning", event, key, fields)

    def error(self, event: str, *, key: Hashable = None, **fields: Any) -> bool:
        return self._log("error", event, key, fields)

    def _log(self, level: str, event: str, key: Hashable, fields: dict[str, Any]) -> bool:
        """Whether the line was written. A key of None is the event itself."""
        suppressed = self._admit(event if key is None else key)
        if suppressed is None:
            return False
        if suppressed:
            fields["suppressed"] = suppressed
        getattr(self._logger, level)(event, **fields)
        return True

    def _admit(self, key: Hashable) -> int | None:
        """How many lines were left out since the last one; None: leave this one out, too."""
        now = self._clock.monotonic()
        with self._lock:
            since, left_out = self._written.get(key, (None, 0))
            if since is not None and now - since < self._every_s:
                self._written[key] = (since, left_out + 1)
                return None
            self._written[key] = (now, 0)
            self._written.move_to_end(key)
            while len(self._written) > KEYS_MAX:
                self._written.popitem(last=False)
            return left_out
