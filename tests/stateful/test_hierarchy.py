"""The hierarchy against an oracle: thousands of steps, no wrong byte, nothing left over.

KVSTORE_TEST_EXAMPLES=5000 makes a night of it; with more than the default, runs are random instead of always the same.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.testing import HierarchyMachine

EXAMPLES = 120
STEPS = 120

#: What must have happened at least once, or the run has shown nothing about it.
EXPECTED = (
    "commit EXISTS",
    "arrived in an orphan",
    "arriving",
    "commit NOT_RESERVED",
    "commit STORED",
    "deleted",
    "drop_select granted",
    "dropped",
    "evicted",
    "flushed",
    "forgotten",
    "lingering",
    "removed with hold",
    "reserve all",
    "reserve pinned",
    "reserve populating",
    "reserve share",
    "restart",
    "segment moved",
    "select cancelled",
    "select granted",
    "select waits",
    "woken",
)


class Machine(HierarchyMachine):
    seen: ClassVar[Counter[str]] = Counter()


@pytest.mark.timeout(0)
def test_no_wrong_byte_and_nothing_left_over() -> None:
    wanted = int(os.environ.get("KVSTORE_TEST_EXAMPLES", EXAMPLES))
    Machine.seen.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=wanted,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=wanted <= EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
            # Shrinking takes minutes; whoever looks into a failure has them.
            phases=[Phase.generate] if wanted <= EXAMPLES else [Phase.generate, Phase.shrink],
        ),
    )
    assert not [name for name in EXPECTED if not Machine.seen[name]], dict(Machine.seen)
