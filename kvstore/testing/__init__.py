"""What tests of this service and of what is built on it need: shipped, public, and used by our own tests.

`HierarchyMachine` needs Hypothesis (the `test` extra) and loads on first use; the rest needs nothing beyond the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.testing.books import check_idle, check_invariants
from kvstore.testing.data import make_block
from kvstore.testing.time import FakeClock, SteppedLoop

if TYPE_CHECKING:
    from kvstore.testing.machine import HierarchyMachine

__all__ = ["FakeClock", "HierarchyMachine", "SteppedLoop", "check_idle", "check_invariants", "make_block"]


def __getattr__(name: str) -> Any:
    if name == "HierarchyMachine":
        from kvstore.testing.machine import HierarchyMachine

        return HierarchyMachine
    raise AttributeError(f"module 'kvstore.testing' has no attribute {name!r}")
