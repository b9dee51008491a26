"""A hierarchy over a small real pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.directory import Keyspace
from kvstore.hierarchy import Hierarchy
from kvstore.leases import Session
from kvstore.testing import FakeClock, check_idle, check_invariants

MIB = 1 << 20


@dataclasses.dataclass
class Pool:
    """The hierarchy, and what tests do with it all the time."""

    hierarchy: Hierarchy
    clock: FakeClock

    def space(self, block_bytes: int, *more: int, model: str = "m") -> Keyspace:
        namespace = Namespace(model, "x", 64, block_bytes, more)
        return self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces[0]

    def attach(self, group: str = "", share_bytes: int = 0) -> Session:
        return self.hierarchy.sessions.attach("test", 1, group, share_bytes)

    def store(self, session: Session, space: Keyspace, keys: Sequence[bytes], parent: bytes = b"") -> int:
        """Stores as many of the keys as get a slot, from the first on; how many those were."""
        got = self.hierarchy.reserve(session, space, len(keys))
        self.hierarchy.commit(session, space, got.offsets, keys[: len(got.offsets)], parent)
        return len(got.offsets)

    def check(self) -> None:
        check_invariants(self.hierarchy)


@pytest.fixture
def new_pool() -> Iterator[Callable[..., Pool]]:
    """Makes pools; afterwards every session ends and nothing may be left over."""
    made: list[Pool] = []

    def make(budget_bytes: int = 32 * MIB, *, populated: bool = True) -> Pool:
        arena = Arena(budget_bytes, "off")
        clock = FakeClock()
        pool = Pool(Hierarchy(arena, clock), clock)
        if populated:
            pool.hierarchy.add_populated(arena.size_bytes)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        for session in list(pool.hierarchy.sessions):
            pool.hierarchy.end_session(session)
        check_idle(pool.hierarchy)
        pool.hierarchy.arena.close()


@pytest.fixture
def pool(new_pool: Callable[..., Pool]) -> Pool:
    """One of 32 MiB, populated."""
    return new_pool()
