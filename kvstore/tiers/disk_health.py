"""How a disk tier is, and when to look whether it is better. Pure: no I/O."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from typing import Any, Final

from kvstore.clock import Clock
from kvstore.log import RateLimited, get_logger
from kvstore.tier import TierState

#: Reads that fail in a row, with no good one between, before the medium is given up.
READ_FAULTS_MAX: Final = 3
_PROBE_S_MAX: Final = 30.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong last."""

    code: int
    what: str
    wall_s: float

    def describe(self) -> dict[str, Any]:
        return {
            "errno": self.code,
            "name": errno.errorcode.get(self.code, str(self.code)),
            "text": os.strerror(self.code),
            "what": self.what,
            "at": self.wall_s,
        }


class Health:
    """OK, degraded (reads only) or failed (nothing), with a probe that is due now and then while it is not OK.

    Attributes:
        state: OK, DEGRADED or FAILED.
        fault: The last one; stays when the tier is well again.
        full: The fault is that there is no room.
        faults: How many there were, by name of the errno.
        lost_calls: Calls that were given up and have not come back.
    """

    def __init__(self, name: str, clock: Clock, probe_s: float) -> None:
        self._name = name
        self._clock = clock
        self._probe_s = probe_s
        self._wait_s = probe_s
        self._probe_at = 0.0
        self._log = get_logger(__name__)
        self._limited = RateLimited(self._log, clock=clock)
        self._read_faults = 0
        self.state = TierState.OK
        self.fault: Fault | None = None
        self.faults: dict[str, int] = {}
        self.lost_calls = 0

    @property
    def full(self) -> bool:
        return self.fault is not None and self.fault.code in _FULL

    def note(self, code: int, what: str, **facts: Any) -> None:
        """Counts and logs a fault that changes nothing by itself."""
        self.fault = Fault(code, what, self._clock.wall())
        name = errno.errorcode.get(code, str(code))
        self.faults[name] = self.faults.get(name, 0) + 1
        self._limited.warning(
            "disk fault",
            key=(name, what.split(":")[0]),
            tier=self._name,
            errno=name,
            error=os.strerror(code),
            what=what,
            **facts,
        )

    def write_failed(self, code: int, what: str, **facts: Any) -> None:
        """The medium takes no bytes."""
        self.note(code, what, **facts)
        self._enter(TierState.DEGRADED)

    def read_failed(self, code: int, what: str, **facts: Any) -> None:
        """The medium gave an error instead of bytes."""
        self.note(code, what, **facts)
        self._read_faults += 1
        if self._read_faults >= READ_FAULTS_MAX:
            self._enter(TierState.FAILED)

    def read_fine(self) -> None:
        self._read_faults = 0

    def lose_call(self, call: asyncio.Future[Any]) -> None:
        """A call is not waited for any more."""
        self.lost_calls += 1
        call.add_done_callback(self._came_back)

    def _came_back(self, call: asyncio.Future[Any]) -> None:
        self.lost_calls -= 1

    def give_up(self, code: int, what: str) -> None:
        """Nothing can be served: a call did not come back (ETIMEDOUT), or the directory cannot be read."""
        self.note(code, what)
        self._enter(TierState.FAILED)

    def _enter(self, state: TierState) -> None:
        if self.state is TierState.OK:
            self._wait_s = self._probe_s
            self._probe_at = self._clock.monotonic() + self._wait_s
        if self.state is not state and self.state is not TierState.FAILED:
            self.state = state
            fault = self.fault
            self._log.warning("tier state", tier=self._name, state=state.value, why=fault.what if fault else "")

    def probe_due(self) -> bool:
        """Whether to look now. The next time is set at once, later and later."""
        if self.state is TierState.OK or self._clock.monotonic() < self._probe_at:
            return False
        self._wait_s = min(2 * self._wait_s, _PROBE_S_MAX)
        self._probe_at = self._clock.monotonic() + self._wait_s
        return True

    def recovered(self) -> None:
        """A probe found it well."""
        if self.state is not TierState.OK:
            self._log.info("tier state", tier=self._name, state="ok")
        self.state = TierState.OK
        self._read_faults = 0
