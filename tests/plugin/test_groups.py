"""Requests with blocks in several KV-cache groups: one with full attention (0) and one with a sliding window (1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from engine_plugin.vllm.coming import STALL_S, Expected, Query
from engine_plugin.vllm.link import DaemonLink, _may_be_direct
from engine_plugin.vllm.lookups import Lookups, Verdict
from engine_plugin.vllm.rates import LoadPolicy
from engine_plugin.vllm.runs import Gathered, by_group, gather, group_of, hash_of, runs_of, split
from engine_plugin.vllm.stock import STOCK_UNUSED_S
from engine_plugin.vllm.stores import KnownKeys, Store, Stores
from engine_plugin.vllm.worth import Block
from tests.plugin.fakes import FakeClient, FakeDaemon, FakeLease

FULL, WINDOW = 0, 1
WINDOW_BLOCKS = 2
STEP_S = 0.01
FULL_BLOCK, WINDOW_BLOCK = Block(100, 1000), Block(100, 400)


def key(group: int, place: int) -> bytes:
    return hashlib.sha256(str(place).encode()).digest() + group.to_bytes(4, "big")


ENDS = {key(group, place): 100 * (place + 1) for group in (FULL, WINDOW) for place in range(100)}


def chain(group: int, places: Sequence[int]) -> list[bytes]:
    return [key(group, place) for place in places]


def content_of(each: bytes) -> np.ndarray:
    """The bytes of a block."""
    return np.frombuffer(hashlib.sha512(each).digest(), np.uint8)


class Rig:
    """The scheduler's part of an engine with one worker."""

    def __init__(
        self, daemon: FakeDaemon | None = None, *, only_windows: bool = False, policy: LoadPolicy | None = None
    ) -> None:
        self.time = 100.0
        self.daemon = daemon or FakeDaemon()
        self.client = FakeClient(self.daemon)
        self.link = DaemonLink(self.client, stock_max=24, policy=policy, now=lambda: self.time, threaded=False)
        self.expected = Expected()
        self.apart = b""
        known = KnownKeys(lambda: self.time)
        self.lookups = Lookups(
            self.link,
            deadline_s=0.5,
            now=lambda: self.time,
            ready_generation=lambda: self.daemon.arena.generation,
            on_present=known.add,
            expect=lambda _req_id, _keys: self.expected,
            policy=policy,
            blocks={FULL: FULL_BLOCK, WINDOW: WINDOW_BLOCK},
            windowed={WINDOW: WINDOW_BLOCKS + 1},
            only_windows=only_windows,
            end_of=lambda _req_id, each: ENDS[each],
            apart=lambda req_id: self.apart if req_id == "request" else b"",
        )
        self.stores = Stores(
            self.link,
            workers=1,
            known=known,
            ready_generation=lambda: self.daemon.arena.generation,
            ask_about=self.lookups.ask_about,
            windowed={WINDOW: WINDOW_BLOCKS + 1},
            now=lambda: self.time,
        )
        self.started: list[str] = []
        self.link.set_busy(True)
        self.step()

    def step(self) -> None:
        started, self.started = self.started, []
        self.lookups.step_end(started, ())
        self.link.turn()
        self.time += STEP_S

    def ask(self, keys: Sequence[bytes]) -> list[Verdict]:
        """As vLLM does: a prefix up to its first miss, a window from its end."""
        return [self.lookups.lookup("request", each) for each in keys]

    def answers(self, keys: Sequence[bytes]) -> list[Verdict]:
        """What is said in the end: a window is asked for when the prefix has been answered."""
        for _ in range(int(3 * STALL_S / STEP_S)):
            found = self.ask(keys)
            if Verdict.RETRY not in found:
                return found
            self.step()
        raise AssertionError("no answer")

    def store(self, full: Sequence[int], window: Sequence[int]) -> Store | None:
        """Stores blocks by their places, all of them copied at once."""
        keys = [*chain(FULL, full), *chain(WINDOW, window)]
        ends = dict(zip(keys, [*full, *window], strict=True))
        self.link._stock.announce(len(keys))
        self.link.turn()
        store = self.stores.prepare(keys, {}, ends.__getitem__, self.apart)
        if store is not None:
            for each, offset in zip(store.keys, store.slots.offsets.tolist(), strict=True):
                self.daemon.arena.slot(offset)[:] = content_of(each)
            self.stores.report({store.ticket: {0}}, ())
            self.stores.complete(store.keys)
        self.step()
        return store


def test_keys_name_their_group() -> None:
    assert [group_of(key(group, 3)) for group in (0, 1, 300)] == [0, 1, 300]
    assert len({hash_of(key(group, 3)) for group in range(3)}) == 3
    assert hash_of(key(0, 3)) == key(0, 3)[:-4]  # as in an engine with one group


def test_runs() -> None:
    keys = [*chain(0, range(4)), *chain(1, range(2)), *chain(2, range(3))]
    assert runs_of(keys, {1}) == (4, 1, 1, 3)
    assert runs_of(keys[:4], {1}) == ()
    assert runs_of(keys[4:6], {1}) == (1, 1)
    assert [list(run) for run in split(keys, (4, 1, 1, 3))] == [keys[:4], keys[4:5], keys[5:6], keys[6:]]
    assert by_group(keys) == {0: keys[:4], 1: keys[4:6], 2: keys[6:]}


def test_what_runs_are_answered_is_put_together() -> None:
    def lease(*offsets: int, pending: int = 0) -> FakeLease:
        return FakeLease(1, b"g", np.array(offsets, np.uint64), np.array(offsets, np.uint32), pending)

    found = gather([lease(7, 8, pending=1), lease(), lease(9)], (4, 1, 1))
    assert isinstance(found, Gathered)
    assert found.places.tolist() == [0, 1, 5]
    assert found.offsets.tolist() == [7, 8, 9]
    assert (found.pending, len(found.leases)) == (1, 2)


def test_nothing_of_several_groups_is_asked_for_past_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, asked = Rig(), list[Query]()
    ask = rig.link.ask
    monkeypatch.setattr(rig.link, "ask", lambda queries: (asked.extend(queries), ask(queries)))
    rig.store(range(6), [4, 5])
    rig.answers(chain(FULL, range(6)))  # one run of keys, as the only group of another model would be
    rig.answers(chain(WINDOW, [5]))
    assert len(asked) == 2 and not any(_may_be_direct(query) for query in asked)


def test_a_window_is_found_though_its_beginning_is_not() -> None:
    rig = Rig()
    rig.store(range(6), [4, 5])
    asked = [*chain(FULL, range(8)), *chain(WINDOW, range(7, -1, -1))]
    assert set(rig.ask(asked)) == {Verdict.RETRY}
    rig.step()
    assert rig.ask(chain(FULL, range(8))) == [Verdict.HIT] * 6 + [Verdict.MISS] * 2
    # From where the prefix ends backwards.
    assert rig.answers(chain(WINDOW, [5, 4, 3])) == [Verdict.HIT, Verdict.HIT, Verdict.MISS]
    assert rig.ask(chain(WINDOW, [1])) == [Verdict.MISS]  # nobody has asked for it
    plan = rig.lookups.prepare_load("request", [*chain(FULL, range(6)), *chain(WINDOW, [4, 5])])
    assert plan is not None
    slots = [rig.daemon.blocks[hash_of(each)] for each in [*chain(FULL, range(6)), *chain(WINDOW, [4, 5])]]
    assert plan.offsets.tolist() == [slot * rig.daemon.arena.memory.shape[1] for slot in slots]
    rig.lookups.load_done("request")
    rig.step()
    assert not rig.daemon.leases


def test_an_adapters_windows_are_its_own() -> None:
    rig = Rig()
    rig.store(range(4), [3])
    rig.apart = b"adapter"
    asked = [*chain(FULL, range(4)), *chain(WINDOW, [3])]
    assert rig.answers(asked) == [Verdict.MISS] * 5
    rig.lookups.finished("request")
    rig = Rig()
    rig.apart = b"adapter"
    rig.store(range(4), [3])
    assert rig.answers(asked) == [Verdict.HIT] * 5


def test_a_load_of_what_is_not_pinned_is_refused() -> None:
    rig = Rig()
    rig.store(range(4), [3])
    asked = [*chain(FULL, range(4)), *chain(WINDOW, [3, 2])]
    assert rig.answers(asked) == [Verdict.HIT] * 5 + [Verdict.MISS]
    assert rig.lookups.prepare_load("request", [*chain(FULL, range(4)), key(WINDOW, 2)]) is None


def test_a_failed_window_is_not_promised_again_and_others_are() -> None:
    rig = Rig()
    rig.store(range(4), [1, 3])
    asked = [*chain(FULL, range(4)), *chain(WINDOW, [3, 2, 1])]
    assert rig.answers(asked).count(Verdict.HIT) == 6
    assert rig.lookups.prepare_load("request", chain(WINDOW, [3])) is not None
    rig.lookups.load_failed("request")
    rig.lookups.load_done("request")
    rig.store(range(4, 6), [5])
    again = [*chain(FULL, range(4, 6)), *chain(WINDOW, [5, 3])]
    assert rig.answers(again) == [Verdict.HIT, Verdict.HIT, Verdict.HIT, Verdict.MISS]


def test_with_too_few_slots_the_front_is_stored_in_all_groups() -> None:
    rig = Rig(FakeDaemon(slots=6))
    store = rig.store(range(8), range(8))
    assert store is not None
    per_group = by_group(store.keys)
    assert per_group[FULL] == chain(FULL, range(len(per_group[FULL])))
    assert per_group[WINDOW] == chain(WINDOW, range(len(per_group[WINDOW])))
    assert abs(len(per_group[FULL]) - len(per_group[WINDOW])) <= 1


def test_who_finds_a_whole_prefix_finds_its_window_too() -> None:
    """The window is published first."""
    rig = Rig()
    store = rig.stores.prepare([*chain(FULL, range(2)), *chain(WINDOW, range(2))], {}, lambda _key: 0)
    assert store is not None
    assert [list(commit.hashes) for commit in rig.stores._commits_of(store)] == [
        [hash_of(each) for each in chain(group, range(2))] for group in (WINDOW, FULL)
    ]


def test_blocks_on_disk_are_waited_for_in_all_groups() -> None:
    rig = Rig()
    rig.store(range(4), [3])
    prefix, window = [hash_of(each) for each in chain(FULL, range(4))], hash_of(key(WINDOW, 3))
    for each in (*prefix, window):
        rig.daemon.copy_down(each)
    for each in (*prefix[1:], window):
        rig.daemon.evict(each)
    asked = [*chain(FULL, range(4)), *chain(WINDOW, [3, 2])]
    for part in (prefix[1:], [window]):
        for _ in range(3):
            rig.ask(asked)
            rig.step()
        assert Verdict.RETRY in rig.ask(asked)
        for each in part:
            rig.daemon.come_up(each)
    assert rig.answers(asked) == [Verdict.HIT] * 5 + [Verdict.MISS]
    rig.lookups.finished("request")
    rig.step()
    assert not rig.daemon.leases


def test_blocks_on_disk_that_hang_are_computed() -> None:
    rig = Rig()
    rig.store(range(4), [3])
    lost = hash_of(key(WINDOW, 3))
    rig.daemon.copy_down(lost)
    rig.daemon.evict(lost)
    assert rig.answers([*chain(FULL, range(4)), *chain(WINDOW, [3])]) == [Verdict.HIT] * 4 + [Verdict.MISS]


@pytest.mark.parametrize("arrives", [True, False])
def test_blocks_that_another_engine_has_promised(arrives: bool) -> None:
    rig = Rig()
    rig.expected = Expected(keys=4, settled=0, until=rig.time + 1)
    asked = [*chain(FULL, range(4)), *chain(WINDOW, [3])]
    rig.ask(asked)
    rig.step()
    assert rig.ask(asked)[0] is Verdict.RETRY
    if arrives:
        rig.store(range(4), [3])
    assert rig.answers(asked) == [Verdict.HIT if arrives else Verdict.MISS] * 5


def test_a_model_of_windows_only_is_asked_for_all_of_them() -> None:
    """Without a prefix nobody knows where they end."""
    rig = Rig(only_windows=True)
    rig.store([], [0, 1, 5])
    assert rig.answers(chain(WINDOW, range(7, -1, -1))) == [
        Verdict.HIT if place in (0, 1, 5) else Verdict.MISS for place in range(7, -1, -1)
    ]


def measured(*, load_s: float, extra_s: float = 0.0, below_s: float | None = None) -> LoadPolicy:
    """1 ms a token; so many seconds for 1000 bytes, beside a load's copies, and for a block from disk."""
    policy = LoadPolicy(FULL_BLOCK.size_bytes, lambda: 100.0)
    policy.note_step(1000, 1000, 1.0)
    policy.note_load(10_000, 10 * load_s, 10 * load_s + extra_s)
    if below_s is not None:
        policy.note_coming("disk", 10, 10 * below_s)
    return policy


@pytest.mark.parametrize(
    ("load_s", "loads"),
    [
        (0.08, True),  # 6 blocks and 3 of a window are 7,200 bytes: 0.58 s, and 0.6 s to compute
        (0.09, False),  # 0.65 s; the prefix alone would be 0.54 s
    ],
)
def test_a_prefix_is_weighed_with_the_windows_that_it_needs(load_s: float, loads: bool) -> None:
    policy = measured(load_s=load_s)
    rig = Rig(policy=policy)
    rig.store(range(6), [3, 4, 5])
    asked = [*chain(FULL, range(6)), *chain(WINDOW, [5, 4, 3])]
    assert rig.answers(asked) == [Verdict.HIT if loads else Verdict.MISS] * 9
    assert policy.counts == {("decisions", "load" if loads else "compute"): 1}
    assert rig.lookups.counts["misses", "slow"] == (0 if loads else 6)
    rig.lookups.finished("request")
    rig.step()
    assert not rig.daemon.leases


def test_what_was_loaded_is_measured_by_its_bytes() -> None:
    policy = measured(load_s=0.0)
    rig = Rig(policy=policy)
    rig.store(range(6), [4, 5])
    rig.answers([*chain(FULL, range(6)), *chain(WINDOW, [5, 4])])
    assert rig.lookups.prepare_load("request", [*chain(FULL, range(6)), *chain(WINDOW, [4, 5])]) is not None
    for _ in range(40):  # so that nothing else counts
        policy.note_load(6800, 0.5, 0.5)
    before = policy._copy.s
    rig.lookups.load_done("request", 0.5)
    assert policy._copy.s == pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize(("load_s", "loads"), [(0.4, True), (1.2, False)])
def test_a_state_is_worth_all_that_comes_before_it(load_s: float, loads: bool) -> None:
    rig = Rig(only_windows=True, policy=measured(load_s=load_s))
    rig.store([], [3])  # 400 tokens, and 400 bytes to load
    found = rig.answers(chain(WINDOW, range(7, -1, -1)))
    assert found.count(Verdict.HIT) == loads


@pytest.mark.parametrize(("below_s", "waits"), [(0.5, True), (0.7, False)])
def test_a_window_on_disk_is_worth_its_whole_prefix(below_s: float, waits: bool) -> None:
    rig = Rig(policy=measured(load_s=0.0, below_s=below_s))
    rig.store(range(6), [5])
    last = hash_of(key(WINDOW, 5))
    rig.daemon.copy_down(last)
    rig.daemon.evict(last)
    asked = [*chain(FULL, range(6)), key(WINDOW, 5)]
    for _ in range(4):
        rig.ask(asked)
        rig.step()
    assert (rig.ask(asked)[-1] is Verdict.RETRY) == waits  # one block, and without it 600 tokens are computed
    rig.daemon.come_up(last)


def test_what_was_being_copied_when_another_connectors_load_failed_is_not_published() -> None:
    rig = Rig()
    keys = [*chain(FULL, range(2)), key(WINDOW, 1)]
    store = rig.stores.prepare(keys, {}, lambda _key: 0)
    assert store is not None
    rig.stores.distrust()
    rig.stores.report({store.ticket: {0}}, ())
    rig.stores.complete(store.keys)
    rig.step()
    assert not rig.daemon.blocks
    assert rig.stores.counts["skipped", "copy_failed"] == 3
    assert rig.store(range(2), [1]) is not None  # and it may be stored again
    assert len(rig.daemon.blocks) == 3


def test_pins_of_a_request_that_another_connector_loads_go_back() -> None:
    rig = Rig()
    rig.store(range(3), [2])
    rig.ask([*chain(FULL, range(3)), *chain(WINDOW, [2])])
    rig.step()
    assert rig.ask(chain(FULL, range(3))) == [Verdict.HIT] * 3
    assert rig.daemon.leases
    rig.lookups.finished("request")  # as KVStoreManager.on_no_load has it
    rig.step()
    assert not rig.daemon.leases


class _Request:
    """A request as vLLM's scheduler asks for it: a prefix up to its first miss, then a window from its end."""

    def __init__(self, rig: Rig, name: str, blocks: int) -> None:
        self.rig, self.name, self.blocks, self.state = rig, name, blocks, "waiting"
        self.gone = False

    def schedule(self) -> None:
        if self.state != "waiting":
            return
        retry, hits = False, 0
        for each in chain(FULL, range(self.blocks)):
            verdict = self.rig.lookups.lookup(self.name, each)
            if verdict is Verdict.MISS:
                break
            retry |= verdict is Verdict.RETRY
            hits += 1
        run, end = 0, 0
        for place in range(hits - 1, -1, -1):
            verdict = self.rig.lookups.lookup(self.name, key(WINDOW, place))
            retry |= verdict is Verdict.RETRY
            run = run + 1 if verdict is Verdict.HIT else 0
            if run == min(WINDOW_BLOCKS, place + run):
                end = place + run
                break
        if retry:
            return
        if not end:
            self.state = "running"
            self.rig.started.append(self.name)
            return
        wanted = [*chain(FULL, range(end)), *chain(WINDOW, range(max(0, end - WINDOW_BLOCKS), end))]
        plan = self.rig.lookups.prepare_load(self.name, wanted)
        assert plan is not None, "what was promised is not pinned"
        self.state = "loading"
        if plan.generation == self.rig.daemon.arena.generation:
            for each, offset in zip(wanted, plan.offsets.tolist(), strict=True):
                assert np.array_equal(self.rig.daemon.arena.slot(offset), content_of(each)), "foreign bytes"

    def end_load(self, failed: bool) -> None:
        if self.state == "loading":
            if failed:
                self.rig.lookups.load_failed(self.name)
            self.rig.lookups.load_done(self.name)
            self.state = "gone" if self.gone else "waiting" if failed else "running"

    def finish(self) -> None:
        """Also in the middle of a load, whose end is told all the same."""
        self.rig.lookups.finished(self.name)
        if self.state != "loading":
            self.state = "gone"
        self.gone = True


@pytest.mark.parametrize("seed", range(40))
def test_any_order_leaves_nothing_behind(seed: int) -> None:
    """Loads that end well, badly, late or never, evictions, promotions and a daemon that dies, in random order."""
    random = Random(seed)
    rig = Rig(FakeDaemon(slots=24))
    requests: list[_Request] = []
    for number in range(120):
        match random.randrange(12):
            case 0 | 1:
                rig.store(range(random.randrange(9)), [p for p in range(8) if random.random() < 0.7])
            case 2:
                for each in list(rig.daemon.blocks)[: random.randrange(4)]:
                    rig.daemon.copy_down(each)
                    rig.daemon.evict(each)
            case 3:
                for each in list(rig.daemon.coming):
                    rig.daemon.come_up(each)
            case 4 if random.random() < 0.2:
                rig.daemon.die()
                rig.step()
                rig.daemon.start()
                rig.client.attach()
            case 5 | 6:
                requests.append(_Request(rig, f"request {number}", random.randrange(1, 9)))
            case 7 if requests:
                random.choice(requests).end_load(failed=random.random() < 0.3)
            case 8 if requests:
                random.choice(requests).finish()
            case 9 if random.random() < 0.1:
                rig.lookups.reset()
                rig.stores.reset()
                rig.link.flush()
            case _:
                for request in requests:
                    request.schedule()
                rig.step()
    for request in requests:
        request.end_load(failed=False)
        request.finish()
    rig.time += 2 * STALL_S
    for _ in range(3):
        rig.step()
    assert not rig.daemon.leases
    rig.link.set_busy(False)
    rig.time += STOCK_UNUSED_S + 1
    for _ in range(3):
        rig.step()
    assert not rig.daemon.reserved
