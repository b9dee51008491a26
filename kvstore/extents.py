"""Leases on blocks where they lie on the disk, for clients that read them by themselves: a worker that has its GPU
fetch them, past the pool and this daemon. On the hierarchy's thread.

The daemon leases places as it leases slots: nothing else is written to them until the lease is released or the session
has ended, whatever becomes of the blocks. The reader compares the checksum; a place is no promise of right bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, cast

from kvstore.directory import Keyspace
from kvstore.leases import LeaseTable, Session
from kvstore.tier import Held, Tier, TierState
from kvstore.transfers import Transfers

#: How long the medium may take to show the footers.
_DEADLINE_S: Final = 5.0


class Extents:
    """See the module."""

    def __init__(self, transfers: Transfers, sessions: LeaseTable) -> None:
        self._transfers = transfers
        self._sessions = sessions

    async def lease(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], request_id: int
    ) -> tuple[int, list[Held | None]]:
        """Pins what is on a medium that clients can read. Each key by itself, in any order.

        Returns:
            The lease (0: nothing is held), and where each block lies; None where there is no such place.
        """
        own = await self._transfers.own(keyspace, keys)
        places: list[Held | None] = [None] * len(keys)
        taken: list[tuple[Tier, Held]] = []
        for tier in self._transfers.tiers:
            wanted = [index for index, key in enumerate(keys) if key in own and places[index] is None]
            if not wanted or tier.state is TierState.FAILED:
                continue
            try:
                found = await tier.hold([keyspace.prefix + keys[index] for index in wanted], _DEADLINE_S)
            except BaseException:  # the caller has gone, most likely
                self._give_back(taken)
                raise
            for index, held in zip(wanted, found, strict=True):
                if held is not None and held.size_bytes == keyspace.block_bytes:
                    places[index] = held
                if held is not None:
                    taken.append((tier, held))
        # The session may have ended meanwhile, or given the request up: nobody would ever release it.
        if session.ended or (request_id and request_id in session.forgotten) or not taken:
            self._give_back(taken)
            return 0, [None] * len(keys)
        return self._sessions.grant_extents(session, taken, request_id).id, places

    async def lease_run(
        self, session: Session, keyspace: Keyspace, keys: Sequence[bytes], request_id: int, least: int
    ) -> tuple[int, list[Held]]:
        """As lease, for a leading run, where that is all that could come up and `least` blocks or more.

        Returns:
            The lease (0: nothing is held), and where each block of the run lies.
        """
        number, places = await self.lease(session, keyspace, keys, request_id)
        run = list(itertools.takewhile(lambda held: held is not None, places))
        rest = keys[len(run) : len(run) + 1]
        if number and (len(run) < least or (rest and await self._transfers.available(keyspace, rest))):
            self.release(session, [number])
            return 0, []
        # While that was asked, the session may have ended or given the request up, and the lease with it.
        return (number, cast("list[Held]", run)) if number in session.extents else (0, [])

    def release(self, session: Session, lease_ids: Sequence[int]) -> int:
        """Gives leases back; ids that are none are skipped. Returns how many there were."""
        if not session.extents:
            return 0
        leases = [lease for lease in map(session.extents.get, dict.fromkeys(lease_ids)) if lease is not None]
        for lease in leases:
            del session.extents[lease.id]
            self._give_back(lease.places)
        return len(leases)

    def forget(self, session: Session, request_id: int) -> None:
        """The client never saw the answer to a request."""
        self.release(session, [lease.id for lease in session.extents.values() if lease.request_id == request_id])

    def end(self, session: Session) -> None:
        """What a session held that nobody of its group can read for any more."""
        self.release(session, list(session.extents))

    @staticmethod
    def _give_back(places: list[tuple[Tier, Held]]) -> None:
        for tier, held in places:
            tier.let_go(held)
