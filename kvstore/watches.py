"""Waiting for a block to come, and watching groups of blocks. On the hierarchy's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from kvstore.directory import Block, Keyspace
from kvstore.errors import LimitExceeded
from kvstore.journal import Change, Journal
from kvstore.leases import Session
from kvstore.tier import Tier, TierState

#: Names of a tier that are looked at before others run.
_STEP_NAMES = 4096


class Watches:
    """See the module.

    Args:
        tiers_of: The tiers that a group's blocks may be in.
        draining: Whether nobody is to wait any more.

    Attributes:
        waiting: How many calls wait.
    """

    def __init__(self, tiers_of: Callable[[Keyspace], Sequence[Tier]], draining: Callable[[], bool]) -> None:
        self._tiers_of = tiers_of
        self._draining = draining
        self.waiting = 0

    def changed(self, keyspace: Keyspace) -> None:
        """Something was stored or removed, or a claim given back: wakes those who wait for that."""
        keyspace.changes += 1
        if keyspace.watcher is not None:
            keyspace.watcher.set_result(None)
            keyspace.watcher = None

    def wake(self, keyspace: Keyspace, key: bytes) -> None:
        """A key has come, or the claim on it has gone: those who wait for it look again."""
        self.changed(keyspace)
        for woken in keyspace.waiters.pop(key, ()):
            if not woken.done():
                woken.set_result(None)

    def wake_all(self, keyspace: Keyspace) -> None:
        """Lets all who wait for something in a group look again."""
        self.changed(keyspace)
        for key in list(keyspace.waiters):
            self.wake(keyspace, key)

    async def wait_for(self, keyspace: Keyspace, key: bytes, timeout_s: float) -> None:
        """Returns when wake is called for a key, or the time is up."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = keyspace.waiters.setdefault(key, [])
        queue.append(woken)
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
            # Everyone is woken at once and asks again, so a wake-up that comes too late takes nothing from the others.
            if not woken.done() or woken.cancelled():
                queue.remove(woken)
                if not queue and keyspace.waiters.get(key) is queue:
                    del keyspace.waiters[key]

    async def watch(self, session: Session, keyspace: Keyspace, seen: int, *, limit: int, wait_s: float) -> list[Block]:
        """Every block of a group that is in the pool, in the order in which they came, as soon as
        `keyspace.changes` is another than `seen`, or the time is up. It changes with every block that is stored or
        removed and every claim that is given back; an eviction alone wakes nobody. Pins nothing.

        Raises:
            LimitExceeded: the group has more blocks than `limit`.
        """
        await self._wait(session, keyspace, lambda: keyspace.changes != seen, wait_s)
        _check(len(keyspace.blocks), limit)
        return list(keyspace.blocks.values())

    async def follow(
        self,
        session: Session,
        keyspace: Keyspace,
        seen: int,
        *,
        limit: int,
        wait_s: float,
        wanted: Change | None = None,
        kinds: bytes = b"",
    ) -> tuple[bool, list[bytes]]:
        """Keys of a group that something happened to since `seen`, as soon as there was a change of the wanted sort, or
        the time is up. Keys that rest below the pool are among them. Pins nothing.

        Args:
            seen: `keyspace.journal.position` as it was before; 0: everything, at once.

        Returns:
            Whether these are all keys of the group; and the keys, in order.

        Raises:
            LimitExceeded: the group has more keys than `limit`, and all of them are to be told.
        """
        journal = keyspace.journal
        if journal is None:
            journal = keyspace.journal = Journal(list(keyspace.blocks))
        if not journal.complete:
            await self._look_below(keyspace, journal)
        await self._wait(session, keyspace, lambda: journal.has_news(seen, wanted, kinds), wait_s)
        whole, keys = journal.since(seen)
        _check(len(keys), limit)
        return whole, keys

    async def _look_below(self, keyspace: Keyspace, journal: Journal) -> None:
        """Lists what rests below the pool from an earlier life of the daemon, once the tiers know it themselves. Not
        what others may have put there: they would list it too, and one block would be claimed at two daemons.
        """
        tiers = [tier for tier in self._tiers_of(keyspace) if not tier.shared]
        journal.complete = all(tier.state is not TierState.LOADING for tier in tiers)
        found: set[bytes] = set()
        for tier in tiers:
            for number, (name, _) in enumerate(tier.scan(keyspace.namespace.digest)):
                if name.startswith(keyspace.prefix):
                    found.add(name[len(keyspace.prefix) :])
                if number % _STEP_NAMES == _STEP_NAMES - 1:
                    await asyncio.sleep(0)  # engines come first
        new = [key for key in sorted(found) if key not in journal.keys]
        for key in new:
            journal.rests(key)
        if new:
            self.changed(keyspace)

    async def _wait(self, session: Session, keyspace: Keyspace, news: Callable[[], bool], wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        self.waiting += 1
        try:
            while not news() and not self._draining() and (left := deadline - loop.time()) > 0:
                keyspace.watcher = keyspace.watcher or loop.create_future()
                # Shared by all who watch the group, so the end of one wait must not cancel it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await asyncio.shield(keyspace.watcher)
                if session.ended:
                    break
        finally:
            self.waiting -= 1


def _check(count: int, limit: int) -> None:
    if count > limit:
        raise LimitExceeded(f"{count} blocks in a group that is watched; at most {limit} (keys_max)")
