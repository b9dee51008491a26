"""What vLLM knows and passes on to nobody.

A spec gets a digest of the engine's configuration, a connector inside MultiConnector a copy with its own part in place
of the whole. What is missing there is in the hands of vLLM's function that is calling, and is read from its frame. If
there is no such frame, since vLLM has changed, the answer is None and the start says so.
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
