"""The Python API from another host: same answers, bytes over the data port."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import kvstore
from kvstore.buffer import LookupBuffer, Pipe
from kvstore.congestion import LOSS_BASED
from kvstore.errors import (
    EndOfPipe,
    ForkedClient,
    InvalidRequest,
    LimitExceeded,
    NoMapping,
    RetryLater,
    StaleGeneration,
)
from kvstore.remote import RemoteArena
from kvstore.testing import make_block
from tests.remote.conftest import NAMESPACE, SIZE, FarDaemon, check, far_daemon, names, put
from tests.support import PATIENCE_S, child, eventually, line_of


def used(client: kvstore.Client) -> int:
    assert isinstance(client.arena, RemoteArena)
    return client.arena.staging.used_bytes


def test_what_is_stored_comes_back_and_travels_outside_of_grpc(far: FarDaemon) -> None:
    keys = names(100)
    before = far.data()
    with far.connect() as client:
        put(client, keys)
        assert client.lookup(keys) == 100
        check(client, keys)
        assert client.insert(keys, [make_block(key, SIZE) for key in keys]).wait(PATIENCE_S).exists == 100
        assert client.delete(keys[50:]) == 50
        assert client.lookup(keys) == 50
        assert client.flush() == 50
        after = client.stats()["data_port"]
    # Both ends are on this host.
    assert after["congestion"] and set(after["congestion"]) <= set(LOSS_BASED)
    assert after["received_bytes"] - before["received_bytes"] == 100 * SIZE
    assert after["sent_bytes"] - before["sent_bytes"] == 100 * SIZE


def test_what_a_client_asks_after_a_select_comes_after_its_release(far: FarDaemon) -> None:
    keys = names(3)
    with far.connect() as client:
        put(client, keys)
        for _ in range(50):
            check(client, keys)
            assert client.stats()["pins"] == 0


def test_a_select_of_what_is_in_the_pool_is_one_request_that_leaves_no_pins(far: FarDaemon) -> None:
    keys = names(9)
    with far.connect() as client:
        put(client, keys)
        before, calls = far.data()["events"]["select"], far.stats()["calls"].get("Select", 0)
        with client.select(keys, timeout_s=1) as found:
            assert len(found) == 9
            assert far.stats()["pins"] == 0
            # The blocks are copies: what becomes of those at the daemon does not touch them.
            client.delete(keys)
            put(client, names(9, "other"))
            assert [bytes(view) for view in found] == [make_block(key, SIZE) for key in keys]
        assert used(client) == 0
        assert far.data()["events"]["select"] == before + 1
        assert far.stats()["calls"].get("Select", 0) == calls


def test_a_select_gives_the_leading_run_or_waits_for_the_rest(far: FarDaemon) -> None:
    keys = names(6)
    with far.connect(data_connections=3) as client, far.connect() as other:
        put(client, [*keys[:4], keys[5]])
        with client.select(keys, timeout_s=0) as found:
            assert [bytes(view) for view in found] == [make_block(key, SIZE) for key in keys[:4]]
        assert used(client) == 0
        waits = threading.Timer(0.05, lambda: put(other, [keys[4]]))
        waits.start()
        check(client, keys)
        waits.join(PATIENCE_S)
        with client.select([b"absent"], timeout_s=0) as found:
            assert len(found) == 0
        assert used(client) == 0


def test_a_select_comes_after_what_was_posted(far: FarDaemon) -> None:
    keys = names(2)
    with far.connect() as client:
        for _ in range(30):
            put(client, keys)
            client.post_delete(keys)
            with client.select(keys, timeout_s=0) as found:
                assert len(found) == 0


def test_keys_that_fit_no_request_are_selected_all_the_same(far: FarDaemon) -> None:
    keys = [b"%05d" % index + bytes(120) for index in range(600)]
    namespace = kvstore.Namespace(model="many", dtype="x", block_size=1, block_bytes=4096)
    with far.connect(namespace) as client:
        put(client, keys, 4096)
        before = far.data()["events"]["select"]
        check(client, keys, 4096)
        assert far.data()["events"]["select"] == before
        with client.select([bytes(200)], timeout_s=0) as found:
            assert len(found) == 0
        with pytest.raises(InvalidRequest, match="group"):
            with client.select(keys, timeout_s=0.1, kv_group=1):
                raise AssertionError
        client.flush()


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_001, 3 << 20])
def test_sizes(far: FarDaemon, size: int) -> None:
    namespace = kvstore.Namespace(model=f"size-{size}", dtype="x", block_size=1, block_bytes=size)
    keys = names(9)
    with far.connect(namespace, data_connections=2) as client:
        put(client, keys, size)
        check(client, keys, size)
        client.flush()


def test_several_connections_carry_one_call(far: FarDaemon) -> None:
    keys = names(300)
    with far.connect(data_connections=3) as client:
        put(client, keys)
        check(client, keys)
        check(client, keys[::-1])
        assert far.data()["connections"] == 3


def test_views_outlive_the_with_block_and_then_their_memory_is_free(far: FarDaemon) -> None:
    keys = names(4)
    with far.connect() as client:
        put(client, keys)
        with client.select(keys, timeout_s=1) as found:
            kept = np.frombuffer(found[2], dtype=np.uint8)
            assert used(client) == 4 * SIZE
        with client.select(keys, timeout_s=1) as others:
            assert len(others) == 4
        assert kept.tobytes() == make_block(keys[2], SIZE)
        assert used(client) >= SIZE
        del kept, found, others
        eventually(lambda: used(client) == 0, "the memory is free")
        eventually(lambda: far.stats()["pins"] == 0, "the pins are back")


def test_drop_select_takes_blocks_away_once(far: FarDaemon) -> None:
    keys = names(3)
    with far.connect() as client, far.connect() as other:
        put(client, keys)
        with pytest.raises(ZeroDivisionError):
            with client.drop_select(keys, timeout_s=1) as found:
                assert len(found) == 3
                with other.drop_select(keys, timeout_s=0) as nothing:
                    assert len(nothing) == 0
                raise ZeroDivisionError
        with other.drop_select(keys, timeout_s=PATIENCE_S) as found:
            assert [bytes(view) for view in found] == [make_block(key, SIZE) for key in keys]
        assert client.lookup(keys) == 0


def test_engine_calls_have_places_of_the_clients_own(far: FarDaemon) -> None:
    keys = names(6, "e")
    with far.connect() as client:
        slots = client.reserve(6)
        assert slots.shortfall is None and isinstance(client.arena, RemoteArena)
        for key, place in zip(keys, slots.offsets.tolist(), strict=True):
            client.arena.as_numpy()[place : place + SIZE] = np.frombuffer(make_block(key, SIZE), np.uint8)
        assert client.abort(slots.generation, slots.offsets[5:], slots.epochs[5:]) == 1
        assert client.commit(slots.generation, slots.offsets[:5], keys[:5], epochs=slots.epochs[:5]).tolist() == [1] * 5
        assert used(client) == 0
        with pytest.raises(StaleGeneration):
            client.commit(slots.generation, slots.offsets[:1], keys[5:])
        (lease,) = client.acquire([(0, keys)])
        assert len(lease.offsets) == 5
        for key, place in zip(keys, lease.offsets.tolist(), strict=False):
            assert client.arena.as_numpy()[place : place + SIZE].tobytes() == make_block(key, SIZE)
        assert np.array_equal(client.arena.epochs_of(lease.offsets), lease.epochs)
        assert client.release([lease]) == 1 and used(client) == 0


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_more_than_there_is_memory_for(far: FarDaemon) -> None:
    keys = names(8)
    with far.connect(staging_bytes=4 * SIZE) as client:
        put(client, keys)  # from where the caller has them: takes none of it
        with pytest.raises(LimitExceeded, match="staging_bytes"):
            with client.select(keys, timeout_s=1):
                raise AssertionError
        with pytest.raises(LimitExceeded, match="staging_bytes"):
            with client.drop_select(keys, timeout_s=1):
                raise AssertionError
        assert client.lookup(keys) == 8
        (lease,) = client.acquire([(0, keys)])
        assert len(lease.offsets) == 4
        (none,) = client.acquire([(0, keys)])
        assert len(none.offsets) == 0
        slots = client.reserve(2)
        assert len(slots.offsets) == 0 and slots.shortfall == "staging"
        client.release([lease, none])
        slots = client.reserve(6)
        assert len(slots.offsets) == 4 and slots.shortfall == "staging"
        client.abort(slots.generation, slots.offsets, slots.epochs)
        check(client, keys[:4])


def test_a_select_waits_for_memory_that_another_one_has(far: FarDaemon) -> None:
    keys = names(4)
    inside, leave = threading.Event(), threading.Event()
    with far.connect(staging_bytes=4 * SIZE) as client:
        put(client, keys)

        def hold() -> None:
            with client.select(keys, timeout_s=1):
                inside.set()
                leave.wait(PATIENCE_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert inside.wait(PATIENCE_S)
        with client.select(keys, timeout_s=0) as found:
            assert len(found) == 0
        with pytest.raises(RetryLater):
            with client.drop_select(keys, timeout_s=0):
                raise AssertionError
        threading.Timer(0.05, leave.set).start()
        check(client, keys)
        holder.join(PATIENCE_S)


def test_without_memory_slots_are_those_of_the_pool(far: FarDaemon) -> None:
    with far.connect(staging_bytes=0) as client:
        assert client.arena is None
        slots = client.reserve(2)
        assert client.abort(slots.generation, slots.offsets, slots.epochs) == 2
        with pytest.raises(NoMapping, match="staging_bytes"):
            with client.select([b"a"], timeout_s=0):
                raise AssertionError
        assert client.insert([b"a"], [bytes(SIZE)]).wait(PATIENCE_S).refused == {"NoMapping": 1}


def test_members_of_a_group_fill_and_read_each_others_slots(far: FarDaemon) -> None:
    """A scheduler names slots; its workers, each with a part of the block, move the bytes."""
    half = SIZE // 2
    block = make_block(b"group", SIZE)
    with (
        far.connect(group="engine", staging_bytes=0) as scheduler,
        far.connect(None, group="engine") as one,
        far.connect(None, group="engine") as two,
        far.connect() as stranger,
    ):
        slots = scheduler.reserve(1)
        for rank, worker in enumerate((one, two)):
            assert isinstance(worker.arena, RemoteArena) and worker.generation == slots.generation
            worker.arena.send(slots.offsets, slots.epochs, [block[rank * half :][:half]], first=rank * half)
        assert isinstance(stranger.arena, RemoteArena)
        with pytest.raises(StaleGeneration):
            stranger.arena.send(slots.offsets, slots.epochs, [bytes(SIZE)])
        assert scheduler.commit(slots.generation, slots.offsets, [b"group"], epochs=slots.epochs).tolist() == [1]
        (lease,) = scheduler.acquire([(0, [b"group"])])
        room = bytearray(half)
        assert isinstance(two.arena, RemoteArena)
        assert two.arena.receive(lease.offsets, lease.epochs, [memoryview(room)], first=half) == 1
        assert room == block[half:]
        scheduler.release([lease])
        with pytest.raises(StaleGeneration):
            two.arena.receive(lease.offsets, lease.epochs, [memoryview(room)], first=half)


# -- lives -----------------------------------------------------------------------------------------------------------


def test_it_is_back_after_a_restart_of_the_daemon() -> None:
    with far_daemon() as daemon, daemon.connect() as client:
        put(client, names(4))
        (lease,) = client.acquire([(0, names(4))])
        slots = client.reserve(2)
        before = client.generation
        daemon.kill()
        daemon.start()
        eventually(lambda: client.generation not in (before, None), "it has attached again")
        put(client, names(4, "n"))
        check(client, names(4, "n"))
        assert client.lookup(names(4)) == 0
        assert client.release([lease]) == 0
        with pytest.raises(StaleGeneration):
            client.commit(slots.generation, slots.offsets, names(2, "s"))
        del lease
        eventually(lambda: used(client) == 0, "nothing of the life before is left")


def test_a_daemon_that_hangs_costs_its_deadline() -> None:
    with far_daemon() as daemon, daemon.connect(timeout_s=1.0) as client:
        put(client, names(2))
        daemon.signal(signal.SIGSTOP)
        try:
            with pytest.raises(RetryLater):
                with client.select(names(2), timeout_s=0):
                    raise AssertionError
        finally:
            daemon.signal(signal.SIGCONT)
        eventually(lambda: _answers(client), "it answers again")
        check(client, names(2))
        eventually(lambda: daemon.stats()["pins"] == 0, "what the lost answers took is back")


def _answers(client: kvstore.Client) -> bool:
    try:
        return client.lookup(names(2)) == 2
    except RetryLater:
        return False


def test_a_fork_is_refused_and_costs_the_parent_nothing(far: FarDaemon) -> None:
    with far.connect() as client:
        put(client, names(3))
        check(client, names(3))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            verdict = b"-"
            try:
                client.lookup([b"a"])
            except ForkedClient:
                verdict = b"+"
            finally:
                client.close()
                os.write(write, verdict)
                os._exit(0)
        os.close(write)
        assert os.read(read, 1) == b"+"
        os.close(read)
        os.waitpid(pid, 0)
        check(client, names(3))


HOLDER = """
import sys, kvstore
namespace = kvstore.Namespace(model="remote", dtype="bfloat16", block_size=64, block_bytes=64 << 10)
client = kvstore.connect(sys.argv[1], namespace, timeout_s=60)
slots = client.reserve(5)
(lease,) = client.acquire([(0, [b"k0", b"k1"])])
print(len(lease.offsets), flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_gives_everything_back(far: FarDaemon) -> None:
    with far.connect() as client:
        put(client, names(2))
        with child(HOLDER, far.endpoint) as process:
            assert line_of(process) == "2"
            assert far.stats()["pins"] == 2 and far.stats()["reserved_slots"] == 5
            process.kill()
        client.close()
    far.check_nothing_held()


def test_readers_and_writers_at_once_see_right_bytes(far: FarDaemon) -> None:
    """A pool that is much too small, so that slots change hands all the time under those who read."""
    keys = names(2000, "churn")
    stop = time.monotonic() + 2.0
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with far.connect(data_connections=2) as client:
                while time.monotonic() < stop:
                    start = int(random.integers(0, len(keys) - 40))
                    some = keys[start : start + 40]
                    client.insert(some, [make_block(key, SIZE) for key in some]).wait(PATIENCE_S)
                    with client.select(some, timeout_s=0) as found:
                        for key, view in zip(some, found, strict=False):
                            assert view == make_block(key, SIZE)
                    view = None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not errors


def test_the_namespace_is_the_same_over_both_ways(far: FarDaemon) -> None:
    with far.connect() as client:
        assert client.namespace == NAMESPACE


def test_a_claim_brings_its_blocks_or_leaves_them(far: FarDaemon) -> None:
    keys = names(4, "claim")
    with far.connect(staging_bytes=3 * SIZE) as client:
        put(client, keys)
        lease = client.claim(keys[:2])
        assert isinstance(client.arena, RemoteArena)
        for key, place in zip(keys, lease.offsets.tolist(), strict=False):
            assert client.arena.as_numpy()[place : place + SIZE].tobytes() == make_block(key, SIZE)
        assert len(client.claim(keys[:1]).offsets) == 0
        client.release([lease], remove=True)
        assert used(client) == 0 and client.lookup(keys[:1]) == 0
        put(client, keys[:2])
        with pytest.raises(RetryLater):
            client.claim(keys)
        assert client.release([client.claim(keys[:3])]) == 1


def test_tensors_pass_between_hosts(far: FarDaemon) -> None:
    tensors = [np.arange(count, dtype=np.float32).reshape(-1, 7) for count in (7, 7_000, 700_000)]
    with Pipe("far", far.endpoint, timeout_s=PATIENCE_S) as receiver:
        sender = Pipe("far", far.endpoint, timeout_s=PATIENCE_S)

        def send() -> None:
            for tensor in tensors:
                sender.send_tensor(tensor)
            sender.close(PATIENCE_S)

        sending = threading.Thread(target=send)
        sending.start()
        for tensor in tensors:
            assert np.array_equal(receiver.recv_tensor(PATIENCE_S), tensor)
        with pytest.raises(EndOfPipe):
            receiver.recv_tensor(PATIENCE_S)
        sending.join(PATIENCE_S)
    with LookupBuffer("far", far.endpoint, timeout_s=PATIENCE_S) as buffer:
        tokens, roi = np.arange(10), np.ones(10, dtype=bool)
        assert buffer.insert(tokens, roi, *tensors).wait(PATIENCE_S).stored == 1
        entry = buffer.drop_select(tokens, roi)
        assert all(np.array_equal(got, tensor) for got, tensor in zip(entry[-3:], tensors, strict=True))
