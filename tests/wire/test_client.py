"""The client against a real daemon: what the documentation promises."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.client import Client
from kvstore.errors import (
    CallerMistake,
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    LimitExceeded,
    SizeMismatch,
    StaleGeneration,
)
from kvstore.testing import make_block
from tests.support import PATIENCE_S, Daemon, eventually
from tests.wire.conftest import NAMESPACE

SIZE = NAMESPACE.block_bytes


def keys(count: int, prefix: str = "k") -> list[bytes]:
    return [f"{prefix}{index}".encode() for index in range(count)]


def blocks(names: list[bytes]) -> list[bytes]:
    return [make_block(name, SIZE) for name in names]


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    with served.connect(NAMESPACE) as client:
        yield client


def put(client: Client, names: list[bytes]) -> None:
    result = client.insert(names, blocks(names)).wait(PATIENCE_S)
    assert result.stored == len(names), result


def test_present_says_which_keys_are_there_in_any_order(client: Client) -> None:
    put(client, keys(3))
    assert client.present([]) == []
    assert client.present([b"none", *keys(3)[::-1], b"k"]) == [False, True, True, True, False]


def test_the_example_of_the_documentation(served: Daemon) -> None:
    """As it stands there, but for the path."""
    keys = [b"prefix", b"suffix"]
    blocks = [bytearray(b"p" * (8 << 20)), np.full(4 << 20, 0x7373, dtype=np.uint16)]
    ns = kvstore.Namespace(model="demo", dtype="bfloat16", block_size=64, block_bytes=8 << 20)
    with kvstore.connect(served.endpoint, namespace=ns) as client:
        ticket = client.insert(keys, blocks)
        result = ticket.wait(timeout_s=PATIENCE_S)
        assert (result.stored, result.exists, result.refused) == (2, 0, {})
        assert client.lookup([*keys, b"more"]) == 2
        with client.select(keys, timeout_s=5) as found:
            assert [bytes(view) for view in found] == [b"p" * (8 << 20), b"s" * (8 << 20)]
            assert all(isinstance(view, memoryview) and view.readonly for view in found)
        with client.drop_select(keys, timeout_s=5) as found:
            assert len(found) == 2
        assert client.lookup(keys) == 0
        assert client.delete(keys) == 0 and client.flush() == 0
        assert client.stats()["tiers"][0]["name"] == "cpu"


def test_stats_have_what_is_promised(client: Client) -> None:
    put(client, keys(3))
    tree = client.stats()
    for name in ("tiers", "namespaces", "sessions", "pins", "hits", "misses"):
        assert name in tree
    (tier,) = tree["tiers"]
    assert {"name", "state", "capacity_bytes", "used_bytes", "blocks"} <= set(tier)
    assert tier["blocks"] == 3 and tier["used_bytes"] == 3 * SIZE
    assert tree["block_size"] == 64 and tree["sessions"][0]["pid"] == os.getpid()
    assert "wire" in {namespace["identity"]["model"] for namespace in tree["namespaces"]}


def test_what_exists_is_neither_stored_nor_copied(client: Client) -> None:
    put(client, keys(2))
    names = keys(4)
    wrong = [bytes(SIZE), bytes(SIZE), *blocks(names)[2:]]
    result = client.insert(names, wrong).wait(PATIENCE_S)
    assert (result.stored, result.exists, result.refused) == (2, 2, {})
    with client.select(names, timeout_s=0) as found:
        assert [bytes(view) for view in found] == blocks(names)


def test_insert_takes_anything_with_the_buffer_protocol(client: Client) -> None:
    plain = make_block(b"x", SIZE)
    kinds = [plain, bytearray(plain), memoryview(plain), np.frombuffer(plain, dtype=np.float16).reshape(2, -1)]
    names = keys(len(kinds))
    assert client.insert(names, kinds).wait(PATIENCE_S).stored == len(kinds)
    with client.select(names, timeout_s=0) as found:
        assert {bytes(view) for view in found} == {plain}


@pytest.mark.parametrize(
    ("names", "values", "error", "said"),
    [
        ([b"a"], [bytes(SIZE - 1)], SizeMismatch, f"{SIZE - 1}.*{SIZE}"),
        ([b"a", b"b"], [bytes(SIZE), bytes(SIZE + 1)], SizeMismatch, "block 1"),
        ([b"a", b"b"], [bytes(SIZE)], InvalidRequest, "2 keys and 1 blocks"),
        ([b""], [bytes(SIZE)], InvalidRequest, "key"),
        ([b"x" * 129], [bytes(SIZE)], InvalidRequest, "1 to 128"),
        (["a"], [bytes(SIZE)], InvalidRequest, "keys are bytes"),
        ([b"a"], [[1, 2]], InvalidRequest, "block 0"),
        ([b"a"], [np.zeros((2, SIZE), dtype=np.uint8)[:, ::2]], InvalidRequest, "C-contiguous"),
        ([b"a"], [np.array([None] * (SIZE // 8))], InvalidRequest, "block 0"),
    ],
)
def test_wrong_blocks_are_refused_before_anything_is_stored(
    client: Client, names: list[bytes], values: list[bytes], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        client.insert(names, values)
    assert client.lookup([b"a"]) == 0


def test_an_insert_of_nothing_is_done(client: Client) -> None:
    ticket = client.insert([], [])
    assert ticket.done and ticket.wait(0).stored == 0 and client.lookup([]) == 0 and client.delete([]) == 0


def test_what_follows_a_refused_block_is_refused_with_it(served: Daemon) -> None:
    with served.connect(NAMESPACE, group="small", share_bytes=3 * SIZE) as client:
        names = keys(5)
        result = client.insert(names, blocks(names)).wait(PATIENCE_S)
        assert (result.stored, result.refused) == (3, {"share": 2})
        assert client.lookup(names) == 3
        assert client.stats()["refused"]["share"] == 2


def test_a_block_that_never_fits_is_refused(served: Daemon) -> None:
    large = kvstore.Namespace(model="too large", dtype="x", block_size=64, block_bytes=80 << 20)
    with served.connect(large) as client:
        assert client.insert([b"a"], [bytes(80 << 20)]).wait(PATIENCE_S).refused == {"too_large": 1}


def test_a_pool_of_pinned_blocks_refuses(served: Daemon) -> None:
    large = kvstore.Namespace(model="pinned", dtype="x", block_size=64, block_bytes=4 << 20)
    with served.connect(large) as client:
        names = keys(20)
        # Slots that are reserved cannot leave for others: of one insert there is no more than the pool holds.
        result = client.insert(names, [bytes(4 << 20)] * 20).wait(PATIENCE_S)
        assert result.stored > 10 and result.refused == {"pinned": 20 - result.stored}
        with client.select(names[: result.stored], timeout_s=0) as found:
            assert len(found) == result.stored
            refused = client.insert([b"new"], [bytes(4 << 20)]).wait(PATIENCE_S).refused
            assert refused == {"pinned": 1}
        assert client.insert([b"new"], [bytes(4 << 20)]).wait(PATIENCE_S).stored == 1


def test_many_blocks_go_in_rounds(client: Client) -> None:
    names = keys(2500)
    value = make_block(b"same", SIZE)
    result = client.insert(names, [value] * len(names)).wait(PATIENCE_S)
    assert result.stored + sum(result.refused.values()) == 2500 and result.stored >= 900


def test_a_ticket_that_is_not_done_says_so(client: Client) -> None:
    ticket = client.insert(keys(900), [bytes(SIZE)] * 900)
    try:
        ticket.wait(0)
    except DeadlineExceeded:
        pass
    assert ticket.wait(PATIENCE_S).stored == 900 and ticket.done


def test_lookup_of_2048_keys_is_one_call(client: Client) -> None:
    before = client.stats()["calls"].get("Lookup", 0)
    assert client.lookup(keys(2048)) == 0
    assert client.stats()["calls"]["Lookup"] == before + 1


def test_an_oversized_batch_is_refused_by_name_and_the_client_lives_on(client: Client) -> None:
    for call in (
        lambda: client.lookup([b"k"] * 65_537),
        lambda: client.delete([b"k"] * 65_537),
        lambda: client.acquire([(0, [b"k"] * 40_000), (0, [b"k"] * 40_000)]),
        lambda: client.reserve(65_537),
        lambda: client.reserve((1 << 32) - 1),
    ):
        with pytest.raises(LimitExceeded, match=r"65536 \(keys_max\)"):
            call()
    with pytest.raises(LimitExceeded, match=r"wait_s_max"):
        client.reserve(1, wait_s=601)
    assert client.lookup([b"k"] * 65_536) == 0


def test_an_oversized_message_is_refused_with_the_limit(client: Client) -> None:
    with pytest.raises(LimitExceeded, match=r"message_bytes_max.*16777216"):
        client.lookup([b"x" * 1_000_000] * 17)
    assert client.lookup([b"k"]) == 0


# -- select --------------------------------------------------------------------------------------------------------


def test_select_waits_until_all_are_there(served: Daemon, client: Client) -> None:
    found_lengths: list[int] = []

    def reader() -> None:
        with served.connect(NAMESPACE) as other, other.select(keys(3), timeout_s=PATIENCE_S) as found:
            found_lengths.append(len(found))

    thread = threading.Thread(target=reader)
    thread.start()
    eventually(lambda: client.stats()["waiters"] == 1)
    put(client, keys(2))
    put(client, [b"k2"])
    thread.join(PATIENCE_S)
    assert found_lengths == [3]


def test_select_gives_the_leading_run_when_the_time_is_up(client: Client) -> None:
    put(client, [b"k0", b"k2"])
    with client.select(keys(3), timeout_s=0) as found:
        assert len(found) == 1 and bytes(found[0]) == make_block(b"k0", SIZE)
        assert bytes(found[-1]) == bytes(found[0]) and len(found[0:5]) == 1
        with pytest.raises(IndexError):
            _ = found[1]
    with client.select([b"none"], timeout_s=0) as found:
        assert len(found) == 0 and list(found) == []
    with pytest.raises(InvalidRequest, match="timeout_s"), client.select([b"a"], timeout_s=-1):
        pass


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), 1e9, 601])
def test_a_wait_that_cannot_be_is_refused(client: kvstore.Client, timeout_s: float) -> None:
    with pytest.raises(CallerMistake, match=r"timeout_s|wait_s_max"), client.select([b"a"], timeout_s=timeout_s):
        pass
    with pytest.raises(CallerMistake, match=r"timeout_s|wait_s_max"):
        client.watch(1, timeout_s=timeout_s)


def test_views_are_read_only_and_end_with_the_block(client: Client) -> None:
    put(client, keys(1))
    with client.select(keys(1), timeout_s=0) as found:
        view = found[0]
        with pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(ValueError):
            np.frombuffer(view, dtype=np.uint8)[0] = 1
    with pytest.raises(ValueError):
        _ = found[0]
    with pytest.raises(ValueError):
        bytes(view)


@pytest.mark.parametrize("drop", [False, True])
def test_what_escapes_the_with_block_keeps_its_pin_until_it_is_dropped(client: Client, drop: bool) -> None:
    put(client, keys(2))
    select = client.drop_select if drop else client.select
    with select(keys(2), timeout_s=0) as found:
        escaped = np.frombuffer(found[1], dtype=np.uint8)[100:200]
        _ = found[0]
    expected = make_block(b"k1", SIZE)[100:200]
    assert client.stats()["pins"] == 2
    assert client.lookup(keys(2)) == (0 if drop else 2)
    # Far more than fits: whatever may leave has left.
    client.insert(keys(1500, "n"), [bytes(SIZE)] * 1500).wait(PATIENCE_S)
    assert bytes(escaped) == expected
    del escaped
    gc.collect()
    eventually(lambda: client.stats()["pins"] == 0)


def test_drop_select_gives_back_where_an_exception_leaves(client: Client) -> None:
    put(client, keys(2))
    with pytest.raises(ZeroDivisionError), client.drop_select(keys(2), timeout_s=0):
        _ = 1 / 0
    assert client.lookup(keys(2)) == 2 and client.stats()["pins"] == 0


def test_of_many_threads_exactly_one_gets_each_block(served: Daemon, client: Client) -> None:
    rounds, threads = 5, 8
    won: list[int] = []
    done = threading.Barrier(threads + 1)

    def taker() -> None:
        for turn in range(rounds):
            name = b"round%d" % turn
            done.wait(PATIENCE_S)
            with client.drop_select([name], timeout_s=0.5) as found:
                if len(found):
                    assert bytes(found[0]) == make_block(name, SIZE)
                    won.append(turn)
            done.wait(PATIENCE_S)

    takers = [threading.Thread(target=taker) for _ in range(threads)]
    for thread in takers:
        thread.start()
    for turn in range(rounds):
        done.wait(PATIENCE_S)
        put(client, [b"round%d" % turn])
        done.wait(PATIENCE_S)
    for thread in takers:
        thread.join(PATIENCE_S)
    assert won == list(range(rounds))


def test_flush_and_delete_stop_at_the_namespace(served: Daemon, client: Client) -> None:
    other = kvstore.Namespace(model="neighbour", dtype="x", block_size=64, block_bytes=SIZE)
    put(client, keys(3))
    with served.connect(other) as neighbour:
        put(neighbour, keys(3))
        assert neighbour.delete([b"k0", b"k0", b"nothing"]) == 1
        assert neighbour.flush() == 2 and neighbour.lookup(keys(3)) == 0
    assert client.lookup(keys(3)) == 3


# -- for engines ---------------------------------------------------------------------------------------------------


def test_reserve_write_commit_acquire_release(client: Client) -> None:
    slots = client.reserve(3)
    assert len(slots.offsets) == 3 and slots.shortfall is None and slots.generation == client.generation
    arena = client.arena
    assert arena is not None
    pool = arena.as_numpy()
    names = keys(2)
    for offset, name in zip(slots.offsets.tolist(), names, strict=False):
        pool[offset : offset + SIZE] = np.frombuffer(make_block(name, SIZE), dtype=np.uint8)
    assert client.commit(slots.generation, slots.offsets[:2], names).tolist() == [1, 1]
    assert client.commit(slots.generation, slots.offsets, [*names, b"k0"]).tolist() == [3, 3, 2]
    assert client.abort(slots.generation, slots.offsets) == 0
    first, second, none = client.acquire([(0, [*names, b"x"]), (0, names[1:]), (0, [b"x"])])
    assert (len(first.offsets), len(second.offsets), len(none.offsets), none.id) == (2, 1, 0, 0)
    assert arena.epochs_of(first.offsets).tolist() == first.epochs.tolist()
    for offset, name in zip(first.offsets.tolist(), names, strict=True):
        assert pool[offset : offset + SIZE].tobytes() == make_block(name, SIZE)
    assert client.stats()["pins"] == 3
    assert client.release([first, second, none, first]) == 2
    assert client.stats()["pins"] == 0 and client.acquire([]) == []
    again = client.acquire([(0, names)])
    assert client.release([*again, none], wait=False) == 0 == client.release([none], wait=False)
    assert client.stats()["pins"] == 0  # what is asked later comes after it


def test_bad_offsets_and_unknown_leases_change_nothing(served: Daemon, client: Client) -> None:
    with served.connect(NAMESPACE) as other:
        mine, theirs = client.reserve(2), other.reserve(1)
        strange = [int(mine.offsets[0]) + 1, 12345, (1 << 64) - 1, int(theirs.offsets[0])]
        names = keys(len(strange))
        assert client.commit(mine.generation, strange, names).tolist() == [3] * len(strange)
        assert client.abort(mine.generation, strange) == 0
        with pytest.raises(InvalidRequest, match="1 slots and 2 keys"):
            client.commit(mine.generation, mine.offsets[:1], [b"a", b"b"])
        with pytest.raises(InvalidRequest, match="key"):
            client.commit(mine.generation, mine.offsets[:1], [b""])
        for generation in (b"", b"12345678"):
            with pytest.raises(StaleGeneration):
                client.commit(generation, mine.offsets[:1], [b"a"])
            assert client.abort(generation, mine.offsets) == 0
        assert client.abort(mine.generation, mine.offsets) == 2
        assert client.release([]) == 0
        put(other, [b"theirs"])
        (lease,) = other.acquire([(0, [b"theirs"])])
        assert client.release([lease]) == 0 and other.release([lease]) == 1
        with pytest.raises(InvalidRequest, match="group 5"):
            client.acquire([(0, [b"a"]), (5, [b"a"])])


def test_blocks_of_several_groups_have_sizes_of_their_own(served: Daemon) -> None:
    hybrid = kvstore.Namespace(
        model="hybrid", dtype="x", block_size=64, block_bytes=SIZE, more_group_bytes=(4096, 3 << 20)
    )
    with served.connect(hybrid) as client:
        for group in range(3):
            slots = client.reserve(2, kv_group=group)
            assert client.commit(slots.generation, slots.offsets, keys(2), kv_group=group).tolist() == [1, 1]
        leases = client.acquire([(group, keys(2)) for group in range(3)])
        assert [len(lease.offsets) for lease in leases] == [2, 2, 2]
        assert client.release(leases) == 3
        figures = next(each for each in client.stats()["namespaces"] if each["identity"]["model"] == "hybrid")
        assert [group["block_bytes"] for group in figures["groups"]] == [SIZE, 4096, 3 << 20]


# -- namespaces ----------------------------------------------------------------------------------------------------


def test_another_size_for_the_same_namespace_is_refused_with_both(served: Daemon, client: Client) -> None:
    other = kvstore.Namespace(model="wire", dtype="bfloat16", block_size=64, block_bytes=SIZE * 2)
    with pytest.raises(SizeMismatch, match=rf"\[{SIZE}\].*\[{SIZE * 2}\]"):
        served.connect(other)
    with pytest.raises(SizeMismatch):
        client.open_namespace(other)
    assert client.namespace == NAMESPACE and client.lookup([b"a"]) == 0


def test_blocks_of_a_foreign_namespace_are_misses(served: Daemon, client: Client) -> None:
    put(client, keys(1))
    foreign = kvstore.Namespace(model="wire", dtype="float16", block_size=64, block_bytes=SIZE)
    with served.connect(foreign) as other:
        assert other.lookup(keys(1)) == 0
        with other.select(keys(1), timeout_s=0) as found:
            assert len(found) == 0


def test_the_block_size_may_be_the_daemons(served: Daemon) -> None:
    with served.connect(kvstore.Namespace(model="any", dtype="x", block_bytes=SIZE)) as client:
        assert client.namespace is not None and client.namespace.block_size == client.block_size == 64


def test_without_a_namespace_there_are_figures_but_no_blocks(served: Daemon) -> None:
    with served.connect() as client:
        assert client.stats()["pid"] and client.namespace is None
        for call in (
            lambda: client.lookup([b"a"]),
            lambda: client.reserve(1),
            lambda: client.insert([b"a"], [bytes(SIZE)]),
        ):
            with pytest.raises(InvalidRequest, match="namespace"):
                call()
        client.open_namespace(NAMESPACE)
        put(client, [b"a"])


def test_what_was_given_to_insert_does_not_land_in_a_namespace_that_was_opened_since(served: Daemon) -> None:
    later = kvstore.Namespace(model="later", dtype="x", block_size=64, block_bytes=SIZE)
    with served.connect(NAMESPACE) as client:
        tickets = [client.insert([b"%d" % index], [bytes(SIZE)]) for index in range(200)]
        client.open_namespace(later)
        results = [ticket.wait(PATIENCE_S) for ticket in tickets]
        stored = sum(result.stored for result in results)
        refused = sum(result.refused.get("InvalidRequest", 0) for result in results)
        lost = sum(result.refused.get("KVStoreError", 0) for result in results)
        assert stored + refused + lost == 200
        assert client.lookup([b"%d" % index for index in range(200)]) == 0
        eventually(lambda: client.stats()["reserved_slots"] == 0, "what was not committed went back")


# -- the end -------------------------------------------------------------------------------------------------------


def test_a_closed_client_says_so(served: Daemon) -> None:
    client = served.connect(NAMESPACE)
    client.close()
    client.close()
    for call in (
        lambda: client.lookup([b"a"]),
        lambda: client.insert([b"a"], [bytes(SIZE)]),
        lambda: client.reserve(1),
        lambda: client.stats(),
        lambda: client.release([]),
        lambda: client.open_namespace(NAMESPACE),
    ):
        with pytest.raises(ClientClosed):
            call()


def test_close_finishes_what_insert_was_given(served: Daemon) -> None:
    client = served.connect(NAMESPACE)
    ticket = client.insert(keys(300), [bytes(SIZE)] * 300)
    client.close()
    assert ticket.wait(0).stored == 300
    with served.connect(NAMESPACE) as other:
        assert other.lookup(keys(300)) == 300


def test_a_view_outlives_its_client(served: Daemon) -> None:
    """The session's pins last until the view is dropped, and not longer."""
    with served.connect(NAMESPACE) as client:
        put(client, [b"a"])
        with client.select([b"a"], timeout_s=0) as found:
            view = np.frombuffer(found[0], dtype=np.uint8)
    del client, found
    gc.collect()
    assert served.stats()["pins"] == 1
    with served.connect(NAMESPACE) as other:
        other.insert(keys(1500), [bytes(SIZE)] * 1500).wait(PATIENCE_S)
    assert view.tobytes() == make_block(b"a", SIZE)
    del view
    gc.collect()
    served.check_nothing_held()


def test_groups_have_blocks_of_their_own_size(served: Daemon) -> None:
    namespace = kvstore.Namespace("groups", "bfloat16", 64, block_bytes=4096, more_group_bytes=(64 << 10,))
    with served.connect(namespace) as client:
        small, large = make_block(b"small", 4096), make_block(b"large", 64 << 10)
        assert client.insert([b"k"], [small]).wait(PATIENCE_S).stored == 1
        assert client.lookup([b"k"], kv_group=1) == 0
        assert client.insert([b"k"], [large], kv_group=1).wait(PATIENCE_S).stored == 1
        for kv_group, wanted in enumerate((small, large)):
            with client.select([b"k"], PATIENCE_S, kv_group=kv_group) as found:
                assert bytes(found[0]) == wanted
        with client.drop_select([b"k"], PATIENCE_S, kv_group=1) as found:
            assert bytes(found[0]) == large
        assert (client.lookup([b"k"]), client.lookup([b"k"], kv_group=1)) == (1, 0)
        assert client.delete([b"k"], kv_group=1) == 0 and client.delete([b"k"]) == 1
        with pytest.raises(SizeMismatch, match="blocks of this group have 65536"):
            client.insert([b"k"], [small], kv_group=1)
        with pytest.raises(InvalidRequest, match="2 groups"):
            client.insert([b"k"], [small], kv_group=2)
        with pytest.raises(InvalidRequest, match="2 groups"):
            client.lookup([b"k"], kv_group=2)


def test_watch_wakes_with_what_is_there_and_whether_it_is_claimed(client: Client, served: Daemon) -> None:
    seen, listed = client.watch(0, 0)
    assert listed == {}
    with served.connect(NAMESPACE) as other:
        waiting = threading.Thread(target=put, args=(other, keys(2)))
        waiting.start()
        while len(listed) < 2:
            seen, listed = client.watch(seen, PATIENCE_S)
        waiting.join()
        assert listed == {b"k0": False, b"k1": False} and list(listed) == keys(2)
        with other.drop_select([b"k0"], PATIENCE_S):
            assert client.watch(0, 0)[1] == {b"k0": True, b"k1": False}
        while b"k0" in listed:
            seen, listed = client.watch(seen, PATIENCE_S)
    assert client.watch(seen, 0) == (seen, {b"k1": False})
    with pytest.raises(InvalidRequest, match="timeout_s"):
        client.watch(seen, -1)
