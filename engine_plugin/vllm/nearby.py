"""The worker of an engine, where it is the only one and runs in the scheduler's process and thread.

vLLM brings what a worker has to say with the result of a step, and where steps overlap it reads a result after the next
step has been made. So of a load that has ended the scheduler hears two steps later, and after a step that computes
nothing vLLM sleeps. Where nothing but function calls lies between the two, the scheduler asks for itself.

Knows nothing of vLLM.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

_workers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def here(engine_id: str, worker: Any) -> None:
    """This is an engine's only worker, and it is called on this thread."""
    _workers[engine_id] = worker
    _threads[worker] = threading.get_ident()


def only_worker(engine_id: str) -> Any | None:
    """An engine's worker, if it is called on the thread that asks; None where there is none or it is elsewhere."""
    worker = _workers.get(engine_id)
    return worker if worker is not None and _threads.get(worker) == threading.get_ident() else None
