"""Do the books balance? Reads everything that the hierarchy, its pool and its sessions know, and compares."""

from __future__ import annotations

from collections import Counter

from kvstore.arena import GRANULE_BYTES, Arena, Segment
from kvstore.directory import Block, BlockState, Home, Keyspace, Share
from kvstore.hierarchy import Hierarchy


def check_invariants(hierarchy: Hierarchy) -> None:
    """Holds between any two steps of the hierarchy. On its thread; takes time in proportion to slots.

    Raises:
        AssertionError: a book does not balance; the message says which.
    """
    arena = hierarchy.arena
    segments = _check_segments(arena)
    reserved = _check_reservations(hierarchy)
    blocks = _check_slots(segments, reserved)
    _check_directory(hierarchy, blocks)
    _check_pins(hierarchy, blocks)
    _check_claims(hierarchy, blocks)
    _check_sums(hierarchy, blocks)
    _check_order(blocks)
    _check_waiters(hierarchy)


def check_idle(hierarchy: Hierarchy) -> None:
    """Holds when every session has ended and every waiting call has returned: nothing is left over.

    Raises:
        AssertionError: something is; the message says what.
    """
    check_invariants(hierarchy)
    sessions = list(hierarchy.sessions)
    assert not sessions, f"{len(sessions)} sessions are left, such as {sessions[0]}"
    assert not hierarchy.waiting, f"{hierarchy.waiting} calls wait"
    for keyspace in _keyspaces(hierarchy):
        assert not keyspace.waiters, f"keys {list(keyspace.waiters)} have waiters"
        for block in keyspace.blocks.values():
            assert not block.pins, f"{block.key!r} has {block.pins} pins"
    for class_ in hierarchy.arena.classes.values():
        for segment in class_.segments.values():
            assert not segment.reserved, f"segment at {segment.base} has {segment.reserved} reserved slots"


def _keyspaces(hierarchy: Hierarchy) -> list[Keyspace]:
    return [keyspace for entry in hierarchy.namespaces.entries.values() for keyspace in entry.keyspaces]


def _check_segments(arena: Arena) -> list[Segment]:
    """Segments do not overlap, lie in populated memory, and the maps of them agree. The budget holds."""
    assert arena.committed_bytes <= arena.budget_bytes, (
        f"the pool takes {arena.committed_bytes} bytes of {arena.budget_bytes}"
    )
    segments = []
    for slot_bytes, class_ in arena.classes.items():
        assert class_.segments, f"class {slot_bytes} has no segment and is kept"
        for base, segment in class_.segments.items():
            assert segment.base == base and segment.slot_bytes == slot_bytes, f"segment {base} is in the wrong class"
            assert len(segment.free) < segment.slots, f"segment {base} is empty and did not dissolve"
            assert bool(segment.free) == (base in class_.roomy), f"segment {base}: free slots and roomy disagree"
            segments.append(segment)
        assert class_.roomy.keys() <= class_.segments.keys(), f"class {slot_bytes} fills segments that are gone"
    segments.sort(key=lambda segment: segment.base)
    end = 0
    for segment in segments:
        assert segment.base >= end, f"segment {segment.base} overlaps the one before it"
        end = segment.base + segment.granules * GRANULE_BYTES
        assert segment.slots * segment.slot_bytes <= end - segment.base, f"segment {segment.base} has too many slots"
        for granule in range(segment.base, end, GRANULE_BYTES):
            assert arena.segment_of(granule) is segment, f"granule {granule} does not know its segment"
    assert end <= arena.populated_bytes, f"segments reach to {end}, memory to {arena.populated_bytes}"
    used = sum(segment.granules for segment in segments)
    known = used + arena.free_granules + arena.retired_granules
    populated = arena.populated_bytes // GRANULE_BYTES
    assert known == populated, f"{populated} granules are populated, {known} are accounted for"
    return segments


def _check_reservations(hierarchy: Hierarchy) -> dict[int, Keyspace]:
    """No slot is taken twice, by sessions or by what comes up from below. Returns the keyspace by offset."""
    held: list[tuple[int, Keyspace]] = [
        (offset, reservation.keyspace)
        for session in hierarchy.sessions
        for offset, reservation in session.reserved.items()
    ]
    held += [(offset, promotion.keyspace) for offset, promotion in hierarchy.transfers.filling.items()]
    held += [(offset, keyspace) for offset, (_, keyspace) in hierarchy.arrivals.orphans.items()]
    reserved = dict(held)
    assert len(reserved) == len(held), "a slot is taken twice"
    assert hierarchy.arrivals.known <= reserved.keys(), "bytes are remembered of a slot that is not reserved"
    return reserved


def _check_slots(segments: list[Segment], reserved: dict[int, Keyspace]) -> list[Block]:
    """Each slot is in exactly one place. Returns the blocks."""
    blocks: list[Block] = []
    left = dict(reserved)
    for segment in segments:
        free = set(segment.free)
        assert len(free) == len(segment.free), f"segment {segment.base} has a slot free twice"
        in_segment = 0
        for index, block in enumerate(segment.blocks):
            offset = segment.base + index * segment.slot_bytes
            keyspace = left.pop(offset, None)
            places = (offset in free) + (keyspace is not None) + (block is not None)
            assert places == 1, f"slot {offset} is in {places} places"
            if keyspace is not None:
                in_segment += 1
                assert keyspace.slot_bytes == segment.slot_bytes, f"slot {offset} is reserved for another size"
            if block is not None:
                assert isinstance(block, Block)
                assert block.offset == offset and block.segment is segment, f"{block.key!r} is not where it says"
                blocks.append(block)
        assert in_segment == segment.reserved, (
            f"segment {segment.base} counts {segment.reserved} reserved slots, sessions hold {in_segment}"
        )
    assert not left, f"slots {list(left)} are reserved and in no segment"
    return blocks


def _check_directory(hierarchy: Hierarchy, blocks: list[Block]) -> None:
    """What answers is what rests in the pool and is not doomed."""
    answering = 0
    for keyspace in _keyspaces(hierarchy):
        answering += len(keyspace.blocks)
        for key, block in keyspace.blocks.items():
            assert block.key == key and block.keyspace is keyspace, f"{key!r} answers with another block"
            assert block.state is BlockState.READY, f"{key!r} answers and is {block.state}"
    ready = 0
    for block in blocks:
        if block.state is BlockState.READY:
            ready += 1
            assert block.keyspace.blocks.get(block.key) is block, f"{block.key!r} is ready and does not answer"
        else:
            assert block.pins, f"{block.key!r} is doomed, has no pins and still has a slot"
    assert ready == answering, f"{answering} blocks answer, {ready} rest in the pool"


def _check_pins(hierarchy: Hierarchy, blocks: list[Block]) -> None:
    """Pins are what leases say, one for a copy on its way down, and one for what a session keeps."""
    pins: Counter[int] = Counter(id(block) for block in hierarchy.transfers.held)
    for session in hierarchy.sessions:
        pins.update(id(block) for block in session.kept)
        for lease in session.leases.values():
            pins.update(id(block) for block in lease.blocks)
    for block in blocks:
        held = pins.pop(id(block), 0)
        assert block.pins == held, f"{block.key!r} has {block.pins} pins and {held} leases"
    assert not pins, f"{len(pins)} leased blocks have no slot"


def _check_claims(hierarchy: Hierarchy, blocks: list[Block]) -> None:
    """A claim is held by one living lease."""
    claims: dict[int, int] = {}
    for session in hierarchy.sessions:
        for lease in session.leases.values():
            if lease.drop and not session.ended:
                for block in lease.blocks:
                    assert block.claim == lease.id, f"{block.key!r} is claimed by {lease.id} and says {block.claim}"
                    claims[id(block)] = lease.id
    for block in blocks:
        assert block.claim == claims.get(id(block), 0), f"{block.key!r} bears the claim {block.claim} of nobody"


def _check_sums(hierarchy: Hierarchy, blocks: list[Block]) -> None:
    """Counters are the sums of what they count."""
    pool = hierarchy.pool
    assert pool.block_count == len(blocks), f"block_count is {pool.block_count} of {len(blocks)}"
    used = sum(block.keyspace.slot_bytes for block in blocks)
    assert pool.used_bytes == used, f"used_bytes is {pool.used_bytes}, blocks take {used}"
    in_home: Counter[Home] = Counter(block.home for block in blocks)
    of_group: Counter[Share] = Counter()
    homes = pool.homes()
    for home in homes:
        count = in_home.pop(home, 0)
        assert home.blocks == count and count, f"a home of {home.slot_bytes} counts {home.blocks} blocks of {count}"
    assert not in_home, "blocks have a home that the pool does not know"
    groups = {block.share for block in blocks}
    for block in blocks:
        of_group[block.share] += block.keyspace.slot_bytes
    for session in hierarchy.sessions:
        groups.add(session.group)
        of_group[session.group] += sum(held.keyspace.slot_bytes for held in session.reserved.values())
    for share, keyspace in hierarchy.arrivals.orphans.values():
        groups.add(share)
        of_group[share] += keyspace.slot_bytes
    for promotion in hierarchy.transfers.filling.values():
        groups.add(promotion.group)
        of_group[promotion.group] += promotion.keyspace.slot_bytes
    for group in groups:
        assert group.used_bytes == of_group[group], (
            f"group {group.name!r} counts {group.used_bytes} bytes, its blocks and reservations take {of_group[group]}"
        )


def _check_order(blocks: list[Block]) -> None:
    """The policies know every block that may leave, and no other."""
    known: Counter[Home] = Counter()
    for block in blocks:
        known[block.home] += block.tick != 0
        if block.state is BlockState.READY:
            assert block.tick or block.pins or block in block.home.passed, (
                f"{block.key!r} is not pinned and no policy knows it: it would never leave"
            )
        else:
            assert not block.tick, f"{block.key!r} is doomed and a policy knows it"
    children = Counter(id(block.parent) for block in blocks if block.state is BlockState.READY and block.parent)
    for block in blocks:
        assert block.children == children[id(block)], (
            f"{block.key!r} counts {block.children} blocks after it, {children[id(block)]} name it"
        )
    for home, count in known.items():
        assert len(home.policy) == count, f"a policy knows {len(home.policy)} blocks, {count} bear its mark"


def _check_waiters(hierarchy: Hierarchy) -> None:
    """Who waits is in a queue once, and nobody is kept in one after it was woken."""
    queued = 0
    for keyspace in _keyspaces(hierarchy):
        for key, queue in keyspace.waiters.items():
            assert queue, f"{key!r} keeps an empty queue"
            # A cancelled one leaves its queue when its task runs.
            assert not any(woken.done() and not woken.cancelled() for woken in queue), f"{key!r} queues who was woken"
            queued += len(queue)
    assert queued <= hierarchy.waiting, f"{queued} futures are queued by {hierarchy.waiting} waiting calls"
