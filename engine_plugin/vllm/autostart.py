"""Starts a daemon where there is none.

The daemon outlives the engine on purpose: the cache is worth most to the next one, and other engines use it. It is no
child of the engine's, since vLLM kills all of those where a worker takes long to end. Two engines that start one at the
same time do no harm: the second daemon finds the socket held, exits, and both engines use the first.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Final

import kvstore
from kvstore.errors import AccessDenied, DaemonUnavailable, DeadlineExceeded, KVStoreError

log = logging.getLogger("vllm.kvstore")

START_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.05
#: Starts what it is told to, in a session of its own, and says its process id. vLLM binds its threads to cores, which a
#: child would inherit.
_LAUNCHER: Final = """
import os, subprocess, sys
os.sched_setaffinity(0, range(os.cpu_count() or 1))
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
print(process.pid, flush=True)
os._exit(0)
"""


def ensure_daemon(endpoint: str, *, cpu_bytes: int, block_size: int, token: str | None = None) -> None:
    """Returns when a daemon answers at the endpoint, starting one if needed. Blocks; for engine start only.

    A daemon that cannot be started is logged, not raised: the engine works without a cache.
    """
    if _answers(endpoint, token):
        return
    try:
        pid = _start(endpoint, cpu_bytes, block_size)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("kvstore: no daemon could be started for %s (%s); going on without a cache", endpoint, error)
        return
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if _answers(endpoint, token):
            log.info("kvstore: a daemon of %d bytes answers at %s", cpu_bytes, endpoint)
            return
        if not _lives(pid) and not _answers(endpoint, token):
            log.warning(
                "kvstore: the daemon started for %s has ended; going on without a cache (log: %s)",
                endpoint,
                log_path(endpoint) or "none",
            )
            return
        time.sleep(_POLL_S)
    log.warning("kvstore: the daemon started for %s does not answer; going on without a cache until it does", endpoint)


def log_path(endpoint: str) -> Path | None:
    """Where a daemon started for this endpoint writes its log: beside the socket."""
    return Path(endpoint.removeprefix("unix:") + ".log") if endpoint.startswith("unix:") else None


def _answers(endpoint: str, token: str | None) -> bool:
    try:
        kvstore.connect(endpoint, client_name="autostart", token=token, timeout_s=1.0).close()
    except AccessDenied:
        return True
    except (DaemonUnavailable, DeadlineExceeded):
        return False
    except KVStoreError as error:
        log.warning("kvstore: %s answers, but not as a kvstore daemon: %s", endpoint, error)
        return True
    return True


def _start(endpoint: str, cpu_bytes: int, block_size: int) -> int:
    """Its process id. Its parent, which has started it, is gone by then."""
    command = [sys.executable, "-m", "kvstore", "serve"]
    command += ["--cpu-bytes", str(cpu_bytes), "--block-size", str(block_size), "--listen", endpoint]
    with _log_file(endpoint) as output:
        launched = subprocess.run(
            [sys.executable, "-c", _LAUNCHER, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd="/",
            check=True,
        )
    return int(launched.stdout)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _log_file(endpoint: str) -> IO[Any]:
    path = log_path(endpoint)
    if path is None:
        return open(os.devnull, "wb")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb")
