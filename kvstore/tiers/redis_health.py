"""How the servers are, and when to look whether they are better. Pure: no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from kvstore.clock import Clock
from kvstore.log import RateLimited, get_logger
from kvstore.tier import TierState

#: Failures in a row, with no answer between, before a server is given up.
FAILURES_MAX: Final = 3
_PROBE_S_MAX: Final = 10.0
_FULL_S_MAX: Final = 30.0
_FULL_S: Final = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with a server.

    Attributes:
        kind: Short and stable: timeout, connection, login, protocol, cluster, version, internal.
        text: For people; without secrets.
    """

    kind: str
    text: str


class Breaker:
    """One server. Closed: it is asked. Open: it is not, but for a probe now and then.

    Attributes:
        open: Whether it was given up. Also read by other threads.
    """

    def __init__(self, clock: Clock, probe_s: float) -> None:
        self._clock = clock
        self._probe_s = self._wait_s = probe_s
        self._probe_at = 0.0
        self._failures = 0
        self.open = False

    def failed(self) -> bool:
        """Returns whether it was given up just now."""
        self._failures += 1
        return self._failures >= FAILURES_MAX and self.trip()

    def trip(self) -> bool:
        """Gives it up at once. Returns whether it was not given up before."""
        if self.open:
            return False
        self.open = True
        self._wait_s = self._probe_s
        self._probe_at = self._clock.monotonic() + self._wait_s
        return True

    def fine(self) -> bool:
        """It answered. Returns whether it had been given up."""
        was_open, self.open = self.open, False
        self._failures = 0
        return was_open

    def answered(self) -> None:
        """A call went through. One that began before the server was given up says nothing of how it is now."""
        if not self.open:
            self._failures = 0

    def probe_now(self) -> None:
        """The next probe is due at once."""
        self._probe_at = self._clock.monotonic()

    def probe_due(self) -> bool:
        """Whether to look now. The next time is set at once, later and later."""
        if not self.open or self._clock.monotonic() < self._probe_at:
            return False
        self._wait_s = min(2 * self._wait_s, _PROBE_S_MAX)
        self._probe_at = self._clock.monotonic() + self._wait_s
        return True


class RedisHealth:
    """Of all servers together. Written on the event loop.

    Attributes:
        fault: The last one; stays when all is well again.
        faults: How many there were, by kind.
    """

    def __init__(self, name: str, clock: Clock, probe_s: float) -> None:
        self._name = name
        self._clock = clock
        self._probe_s = probe_s
        self._log = get_logger(__name__)
        self._limited = RateLimited(self._log, clock=clock)
        self._breakers: dict[str, Breaker] = {}
        #: Of the way to the servers as a whole: no topology, no login.
        self.whole = Breaker(clock, probe_s)
        self.whole.trip()
        self._fault_wall = 0.0
        self.fault: Fault | None = None
        self.faults: dict[str, int] = {}
        self._full_until = 0.0
        self._full_s = 0.0
        self._said = TierState.FAILED

    def breaker(self, node: str) -> Breaker:
        if node not in self._breakers:
            self._breakers[node] = Breaker(self._clock, self._probe_s)
        return self._breakers[node]

    def keep_only(self, nodes: Iterable[str]) -> None:
        """Forgets servers that are gone."""
        nodes = set(nodes)
        self._breakers = {node: breaker for node, breaker in self._breakers.items() if node in nodes}

    @property
    def state(self) -> TierState:
        if self.whole.open or (self._breakers and all(breaker.open for breaker in self._breakers.values())):
            return TierState.FAILED
        return TierState.DEGRADED if self.full else TierState.OK

    def say(self) -> None:
        """Logs the state where it has changed."""
        state = self.state
        if state is not self._said:
            self._said = state
            if state is TierState.OK:
                self._log.info("tier state", tier=self._name, state=state.value)
            else:
                why = self.fault.text if self.fault else ""
                self._log.warning("tier state", tier=self._name, state=state.value, why=why)

    def note(self, fault: Fault, node: str = "") -> None:
        """Counts and logs a fault that changes nothing by itself."""
        self.fault = fault
        self._fault_wall = self._clock.wall()
        self.faults[fault.kind] = self.faults.get(fault.kind, 0) + 1
        self._limited.warning(
            "redis fault", key=(fault.kind, node), tier=self._name, kind=fault.kind, error=fault.text, node=node
        )

    def failed(self, node: str, fault: Fault) -> None:
        """A call to a server failed."""
        self.note(fault, node)
        self.breaker(node).failed()
        self.say()

    def give_up(self, fault: Fault) -> None:
        """There is no way to the servers."""
        self.note(fault)
        self.whole.trip()
        self.say()

    # -- no room -----------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether writes are not even tried: the server had no memory for one a moment ago."""
        return self._clock.monotonic() < self._full_until

    def refused(self, text: str) -> None:
        """The server had no memory for a write."""
        if not self.full:
            self.note(Fault("memory", text))
            self._full_s = min(2 * self._full_s or _FULL_S, _FULL_S_MAX)
            self._full_until = self._clock.monotonic() + self._full_s
            self.say()

    def took(self) -> None:
        """The server had memory for a write."""
        self._full_s = 0.0
        self._full_until = 0.0
        self.say()

    def describe(self) -> dict[str, Any]:
        fault = self.fault
        return {
            "fault": None if fault is None else {"kind": fault.kind, "text": fault.text, "at": self._fault_wall},
            "faults": dict(self.faults),
            "nodes": [{"node": node, "given_up": each.open} for node, each in sorted(self._breakers.items())],
        }
