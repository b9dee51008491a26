"""The instances of one role: who is up, and who has least to do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Final, Literal

from kvstore.log import get_logger
from kvstore.router.breaker import Breaker

Role = Literal["prefill", "decode"]

#: Looks without an answer after which an instance counts as down. One that is busy answers late now and then.
MISSED_MAX: Final = 3

_log = get_logger("kvstore.router")


@dataclasses.dataclass(slots=True, eq=False)
class Instance:
    """One instance.

    Attributes:
        url: Base URL.
        up: It gets requests.
        load: What it has been given and has not answered: prompt bytes for prefill, requests for decode.
        missed: Looks in a row without an answer.
        last_given: When it was last chosen, as a running number.
        breaker: Says whether it is left out for a while, though it is up.
    """

    role: Role
    url: str
    breaker: Breaker
    up: bool = False
    load: float = 0.0
    missed: int = 0
    last_given: int = 0

    def note_well(self) -> None:
        """It has said that it is well."""
        self.missed = 0
        if not self.up:
            self.up = True
            _log.info("instance is up", role=self.role, url=self.url)

    def note_down(self, why: str) -> None:
        """It refuses connections or says that it is not well: no requests until it says otherwise."""
        if self.up:
            self.up = False
            _log.warning("instance is down", role=self.role, url=self.url, why=why)

    def note_answer(self) -> None:
        """It has answered a request."""
        if self.breaker.paused:
            _log.info("instance answers again", role=self.role, url=self.url)
        self.breaker.well()

    def note_failure(self, why: str) -> None:
        """It has failed a request."""
        if self.breaker.failed():
            _log.warning("instance fails its requests and is left out", role=self.role, url=self.url, why=why)

    def note_silent(self, why: str) -> None:
        """It has not answered a look in time."""
        self.missed += 1
        if self.missed >= MISSED_MAX:
            self.note_down(why)


class Pool:
    """The instances of one role. Event loop only.

    Args:
        look: Asks an instance how it is, and tells it what it found (`note_...`). Must not raise.
        last_resort: Where all that are up are left out, one of them is chosen all the same.
    """

    def __init__(
        self,
        role: Role,
        urls: Sequence[str],
        look: Callable[[Instance], Awaitable[None]],
        *,
        last_resort: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instances = tuple(Instance(role, url, Breaker(now)) for url in urls)
        self._last_resort = last_resort
        self._look = look
        self._given = itertools.count(1)

    def choose(self, but: Collection[Instance] = ()) -> Instance | None:
        """The one that is up and has least to do, of several the one whose turn is longest ago; None if there is none.
        One that is on trial goes first: nothing else would show that it is well again.

        Args:
            but: Instances that have been tried already.
        """
        up = [instance for instance in self.instances if instance.up and instance not in but]
        ready = [instance for instance in up if instance.breaker.ready]
        if not ready and self._last_resort:
            ready = up
        return min(
            ready,
            key=lambda instance: (not instance.breaker.paused, instance.load, instance.last_given),
            default=None,
        )

    @contextlib.contextmanager
    def giving(self, instance: Instance, load: float) -> Iterator[None]:
        """Counts a request to an instance until its end."""
        instance.last_given = next(self._given)
        instance.load += load
        trial = instance.breaker.begin()
        try:
            yield
        finally:
            instance.load -= load
            if trial:
                instance.breaker.end()

    async def look(self) -> None:
        """Looks at all of them once, side by side."""
        await asyncio.gather(*(self._look(instance) for instance in self.instances))

    async def watch(self, every_s: float) -> None:
        """Looks at each of them again and again, until cancelled."""

        async def watch_one(instance: Instance) -> None:
            while True:
                await asyncio.sleep(every_s)
                await self._look(instance)

        await asyncio.gather(*(watch_one(instance) for instance in self.instances))
