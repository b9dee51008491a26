"""Hypothesis drives a Hierarchy over real memory against an oracle that may forget.

The machine plays sessions of several engines: they reserve slots and write recognisable bytes into the mapping, commit
them, read, wait, claim, remove and die, in any order, while the pool is too small for all of it. After each step the
books must balance and every byte that someone may look at must be what was written under that key. At the end of a run
everyone leaves and nothing may be left over.

Use it as it is (``HierarchyMachine.TestCase``), or subclass it with other sizes or rules of your own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Final

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.arena import GRANULE_BYTES, Arena
from kvstore.blocks import Namespace
from kvstore.directory import Keyspace
from kvstore.errors import InvalidRequest, UnknownSession
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Lease
from kvstore.outcomes import Outcome
from kvstore.pool import Reserved, Shortfall
from kvstore.testing.books import check_idle, check_invariants
from kvstore.testing.machine_parts import (
    CHAINS,
    MEMBERS_MAX,
    Aim,
    Held,
    Member,
    Waiting,
    a_member,
    a_space,
    aims,
    content,
    key_runs,
)
from kvstore.testing.time import FakeClock, SteppedLoop

#: Calls that wait at once.
_WAITING_MAX: Final = 6
#: Transfers from another host at once.
_ARRIVING_MAX: Final = 3


class HierarchyMachine(RuleBasedStateMachine):
    """See the module.

    Attributes:
        POOL_BYTES: Budget of the pool.
        NAMESPACES: Spaces that are used, with the block sizes of their groups: four groups in all.
        SHARES: Share of each group of sessions, by name; members of "" are on their own.
        seen: What happened over all runs of this class: a machine that never evicts shows nothing about eviction.
    """

    POOL_BYTES: ClassVar[int] = 24 << 20
    NAMESPACES: ClassVar[Sequence[Namespace]] = (
        Namespace(model="small", dtype="float16", block_size=16, block_bytes=70_000),
        Namespace(model="hybrid", dtype="float16", block_size=16, block_bytes=1_300_000, more_group_bytes=(4096,)),
        Namespace(model="large", dtype="float16", block_size=64, block_bytes=5 << 20),
    )
    SHARES: ClassVar[dict[str, int]] = {"": 0, "engine": 0, "sharing": 9 << 20}
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop = SteppedLoop()
        self.clock = FakeClock()
        self.serial = 0
        self.members: list[Member] = []
        self.lingering: list[Member] = []
        self.waiting: list[Waiting] = []
        self._open()

    # -- lives of the pool -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.arena = Arena(self.POOL_BYTES, "off")
        self.bytes = np.frombuffer(self.arena.memory.buffer, dtype=np.uint8)
        self.hierarchy = Hierarchy(self.arena, self.clock)
        self.spaces: list[Keyspace] = []
        for namespace in self.NAMESPACES:
            entry = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes)
            self.spaces += entry.keyspaces
        #: Serial of what was last stored under a key and not removed since. The pool may have forgotten it.
        self.stored: dict[tuple[int, bytes], int] = {}
        self.spent: list[int] = []
        #: Slots that bytes arrive in from another host, transfer by transfer.
        self.arriving: list[list[int]] = []

    def _close(self) -> None:
        """Everyone leaves, in the order in which they came; nothing may be left over."""
        for call in self.waiting:
            call.task.cancel()
        self.loop.settle()
        self.waiting.clear()
        for member in list(self.members):
            self._end(member)
        while self.arriving:
            self.arrived(0)
        check_idle(self.hierarchy)
        while self.hierarchy.flush(None, 7):
            pass
        check_idle(self.hierarchy)
        pool = self.hierarchy.pool
        assert not pool.used_bytes and not pool.block_count and not pool.homes() and not self.arena.classes
        free = self.arena.free_granules + self.arena.retired_granules
        assert free == self.arena.populated_bytes // GRANULE_BYTES
        self.seen.update(pool.removed)
        self.seen["segment moved"] += pool.segment_moves
        del self.bytes
        self.arena.close()

    def teardown(self) -> None:
        self._close()
        self.loop.close()

    @initialize(granules=st.integers(1, 9))
    def begin(self, granules: int) -> None:
        self.hierarchy.add_populated(granules * GRANULE_BYTES)

    @rule(granules=st.integers(1, 3))
    def populate(self, granules: int) -> None:
        self.hierarchy.add_populated(granules * GRANULE_BYTES)
        self.loop.settle()

    @rule(what=st.sampled_from(("restart", "flush", "flush all", "end", "end", "end", "end")), which=a_member)
    def upheaval(self, what: str, which: int) -> None:
        """What changes much at once. One rule, so that most steps go to daily work."""
        if what == "restart":
            self._restart(draining=which % 2 == 0)
        elif what == "end":
            if self.members:
                self._end(self._member(which))
                self.loop.settle()
        else:
            self._flush(self.spaces[which % len(self.spaces)].namespace.digest if what == "flush" else None)

    def _restart(self, *, draining: bool) -> None:
        """The daemon is stopped, or killed, and another one takes its place."""
        if draining:
            self.hierarchy.draining = True
            self.hierarchy.wake_all()
            self.loop.settle()
            self._collect()
            assert not [call for call in self.waiting if call.keys], "select waits for a daemon that stops"
        known = [member.session.id for member in self.members]
        self._close()
        self._open()
        self.hierarchy.add_populated(self.arena.size_bytes)
        for id_ in known:
            try:
                self.hierarchy.sessions.session(id_)
            except UnknownSession:
                continue
            raise AssertionError("a session outlived its daemon")
        self.seen["restart"] += 1

    # -- sessions --------------------------------------------------------------------------------------------------

    @initialize(groups=st.lists(st.sampled_from(("", "engine", "sharing")), min_size=1, max_size=3))
    def attach_some(self, groups: list[str]) -> None:
        for group in groups:
            self.attach(group)

    @precondition(lambda self: len(self.members) < MEMBERS_MAX)
    @rule(group=st.sampled_from(("", "engine", "engine", "sharing")))
    def attach(self, group: str) -> None:
        session = self.hierarchy.sessions.attach("machine", 1, group, self.SHARES[group])
        assert self.hierarchy.sessions.session(session.id) is session
        self.members.append(Member(session, group))

    def _end(self, member: Member) -> None:
        self.hierarchy.end_session(member.session)
        self.members.remove(member)
        self.seen["session ended"] += 1
        fellows = [other for other in self.members if member.group and other.group == member.group]
        if fellows:
            self.lingering.append(member)
            self.seen["lingering"] += bool(member.stock or member.held)
        else:
            self.lingering = [other for other in self.lingering if other.group != member.group]

    def _member(self, who: int) -> Member:
        return self.members[who % len(self.members)]

    # -- writing ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.members)
    @rule(who=a_member, space=a_space, runs=st.lists(key_runs(), min_size=1, max_size=4))
    def store(self, who: int, space: int, runs: list[tuple[bytes, list[bytes]]]) -> None:
        """What insert does: as many slots as there are keys, filled and committed."""
        member = self._member(who)
        for parent, keys in runs:
            got = self.hierarchy.reserve(member.session, self.spaces[space], len(keys))
            self._take(member, space, got, len(keys))
            self._commit(member, space, got.offsets, keys[: len(got.offsets)], parent)
        self.loop.settle()

    @precondition(lambda self: self.members)
    @rule(who=a_member, space=a_space, count=st.integers(1, 8))
    def reserve(self, who: int, space: int, count: int) -> None:
        member = self._member(who)
        # Small blocks come in larger numbers.
        count *= 10 if self.spaces[space].slot_bytes < 1 << 16 else 1
        got = self.hierarchy.reserve(member.session, self.spaces[space], count)
        self._take(member, space, got, count)
        if got.shortfall is Shortfall.PINNED:
            for block in self.spaces[space].blocks.values():
                assert block.pins, f"{block.key!r} could have left for a reservation that was refused"

    @precondition(lambda self: self.members and len(self.waiting) < _WAITING_MAX)
    @rule(who=a_member, space=a_space, count=st.integers(1, 8), wait_s=st.integers(1, 3))
    def reserve_within(self, who: int, space: int, count: int, wait_s: int) -> None:
        member = self._member(who)
        call = self.hierarchy.reserve_within(member.session, self.spaces[space], count, wait_s)
        self._start(call, member, space, [], False)

    def _take(self, member: Member, space: int, got: Reserved, count: int) -> None:
        assert (len(got.offsets) < count) == (got.shortfall is not None)
        assert got.shortfall is not Shortfall.SHARE or self.SHARES[member.group]
        assert got.shortfall is not Shortfall.POPULATING or not self.arena.populated
        self.seen[f"reserve {got.shortfall.value if got.shortfall else 'all'}"] += 1
        size = self.spaces[space].block_bytes
        for offset in got.offsets:
            assert not self._arrives_in(offset), f"slot {offset} was handed out while bytes arrive in it"
            self.serial += 1
            self.bytes[offset : offset + size] = content(self.serial, size)
            member.stock[offset] = (space, self.serial)

    @precondition(lambda self: any(member.stock for member in self.members))
    @rule(
        who=a_member,
        which=st.integers(0, 1 << 30),
        run=key_runs(),
        odd=st.sampled_from((None, None, None, "foreign", "spent", "never", "twice", "elsewhere", "same key")),
    )
    def commit(self, who: int, which: int, run: tuple[bytes, list[bytes]], odd: str | None) -> None:
        """What engines do: keys are named when slots are filled. With all that a confused one may send."""
        stocked = [member for member in self.members if member.stock]
        member = stocked[who % len(stocked)]
        space = list(member.stock.values())[which % len(member.stock)][0]
        parent, keys = run
        offsets = [offset for offset, (where, _) in member.stock.items() if where == space][: len(keys)]
        keys = keys[: len(offsets)]
        others = [offset for other in self.members if other is not member for offset in other.stock]
        spent = self._spent_for(member)
        elsewhere = [offset for offset, (where, _) in member.stock.items() if where != space]
        if odd == "foreign" and others:
            offsets[0] = others[which % len(others)]
        elif odd == "spent" and spent:
            offsets[0] = spent[which % len(spent)]
        elif odd == "never":
            offsets[0] = 2 * which + 1
        elif odd == "twice":
            offsets[-1] = offsets[0]
        elif odd == "elsewhere" and elsewhere:
            offsets[0] = elsewhere[0]
        elif odd == "same key":
            keys = [keys[0]] * len(keys)
        self._commit(member, space, offsets, keys, parent)
        self.loop.settle()

    @precondition(lambda self: self.members and self.waiting)
    @rule(which=a_member, who=a_member, then=st.sampled_from(("cancel", "end", "delete", "claim")), drop=st.booleans())
    def answer(self, which: int, who: int, then: str, drop: bool) -> None:
        """What somebody waits for comes. Then something happens between the wake-up and the next step of who waited."""
        call = self.waiting[which % len(self.waiting)]
        member, space = self._member(who), call.space
        if call.keys:
            got = self.hierarchy.reserve(member.session, self.spaces[space], len(call.keys))
            self._take(member, space, got, len(call.keys))
            self._commit(member, space, got.offsets, call.keys[: len(got.offsets)], b"")
            self.seen["woken"] += self._could_go_on(call)
        else:
            self.hierarchy.add_populated(GRANULE_BYTES)
        if then == "cancel":
            self._cancel(call)
        elif then == "end" and call.member in self.members:
            self._end(call.member)
        elif not call.keys:
            pass
        elif then == "delete":
            self.hierarchy.delete(self.spaces[space], call.keys[:1])
            self.stored.pop((space, call.keys[0]), None)
        elif then == "claim" and len(self.waiting) < _WAITING_MAX:
            claim = self.hierarchy.select(member.session, self.spaces[space], call.keys, drop=drop, wait_s=0)
            self._start(claim, member, space, call.keys, drop)
        self.loop.settle()

    def _commit(self, member: Member, space: int, offsets: list[int], keys: list[bytes], parent: bytes) -> None:
        expected = self._expect(member, space, offsets, keys)
        outcomes = self.hierarchy.commit(member.session, self.spaces[space], offsets, keys, parent)
        assert outcomes == expected, f"{outcomes} instead of {expected}"
        self.seen.update(f"commit {outcome.name}" for outcome in outcomes)

    def _expect(self, member: Member, space: int, offsets: list[int], keys: list[bytes]) -> list[Outcome]:
        """What a commit should answer; notes it as done."""
        present = {key for key in keys if self.hierarchy.lookup(self.spaces[space], [key])}
        outcomes = []
        for offset, key in zip(offsets, keys, strict=True):
            where, serial = member.stock.get(offset, (None, 0))
            if where != space or self._arrives_in(offset):
                outcomes.append(Outcome.NOT_RESERVED)
                continue
            del member.stock[offset]
            if key in present:
                outcomes.append(Outcome.EXISTS)
                continue
            present.add(key)
            self.stored[space, key] = serial
            self.spent = [*self.spent[-20:], offset]
            outcomes.append(Outcome.STORED)
        return outcomes

    @precondition(lambda self: any(member.stock for member in self.members))
    @rule(who=a_member, count=st.integers(1, 200), odd=st.booleans())
    def abort(self, who: int, count: int, odd: bool) -> None:
        stocked = [member for member in self.members if member.stock]
        member = stocked[who % len(stocked)]
        mine = list(member.stock)[:count]
        others = [offset for other in self.members if other is not member for offset in other.stock]
        asked = [*mine, mine[0], 1, *others[:1], *self._spent_for(member)[-1:]] if odd else mine
        own = [offset for offset in dict.fromkeys(asked) if member.stock.pop(offset, None)]
        assert self.hierarchy.abort(member.session, asked) == len(own)

    @precondition(lambda self: any(member.stock for member in self.members) and len(self.arriving) < _ARRIVING_MAX)
    @rule(who=a_member, count=st.integers(1, 8), by_fellow=st.booleans())
    def arrive(self, who: int, count: int, by_fellow: bool) -> None:
        """A member of the group has the daemon receive bytes into slots. Several may, into the same ones."""
        stocked = [member for member in self.members if member.stock]
        member = stocked[who % len(stocked)]
        fellows = [other for other in self.members if by_fellow and member.group and other.group == member.group]
        writer = fellows[who % len(fellows)] if fellows else member
        offsets = list(member.stock)[:count]
        epochs = self.hierarchy.arrivals.epochs_of(offsets)
        self.hierarchy.arrivals.begin(writer.session, offsets, epochs, 0, 1)
        self.arriving.append(offsets)
        self.seen["arriving"] += 1

    @precondition(lambda self: self.arriving)
    @rule(which=a_member)
    def arrived(self, which: int) -> None:
        """One of those transfers has ended; whoever held its slots may have gone long ago."""
        self.seen["arrived in an orphan"] += bool(self.hierarchy.arrivals.orphans)
        self.hierarchy.arrivals.finish(self.arriving.pop(which % len(self.arriving)), 0, 1, received=1)

    def _arrives_in(self, offset: int) -> bool:
        return any(offset in offsets for offsets in self.arriving)

    def _spent_for(self, member: Member) -> list[int]:
        """Slots that were committed before. Not those that a call that still waits has taken for this member: it was
        not told of them, so it cannot name them but by accident.
        """
        untold = member.session.reserved.keys() - member.stock.keys()
        return [offset for offset in self.spent if offset not in untold]

    # -- reading ---------------------------------------------------------------------------------------------------

    def _aimed(self, aim: Aim) -> tuple[int, list[bytes]]:
        """The space and the keys that an aim means now."""
        if aim.hot and self.stored:
            space, key = list(self.stored)[aim.which % len(self.stored)]
        else:
            space, key = aim.which % len(self.spaces), CHAINS[aim.which % 3][aim.which % len(CHAINS[0])]
        chain = next(chain for chain in CHAINS if key in chain)
        start = chain.index(key)
        return space, list(chain[start : start + aim.length])

    @precondition(lambda self: self.members)
    @rule(who=a_member, aim=aims)
    def acquire(self, who: int, aim: Aim) -> None:
        member = self._member(who)
        space, keys = self._aimed(aim)
        ready = self.hierarchy.lookup(self.spaces[space], keys)
        lease = self.hierarchy.acquire(member.session, self.spaces[space], keys)
        assert (len(lease.blocks) if lease else 0) == ready
        self._hold(member, space, keys, lease)

    @precondition(lambda self: self.members and len(self.waiting) < _WAITING_MAX)
    @rule(who=a_member, aim=aims, drop=st.booleans(), wait_s=st.sampled_from((0, 1, 2, 60)))
    def select(self, who: int, aim: Aim, drop: bool, wait_s: int) -> None:
        member = self._member(who)
        space, keys = self._aimed(aim)
        call = self.hierarchy.select(member.session, self.spaces[space], keys, drop=drop, wait_s=wait_s)
        self._start(call, member, space, keys, drop)
        self.seen["select waits"] += bool(self.waiting and self.waiting[-1].keys is keys)

    @precondition(lambda self: self.members)
    @rule(who=a_member, aim=aims, hold=st.booleans())
    def take_away(self, who: int, aim: Aim, hold: bool) -> None:
        """What drop_select does where nobody has to wait. With `hold` a view outlives its with-block."""
        member = self._member(who)
        space, keys = self._aimed(aim)
        call = self.hierarchy.select(member.session, self.spaces[space], keys, drop=True, wait_s=0)
        self._start(call, member, space, keys, True)
        claims = [held for held in member.held.values() if held.lease.drop]
        if claims:
            self._release(member, claims[-1:], remove=True, hold=hold)

    def _start(self, call: Coroutine[Any, Any, Any], member: Member, space: int, keys: list[bytes], drop: bool) -> None:
        self.waiting.append(Waiting(self.loop.create_task(call), member, space, keys, drop))
        self.loop.settle()
        self._collect()

    def _collect(self) -> None:
        """Takes the answers of calls that waited."""
        for call in [call for call in self.waiting if call.task.done()]:
            self.waiting.remove(call)
            answer = call.task.result()
            if call.member.session.ended:
                assert answer is None or not answer.offsets, "a session that has ended was given something"
            elif isinstance(answer, Reserved):
                self._take(call.member, call.space, answer, len(answer.offsets) + (answer.shortfall is not None))
            else:
                self.seen["drop_select granted" if call.drop else "select granted"] += answer is not None
                self._hold(call.member, call.space, call.keys, answer)

    def _hold(self, member: Member, space: int, keys: list[bytes], lease: Lease | None) -> None:
        if lease is None:
            return
        offsets, epochs = self.hierarchy.locations(lease)
        blocks = []
        for key, offset in zip(keys, offsets.tolist(), strict=False):
            assert (space, key) in self.stored, f"{key!r} answers and was removed, or never stored"
            blocks.append((key, offset, self.stored[space, key]))
        member.held[lease.id] = Held(lease, space, blocks, epochs)

    @precondition(lambda self: self.waiting)
    @rule(seconds=st.sampled_from((0.5, 1.0, 1.5)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.loop.advance(seconds)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, _WAITING_MAX - 1))
    def cancel(self, which: int) -> None:
        self._cancel(self.waiting[which % len(self.waiting)])
        self.loop.settle()

    def _cancel(self, call: Waiting) -> None:
        """The caller has gone, or its deadline is over."""
        call.task.cancel()
        self.waiting.remove(call)
        self.seen["select cancelled" if call.keys else "reserve cancelled"] += 1

    @precondition(lambda self: any(member.held for member in self.members))
    @rule(who=a_member, count=st.integers(1, 3), remove=st.booleans(), hold=st.booleans(), odd=st.booleans())
    def release(self, who: int, count: int, remove: bool, hold: bool, odd: bool) -> None:
        holding = [member for member in self.members if member.held]
        member = holding[who % len(holding)]
        chosen = [held for held in member.held.values() if odd or not remove or held.lease.drop][:count]
        if not chosen:
            return
        if remove and not all(held.lease.drop for held in chosen):
            try:
                self.hierarchy.release(member.session, [held.lease.id for held in chosen], remove=True)
            except InvalidRequest:
                return
            raise AssertionError("an ordinary reader removed blocks")
        self._release(member, chosen, remove=remove, hold=hold, odd=odd)

    def _release(self, member: Member, chosen: list[Held], *, remove: bool, hold: bool, odd: bool = False) -> None:
        ids = [held.lease.id for held in chosen]
        asked = [*ids, ids[0], 0, 1 << 60] if odd else ids
        removed = 0
        for held in chosen:
            for key, _, serial in held.blocks if remove else ():
                # Unless it was deleted, and perhaps stored anew, since it was claimed.
                if self.stored.get((held.space, key)) == serial:
                    del self.stored[held.space, key]
                    removed += 1
            if not hold:
                del member.held[held.lease.id]
        assert self.hierarchy.release(member.session, asked, remove=remove, hold=hold) == (len(chosen), removed)
        self.seen["removed with hold" if hold else "removed"] += removed
        self.loop.settle()

    @precondition(lambda self: self.members)
    @rule(
        who=a_member,
        aim=aims,
        what=st.sampled_from(("acquire", "reserve", "select", "select late")),
        drop=st.booleans(),
    )
    def forget(self, who: int, aim: Aim, what: str, drop: bool) -> None:
        """A client gives a request up; the daemon hears of that after the request, while it waits, or before."""
        space, keys = self._aimed(aim)
        session, keyspace = self._member(who).session, self.spaces[space]
        self.serial += 1
        if what == "acquire":
            self.hierarchy.acquire(session, keyspace, keys, self.serial)
        elif what == "reserve":
            self.hierarchy.reserve(session, keyspace, len(keys), self.serial)
        else:
            if what == "select late":
                self.hierarchy.forget(session, self.serial)
            call = self.hierarchy.select(session, keyspace, keys, drop=drop, wait_s=1, request_id=self.serial)
            task = self.loop.create_task(call)
            self.loop.settle()
        self.hierarchy.forget(session, self.serial)
        if what.startswith("select"):
            self.loop.advance(1)
            assert task.done()
        held = [lease.request_id for lease in session.leases.values()]
        held += [reservation.request_id for reservation in session.reserved.values()]
        assert self.serial not in held, "what was forgotten is held"
        self.seen["forgotten"] += 1

    # -- operators -------------------------------------------------------------------------------------------------

    @rule(aim=aims)
    def delete(self, aim: Aim) -> None:
        space, keys = self._aimed(aim)
        present = sum(self.hierarchy.lookup(self.spaces[space], [key]) for key in keys)
        assert self.hierarchy.delete(self.spaces[space], [*keys, keys[0]]) == present
        for key in keys:
            self.stored.pop((space, key), None)

    def _flush(self, digest: bytes | None) -> None:
        meant = [index for index, each in enumerate(self.spaces) if digest in (None, each.namespace.digest)]
        present, removed = sum(len(self.spaces[index].blocks) for index in meant), 0
        while step := self.hierarchy.flush(digest, 3):
            assert step <= 3
            removed += step
        assert removed == present
        self.stored = {place: serial for place, serial in self.stored.items() if place[0] not in meant}

    @rule(mebibytes=st.sampled_from((1, 2, 4, 8, 24)))
    def evict(self, mebibytes: int) -> None:
        wanted = mebibytes << 20
        while self.hierarchy.pool.evict(wanted, 3):
            pass
        if self.hierarchy.pool.free_bytes < wanted:
            for keyspace in self.spaces:
                assert all(block.pins for block in keyspace.blocks.values()), "evict stopped too early"

    # -- after each step -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_amiss(self) -> None:
        self._collect()
        check_invariants(self.hierarchy)
        for call in self.waiting:
            assert call.member.session.ended or not self._could_go_on(call), f"a call sleeps over {call.keys}"
        for member in (*self.members, *self.lingering):
            share = member.session.group.share_bytes
            assert not share or member.session.group.used_bytes <= share, "a group takes more than its share"
            self._check_stock(member)
            assert member.session.leases.keys() == member.held.keys(), "leases and those who hold them disagree"
            for held in member.held.values():
                self._check_bytes(held)

    def _could_go_on(self, call: Waiting) -> bool:
        if not call.keys:
            return self.arena.populated
        blocks = [self.spaces[call.space].blocks.get(key) for key in call.keys]
        return all(block is not None and not (call.drop and block.claim) for block in blocks)

    def _check_stock(self, member: Member) -> None:
        """A session's slots are those that it was told of, and nobody else writes into them."""
        unknown = member.session.reserved.keys() - member.stock.keys()
        reserving = any(call.member is member and not call.keys for call in self.waiting)
        assert not unknown or reserving, f"slots {unknown} are reserved and nobody knows of them"
        assert member.stock.keys() <= member.session.reserved.keys(), "a session lost slots"
        for offset, (space, serial) in member.stock.items():
            size = self.spaces[space].block_bytes
            assert np.array_equal(self.bytes[offset : offset + size], content(serial, size)), f"slot {offset} changed"

    def _check_bytes(self, held: Held) -> None:
        size = self.spaces[held.space].block_bytes
        offsets, epochs = self.hierarchy.locations(held.lease)
        assert np.array_equal(epochs, held.epochs), "the epoch of a leased slot changed"
        assert offsets.tolist() == [offset for _, offset, _ in held.blocks], "a leased block moved"
        for key, offset, serial in held.blocks:
            shown = self.bytes[offset : offset + size]
            assert np.array_equal(shown, content(serial, size)), f"{key!r} shows wrong bytes"
