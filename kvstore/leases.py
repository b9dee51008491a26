"""Who holds what: sessions, their leases and their reservations. Pure bookkeeping, owned by one thread."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Final

from kvstore.blocks import SESSION_ID_BYTES
from kvstore.clock import Clock
from kvstore.directory import Block, Keyspace, Share
from kvstore.errors import InvalidRequest, UnknownSession
from kvstore.tier import Held, Tier

_GROUP_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
#: Forgotten requests that a session remembers, in case one arrives after it was forgotten. They arrive within seconds.
_FORGOTTEN_MAX: Final = 256


class Group(Share):
    """The sessions of one engine, and its share of the pool.

    A member that ended may have left a copy under way in another member (a scheduler names slots, a worker fills them),
    so what it held stays held until the last member has ended.

    Attributes:
        id: Random. Names this life of the group: when its last session has ended its slots go to others, and who
            attaches under the same name later must not take the old ones for its own.
        members: Sessions that have not ended.
        lingering: Sessions that ended before the last member did.
        mapped: Whether any of them has ever had the mapping.
    """

    __slots__ = ("id", "lingering", "mapped", "members")

    def __init__(self, name: str, share_bytes: int) -> None:
        super().__init__(name, share_bytes)
        self.id = secrets.token_bytes(_GROUP_ID_BYTES)
        self.members: dict[bytes, Session] = {}
        self.lingering: list[Session] = []
        self.mapped = False


class Lease:
    """Pins on a leading run of blocks, held by one session.

    Attributes:
        drop: Whether this is a claim: the one caller that may take the blocks away.
    """

    __slots__ = ("blocks", "drop", "id", "request_id", "session")

    def __init__(self, id_: int, session: Session, blocks: list[Block], drop: bool, request_id: int) -> None:
        self.id = id_
        self.request_id = request_id
        self.session = session
        self.blocks = blocks
        self.drop = drop


@dataclasses.dataclass(frozen=True, slots=True)
class ExtentLease:
    """Blocks pinned where they lie below the pool, held by one session: each with the tier that has it."""

    id: int
    places: list[tuple[Tier, Held]]
    request_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """An empty slot that a session holds: what for, and by which request (0: it has no number)."""

    keyspace: Keyspace
    request_id: int


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """One attached process.

    Attributes:
        id: Random; names the session in every call and is all that a handoff asks for.
        leases, extents: By id.
        kept: Blocks that it stored and that stay in the pool as long as it lives.
        reserved: The empty slots it holds, by offset.
        forgotten: Requests whose answers the client never saw and does not want any more; the last few.
        mapped: Whether it was given the mapping.
        data_secret: Proves on the data port that a request is this session's.
    """

    id: bytes
    name: str
    pid: int
    group: Group
    attached_at: float
    leases: dict[int, Lease] = dataclasses.field(default_factory=dict)
    extents: dict[int, ExtentLease] = dataclasses.field(default_factory=dict)
    kept: dict[Block, None] = dataclasses.field(default_factory=dict)
    reserved: dict[int, Reservation] = dataclasses.field(default_factory=dict)
    forgotten: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=_FORGOTTEN_MAX))
    mapped: bool = False
    ended: bool = False
    data_secret: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES), repr=False)


class LeaseTable:
    """Every session, and the leases in it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease_ids = itertools.count(1)
        self._sessions: dict[bytes, Session] = {}
        self._groups: dict[str, Group] = {}

    def attach(self, name: str, pid: int, group: str, share_bytes: int) -> Session:
        """Opens a session.

        Raises:
            InvalidRequest: the group exists with another share.
        """
        id_ = secrets.token_bytes(SESSION_ID_BYTES)
        key = group or id_.hex()
        joined = self._groups.get(key)
        if joined is None:
            joined = self._groups[key] = Group(key, share_bytes)
        elif share_bytes and joined.share_bytes and share_bytes != joined.share_bytes:
            raise InvalidRequest(
                f"group {key!r} has a share of {joined.share_bytes} bytes and this member asks for {share_bytes}: "
                "all members of a group must ask for the same"
            )
        elif share_bytes:
            joined.share_bytes = share_bytes
        session = Session(id_, name, pid, joined, self._clock.monotonic())
        joined.members[id_] = session
        self._sessions[id_] = session
        return session

    def session(self, id_: bytes) -> Session:
        """The live session of that id.

        Raises:
            UnknownSession: there is none (any more).
        """
        session = self._sessions.get(id_)
        if session is None:
            raise UnknownSession("this session is not attached here (any more): attach again")
        return session

    def grant(self, session: Session, blocks: list[Block], drop: bool, request_id: int) -> Lease:
        """Opens a lease; the caller has pinned the blocks."""
        lease = Lease(next(self._lease_ids), session, blocks, drop, request_id)
        session.leases[lease.id] = lease
        return lease

    def grant_extents(self, session: Session, places: list[tuple[Tier, Held]], request_id: int) -> ExtentLease:
        """Opens a lease on blocks below the pool; the caller has pinned them there."""
        lease = ExtentLease(next(self._lease_ids), places, request_id)
        session.extents[lease.id] = lease
        return lease

    def end(self, session: Session) -> list[Session]:
        """Ends a session. Returns those whose holdings are free now: none while another member of its group lives."""
        if session.ended:
            return []
        session.ended = True
        del self._sessions[session.id]
        group = session.group
        del group.members[session.id]
        if session.leases or session.extents or session.reserved or not group.members:
            group.lingering.append(session)
        if group.members:
            return []
        del self._groups[group.name]
        freed, group.lingering = group.lingering, []
        return freed

    def age_s(self, session: Session) -> float:
        """How long ago a session was attached."""
        return self._clock.monotonic() - session.attached_at

    def __iter__(self) -> Iterator[Session]:
        """Live sessions, then those that ended and still hold something for their group."""
        yield from self._sessions.values()
        for group in self._groups.values():
            yield from group.lingering

    def __len__(self) -> int:
        return len(self._sessions)
