"""Schedules around watch: whoever waits learns of each change, whatever comes between. Nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvstore.arena import Arena
from kvstore.blocks import Namespace
from kvstore.directory import Block
from kvstore.errors import LimitExceeded
from kvstore.hierarchy import Hierarchy
from kvstore.journal import Change
from kvstore.leases import Session
from kvstore.testing import FakeClock, SteppedLoop, check_idle, check_invariants

Watching = asyncio.Task[list[Block]]


class Scene:
    """Two sessions and a small group of a pool."""

    def __init__(self, loop: SteppedLoop) -> None:
        self.loop = loop
        arena = Arena(32 << 20, "off")
        arena.add_populated(arena.size_bytes)
        self.hierarchy = Hierarchy(arena, FakeClock())
        namespace = Namespace("m", "x", 64, 4096)
        (self.space,) = self.hierarchy.namespaces.open(namespace.identity(), namespace.group_bytes).keyspaces
        self.one, self.other = (self.hierarchy.sessions.attach("test", 0, "", 0) for _ in range(2))

    def store(self, *keys: bytes) -> None:
        offsets = self.hierarchy.reserve(self.other, self.space, len(keys)).offsets
        self.hierarchy.commit(self.other, self.space, offsets, keys)

    def watch(self, seen: int, *, by: Session | None = None, limit: int = 100, wait_s: float = 60) -> Watching:
        call = self.hierarchy.watches.watch(by or self.one, self.space, seen, limit=limit, wait_s=wait_s)
        task = self.loop.create_task(call)
        self.loop.settle()
        return task

    def claim(self, key: bytes) -> None:
        call = self.hierarchy.select(self.other, self.space, [key], drop=True, wait_s=0)
        task = self.loop.create_task(call)
        self.loop.settle()
        assert task.result() is not None


@pytest.fixture
def scene(stepped_loop: SteppedLoop) -> Iterator[Scene]:
    scene = Scene(stepped_loop)
    yield scene
    for session in (scene.one, scene.other):
        scene.hierarchy.end_session(session)
    stepped_loop.settle()
    assert scene.hierarchy.waiting == 0
    check_idle(scene.hierarchy)
    scene.hierarchy.arena.close()


def keys(task: Watching) -> list[bytes]:
    return [block.key for block in task.result()]


def test_the_first_call_answers_at_once_also_where_nothing_is_there(scene: Scene) -> None:
    assert keys(scene.watch(0)) == []


def test_it_lists_in_the_order_of_arrival(scene: Scene) -> None:
    scene.store(b"z", b"a")
    scene.store(b"m")
    assert keys(scene.watch(0)) == [b"z", b"a", b"m"]


def test_a_store_wakes_every_watcher(scene: Scene) -> None:
    seen = scene.space.changes
    tasks = [scene.watch(seen) for _ in range(3)]
    assert not any(task.done() for task in tasks) and scene.hierarchy.waiting == 3
    scene.store(b"a")
    scene.loop.settle()
    assert [keys(task) for task in tasks] == [[b"a"]] * 3


def test_a_change_between_two_calls_is_not_missed(scene: Scene) -> None:
    seen = scene.space.changes
    scene.store(b"a")
    assert scene.hierarchy.delete(scene.space, [b"a"]) == 1
    assert keys(scene.watch(seen)) == []  # at once: what came and went was a change, too


@pytest.mark.parametrize("how", ["delete", "flush", "confirm", "give back", "die"])
def test_what_frees_a_key_wakes(scene: Scene, how: str) -> None:
    scene.store(b"a")
    if how in ("confirm", "give back", "die"):
        scene.claim(b"a")
    task = scene.watch(scene.space.changes)
    assert not task.done()
    if how == "delete":
        scene.hierarchy.delete(scene.space, [b"a"])
    elif how == "flush":
        scene.hierarchy.flush(None, 10)
    elif how == "die":
        scene.hierarchy.end_session(scene.other)
    else:
        scene.hierarchy.release(scene.other, list(scene.other.leases), remove=how == "confirm")
    scene.loop.settle()
    assert [(block.key, bool(block.claim)) for block in task.result()] == (
        [(b"a", False)] if how in ("give back", "die") else []
    )


def test_a_store_of_what_exists_is_no_change(scene: Scene) -> None:
    scene.store(b"a")
    task = scene.watch(scene.space.changes)
    scene.store(b"a")
    scene.loop.settle()
    assert not task.done()
    scene.loop.advance(61)
    assert keys(task) == [b"a"]


def test_the_end_of_one_wait_does_not_end_that_of_another(scene: Scene) -> None:
    seen = scene.space.changes
    short, cancelled, long = scene.watch(seen, wait_s=1), scene.watch(seen), scene.watch(seen)
    cancelled.cancel()
    scene.loop.advance(2)
    assert keys(short) == [] and cancelled.cancelled() and not long.done()
    scene.store(b"a")
    scene.loop.settle()
    assert keys(long) == [b"a"]


def test_a_session_that_ends_and_a_daemon_that_stops_wait_no_longer(scene: Scene) -> None:
    seen = scene.space.changes
    ended, waiting = scene.watch(seen), scene.watch(seen, by=scene.other)
    scene.hierarchy.end_session(scene.one)
    scene.hierarchy.draining = True
    scene.hierarchy.wake_all()
    scene.loop.settle()
    assert ended.done() and waiting.done()


def test_a_large_group_is_refused(scene: Scene) -> None:
    scene.store(*[b"%d" % index for index in range(11)])
    task = scene.watch(0, limit=10)
    with pytest.raises(LimitExceeded, match="keys_max"):
        task.result()


# -- following ---------------------------------------------------------------------------------------------------------

Following = asyncio.Task[tuple[bool, list[bytes]]]


class Follower:
    """Asks for what changed since the last answer."""

    def __init__(self, scene: Scene, wanted: Change | None = None, kinds: bytes = b"") -> None:
        self.scene, self.wanted, self.kinds = scene, wanted, kinds
        self.seen = 0

    def ask(self, *, limit: int = 100, wait_s: float = 60) -> Following:
        scene = self.scene
        task = scene.loop.create_task(
            scene.hierarchy.watches.follow(
                scene.one,
                scene.space,
                self.seen,
                limit=limit,
                wait_s=wait_s,
                wanted=self.wanted,
                kinds=self.kinds,
            )
        )
        scene.loop.settle()
        if task.done():
            self.noted()
        return task

    def noted(self) -> None:
        assert self.scene.space.journal is not None
        self.seen = self.scene.space.journal.position


def test_a_follower_is_told_everything_once_and_then_what_changed(scene: Scene) -> None:
    scene.store(b"a", b"b")
    follower = Follower(scene)
    assert follower.ask().result() == (True, [b"a", b"b"])
    task = follower.ask()
    assert not task.done()
    scene.store(b"c")
    scene.loop.settle()
    assert task.result() == (False, [b"c"])
    follower.noted()
    scene.claim(b"a")
    scene.hierarchy.delete(scene.space, [b"b"])
    scene.store(b"d", b"b")
    assert follower.ask().result() == (False, [b"a", b"b", b"d"])
    assert follower.ask(wait_s=0).result() == (False, [])


@pytest.mark.parametrize("how", ["store", "delete", "claim", "give back", "evict", "other kind"])
def test_only_the_wanted_changes_end_a_wait(scene: Scene, how: str) -> None:
    scene.store(b"a", b"z")
    coming, going = Follower(scene, Change.CAME, b"ab"), Follower(scene, Change.GONE)
    scene.claim(b"z")
    coming.ask(), going.ask()
    tasks = coming.ask(), going.ask()
    if how == "store":
        scene.store(b"b")
    elif how == "delete":
        scene.hierarchy.delete(scene.space, [b"a"])
    elif how == "claim":
        scene.claim(b"a")
    elif how == "give back":
        scene.claim(b"a")
        scene.hierarchy.end_session(scene.other)
    elif how == "evict":
        scene.hierarchy.pool.evict(32 << 20, 1)
    else:
        scene.store(b"x")
    scene.loop.settle()
    assert [task.done() for task in tasks] == [how in ("store", "give back"), how == "delete"]
    scene.loop.advance(61)
    assert all(task.done() for task in tasks)


def test_who_is_too_far_behind_is_told_everything(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.journal._EVENTS_MAX", 4)
    follower = Follower(scene)
    assert follower.ask().result() == (True, [])
    scene.store(b"a", b"b", b"c", b"d")
    assert follower.ask().result() == (False, [b"a", b"b", b"c", b"d"])
    scene.hierarchy.delete(scene.space, [b"a"])
    scene.store(b"e", b"f", b"g", b"h")
    assert follower.ask().result() == (True, [b"b", b"c", b"d", b"e", b"f", b"g", b"h"])
    follower.seen += 1  # of another life of the daemon
    assert follower.ask().result()[0]
    follower.seen = 0
    task = follower.ask(limit=6)
    with pytest.raises(LimitExceeded, match="keys_max"):
        task.result()


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_what_a_session_keeps_stays_until_it_is_removed_or_the_session_ends(scene: Scene) -> None:
    hierarchy = scene.hierarchy
    offsets = hierarchy.reserve(scene.other, scene.space, 3).offsets
    hierarchy.commit(scene.other, scene.space, offsets, [b"a", b"b", b"c"], keep=True)
    check_invariants(hierarchy)
    assert hierarchy.pool.evict(32 << 20, 10) == 0
    assert hierarchy.delete(scene.space, [b"a"]) == 1  # by whomever
    assert hierarchy.pool.block_count == 2
    lease = hierarchy.acquire(scene.one, scene.space, [b"b"])
    assert lease is not None and hierarchy.delete(scene.space, [b"b"]) == 1
    assert hierarchy.pool.block_count == 2  # a reader looks at it still
    hierarchy.release(scene.one, [lease.id])
    assert hierarchy.pool.block_count == 1
    check_invariants(hierarchy)
    hierarchy.end_session(scene.other)
    check_invariants(hierarchy)
    assert list(scene.space.blocks) == [b"c"] and hierarchy.pool.evict(32 << 20, 10) == 1
