"""What vLLM knows and passes on to nobody.

A spec gets a digest of the engine's configuration, a connector inside MultiConnector a copy with its own part in place
of the whole, and nobody is shown what has been sent to the engine. What is missing there is in the hands of vLLM's
function that is calling, and is read from its frame. If there is no such frame, the answer is None.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any


def locals_of_caller(*functions: Any) -> Mapping[str, Any] | None:
    """Local variables of the innermost of these functions that is calling, directly or not; None where none is.

    Args:
        functions: Functions, or methods of a class or of an instance.
    """
    codes: set[CodeType] = {getattr(function, "__func__", function).__code__ for function in functions}
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return None


def engine_queue() -> Any | None:
    """What has been sent to the engine that is calling and was not taken in so far: requests, aborts and all else. None
    where the engine has no loop of its own, or goes in lockstep with others, so that none of them may wait.
    """
    from vllm.v1.engine.core import EngineCoreProc

    caller = locals_of_caller(EngineCoreProc._process_engine_step)
    if caller is None or type(caller["self"]).run_busy_loop is not EngineCoreProc.run_busy_loop:
        return None
    return getattr(caller["self"], "input_queue", None)
