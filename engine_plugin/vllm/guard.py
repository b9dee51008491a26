"""No exception leaves a hook: in vLLM it would take the whole engine and every request with it.

A guarded hook that fails is counted, logged (once in a while, with its traceback) and answered as a miss.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

LOG_EVERY_S: Final = 30.0

log = logging.getLogger("vllm.kvstore")

Hook = TypeVar("Hook", bound=Callable[..., Any])


class RateLimitedLog:
    """Passes a message on if none of its kind was passed on in the last while, and says how many were left out."""

    def __init__(self, every_s: float = LOG_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def __call__(self, kind: str, level: int, message: str, *args: object, exc_info: bool = False) -> None:
        now = self._now()
        if now - self._last.get(kind, -self._every_s) < self._every_s:
            self._left_out[kind] += 1
            return
        self._last[kind] = now
        left_out = self._left_out.pop(kind, 0)
        log.log(level, message + (f" ({left_out} more like this before)" if left_out else ""), *args, exc_info=exc_info)


limited_log = RateLimitedLog()


def note_failure(owner: Any, name: str) -> None:
    """Counts and logs the exception that is being handled in a hook of an object that has `hook_errors`."""
    owner.hook_errors[name] += 1
    limited_log(f"hook {name}", logging.ERROR, "kvstore: %s failed; going on without the cache", name, exc_info=True)


def guarded(answer: Callable[..., Any]) -> Callable[[Hook], Hook]:
    """Decorates a hook of an object that has `hook_errors: Counter[str]`.

    Args:
        answer: Called with the hook's own arguments (self included) where it fails; gives what to answer instead.
    """

    def decorate(hook: Hook) -> Hook:
        name = hook.__name__

        @functools.wraps(hook)
        def safe(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # the point of this decorator
                note_failure(self, name)
                return answer(self, *args, **kwargs)

        return safe  # type: ignore[return-value]

    return decorate


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Answer of a hook that returns nothing."""
