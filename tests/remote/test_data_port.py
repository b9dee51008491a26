"""The data port as a stranger sees it, and what happens to transfers whose slots are taken away."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

import kvstore
from kvstore import data_port
from kvstore.data_wire import (
    BODY_BYTES_MAX,
    HELLO,
    MAGIC,
    REQUEST_HEAD_BYTES,
    SLOTS_MAX,
    Lost,
    Operation,
    Status,
)
from kvstore.errors import InvalidRequest
from kvstore.remote import RemoteArena
from kvstore.testing import make_block
from tests.remote.conftest import SIZE, FarDaemon, RawLine, names, put
from tests.support import PATIENCE_S, child, eventually, line_of

Raw = Callable[[kvstore.Client], RawLine]
LARGE = kvstore.Namespace(model="large", dtype="x", block_size=1, block_bytes=16 << 20)


def closed(line: RawLine) -> bool:
    """The daemon ends the connection."""
    try:
        line.stream.receive(1)
    except Lost:
        return True
    return False


def leased(client: kvstore.Client, keys: list[bytes]) -> kvstore.Lease:
    """A lease over slots of the pool."""
    (lease,) = client.acquire([(0, keys)])
    assert len(lease.offsets) == len(keys)
    return lease


# -- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8,
        bytes(1000),
        b"\xff" * 1000,
        MAGIC + b"\x01" * (REQUEST_HEAD_BYTES - 4),
        MAGIC + b"\x09\0\0\0" + (1).to_bytes(4, "little") + bytes(200),
        MAGIC + b"\x01\0\0\0" + (SLOTS_MAX + 1).to_bytes(4, "little") + bytes(200),
        MAGIC + b"\x01\0\0\0" + (1).to_bytes(4, "little") + (BODY_BYTES_MAX + 1).to_bytes(4, "little") + bytes(200),
    ],
)
def test_garbage_ends_the_connection_and_is_counted(far: FarDaemon, garbage: bytes) -> None:
    before = far.data()["events"]["garbage"]
    with socket.create_connection(("127.0.0.1", far.data_port), PATIENCE_S) as stranger:
        assert stranger.recv(HELLO.size, socket.MSG_WAITALL)[:4] == MAGIC
        with contextlib.suppress(OSError):
            stranger.sendall(garbage)
        with contextlib.suppress(OSError):
            while stranger.recv(4096):
                pass
    eventually(lambda: far.data()["events"]["garbage"] > before, "it is counted")
    eventually(lambda: far.data()["connections"] == 0, "nothing is left of it")


def test_a_request_needs_the_secret_of_its_session(far: FarDaemon, raw: Raw) -> None:
    with far.connect() as client, far.connect() as other:
        put(client, names(1))
        with far.connect(staging_bytes=0, group="g") as reader, far.connect(None, group="g") as worker:
            lease = leased(reader, names(1))
            assert isinstance(other.arena, RemoteArena)
            for secret in (bytes(32), other.arena._who.secret):
                line = raw(worker)
                line.ask(line.request(Operation.READ, lease.offsets, lease.epochs), secret)
                assert line.stream.receive_reply()[0] is Status.STALE
                assert closed(line)
            line = raw(worker)
            line.ask(line.request(Operation.READ, lease.offsets, lease.epochs, session=bytes(16)))
            assert line.stream.receive_reply()[0] is Status.STALE and closed(line)
            reader.release([lease])


def test_a_request_is_good_once_and_for_one_connection(far: FarDaemon, raw: Raw) -> None:
    with far.connect() as client:
        put(client, names(1))
        with far.connect(staging_bytes=0, group="g") as reader, far.connect(None, group="g") as worker:
            lease = leased(reader, names(1))
            line, other = raw(worker), raw(worker)
            packed = line.request(Operation.READ, lease.offsets, lease.epochs).pack(line.who.secret, line.nonce, 0)
            line.stream.send(packed)
            assert line.stream.receive_reply()[0] is Status.OK
            assert line.stream.receive(SIZE) == make_block(b"k0", SIZE)
            line.stream.send(packed)
            assert line.stream.receive_reply()[0] is Status.STALE
            other.stream.send(packed)
            assert other.stream.receive_reply()[0] is Status.STALE
            reader.release([lease])


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"generation": bytes(16)}, Status.STALE),
        ({"length": SIZE + 1}, Status.REFUSED),
        ({"first": 1}, Status.REFUSED),
        ({"first": 1 << 63, "length": 1 << 63}, Status.REFUSED),
        ({"epochs": [0]}, Status.STALE),
        ({"offsets": [1 << 60]}, Status.STALE),
        ({"offsets": [1]}, Status.STALE),
    ],
)
@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_what_is_not_held_does_not_travel(
    far: FarDaemon, raw: Raw, operation: Operation, changes: dict[str, object], status: Status
) -> None:
    with far.connect() as client:
        put(client, names(1))
        with far.connect(staging_bytes=0, group="g") as engine, far.connect(None, group="g") as worker:
            lease, slots = leased(engine, names(1)), engine.reserve(1)
            line = raw(worker)
            held = lease if operation is Operation.READ else slots
            line.ask(line.request(Operation.CHECK, lease.offsets, lease.epochs))
            assert line.stream.receive_reply()[0] is Status.OK
            line.stream.receive(4)
            line.ask(line.request(operation, **{"offsets": held.offsets, "epochs": held.epochs, **changes}))
            assert line.stream.receive_reply()[0] is status
            other = slots if operation is Operation.READ else lease
            line.ask(line.request(operation, other.offsets, other.epochs))
            assert line.stream.receive_reply()[0] is Status.STALE
            # The connection goes on.
            line.ask(line.request(Operation.READ, lease.offsets, lease.epochs))
            assert line.stream.receive_reply()[0] is Status.OK
            assert line.stream.receive(SIZE) == make_block(b"k0", SIZE)
            engine.release([lease])


def test_connections_have_a_ceiling(far: FarDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = [
        socket.create_connection(("127.0.0.1", far.data_port), PATIENCE_S) for _ in range(data_port.CONNECTIONS_MAX + 3)
    ]
    try:
        greeted = [stranger.recv(HELLO.size, socket.MSG_WAITALL) != b"" for stranger in strangers]
        assert greeted.count(False) == 3
        assert far.data()["events"]["over_limit"] >= 3
    finally:
        for stranger in strangers:
            stranger.close()
    with far.connect() as client:
        eventually(lambda: far.data()["connections"] == 0, "their places are free")
        put(client, names(1))


# -- blocks by their keys --------------------------------------------------------------------------------------------


def selected(line: RawLine, keys: list[bytes], **options: object) -> tuple[list[int], list[int]]:
    """Where the daemon says that they are; their bytes are still to come."""
    line.ask(line.select(keys, **options))  # type: ignore[arg-type]
    assert line.stream.receive_reply()[0] is Status.OK
    return line.stream.receive_slots(len(keys))


def test_a_select_pins_until_it_is_checked(far: FarDaemon, raw: Raw) -> None:
    keys = names(3)
    with far.connect() as client:
        put(client, keys)
        line, other = raw(client), raw(client)
        offsets, epochs = selected(line, [*keys, b"absent", *keys], room=2)
        assert len(offsets) == 3
        # As many as there is room for came with the answer; the third one may be read, on any connection.
        assert line.stream.receive(2 * SIZE) == b"".join(make_block(key, SIZE) for key in keys[:2])
        other.ask(other.request(Operation.READ, offsets[2:], epochs[2:]))
        assert other.stream.receive_reply()[0] is Status.OK
        assert other.stream.receive(SIZE) == make_block(keys[2], SIZE)
        assert far.stats()["pins"] == 3
        line.ask(line.request(Operation.CHECK, offsets, epochs))
        assert line.stream.receive_reply()[0] is Status.OK
        assert np.frombuffer(line.stream.receive(12), "<u4").tolist() == epochs
        assert far.stats()["pins"] == 0
        other.ask(other.request(Operation.READ, offsets, epochs))
        assert other.stream.receive_reply()[0] is Status.STALE


def test_a_select_ends_with_the_next_one_and_with_its_connection(far: FarDaemon, raw: Raw) -> None:
    keys = names(3)
    with far.connect() as client:
        put(client, keys)
        line = raw(client)
        selected(line, keys, room=0)
        assert far.stats()["pins"] == 3
        selected(line, keys[:1], room=0)
        assert far.stats()["pins"] == 1
        line.stream.close()
        eventually(lambda: far.stats()["pins"] == 0, "nothing is pinned for a connection that is gone")


def test_a_run_that_is_not_whole_may_be_left(far: FarDaemon, raw: Raw) -> None:
    keys = names(3)
    with far.connect() as client:
        put(client, keys[:2])
        before = far.stats()["misses"]
        line = raw(client)
        assert selected(line, keys, whole=True) == ([], [])
        assert far.stats()["pins"] == 0 and far.stats()["misses"] == before
        offsets, _ = selected(line, keys, room=0)
        assert len(offsets) == 2
        assert far.stats()["misses"]["absent"] == before.get("absent", 0) + 1


def test_a_session_that_ended_under_a_select_checks_nothing(far: FarDaemon, raw: Raw) -> None:
    """Its pins are gone, so its slots may hold anything from then on."""
    with far.connect(LARGE) as client, far.connect(LARGE) as other:
        put(client, [b"asked"], LARGE.block_bytes)
        line = raw(client)
        line.ask(line.select([b"asked"], namespace=LARGE.digest(), length=LARGE.block_bytes))
        assert line.stream.receive_reply()[0] is Status.OK
        offsets, epochs = line.stream.receive_slots(1)
        half = LARGE.block_bytes // 2
        first = line.stream.receive(half)
        client.close()
        eventually(lambda: far.stats()["pins"] == 0, "the session has ended")
        other.delete([b"asked"])
        put(other, [b"other"], LARGE.block_bytes)
        rest = line.stream.receive(half)
        assert first == make_block(b"asked", LARGE.block_bytes)[:half] and len(rest) == half
        line.ask(line.request(Operation.CHECK, offsets, epochs))
        assert line.stream.receive_reply()[0] is Status.STALE


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"generation": bytes(16)}, Status.STALE),
        ({"session": bytes(16)}, Status.STALE),
        ({"namespace": bytes(16)}, Status.REFUSED),
        ({"group": 1}, Status.REFUSED),
        ({"length": SIZE + 1}, Status.REFUSED),
        ({"length": SIZE - 1}, Status.REFUSED),
    ],
)
def test_a_select_of_what_is_not_there_pins_nothing(
    far: FarDaemon, raw: Raw, changes: dict[str, object], status: Status
) -> None:
    with far.connect() as client:
        put(client, names(1))
        line = raw(client)
        selected(line, [b"absent"])
        line.ask(line.select(names(1), **changes))  # type: ignore[arg-type]
        assert line.stream.receive_reply()[0] is status
        assert far.stats()["pins"] == 0
        # The connection goes on.
        assert len(selected(line, names(1))[0]) == 1
        assert line.stream.receive(SIZE) == make_block(b"k0", SIZE)


def test_a_select_is_good_once_and_with_the_secret_of_its_session(far: FarDaemon, raw: Raw) -> None:
    with far.connect() as client, far.connect() as stranger:
        put(client, names(1))
        assert isinstance(stranger.arena, RemoteArena)
        line = raw(client)
        line.ask(line.select(names(1)), stranger.arena._who.secret)
        assert line.stream.receive_reply()[0] is Status.STALE and closed(line)
        line = raw(client)
        packed = line.select(names(1), room=0).pack(line.who.secret, line.nonce, 0)
        for status in (Status.OK, Status.STALE):
            line.stream.send(packed)
            assert line.stream.receive_reply()[0] is status
            if status is Status.OK:
                assert len(line.stream.receive_slots(1)[0]) == 1


# -- reads whose lease ends ------------------------------------------------------------------------------------------


def test_a_slot_that_changes_hands_under_a_reader_is_told(far: FarDaemon, raw: Raw) -> None:
    """Half of a block was read when the lease ended and its slot went to another block."""
    with far.connect(LARGE) as client, far.connect(LARGE, staging_bytes=0, group="g") as engine:
        with far.connect(None, group="g") as worker:
            put(client, [b"asked"], LARGE.block_bytes)
            lease = leased(engine, [b"asked"])
            line = raw(worker)
            line.ask(line.request(Operation.READ, lease.offsets, lease.epochs, LARGE.block_bytes))
            assert line.stream.receive_reply()[0] is Status.OK
            half = LARGE.block_bytes // 2
            first = line.stream.receive(half)
            assert first == make_block(b"asked", LARGE.block_bytes)[:half]
            engine.release([lease])
            client.delete([b"asked"])
            put(client, [b"other"], LARGE.block_bytes)  # of one size, and so into the slot that is free now
            rest = line.stream.receive(half)
            line.ask(line.request(Operation.CHECK, lease.offsets, lease.epochs))
            assert line.stream.receive_reply()[0] is Status.OK
            now = np.frombuffer(line.stream.receive(4), "<u4")
            whole = first + rest == make_block(b"asked", LARGE.block_bytes)
            assert whole or now[0] != lease.epochs[0], "other bytes under the asked epoch"
            assert now[0] != lease.epochs[0]


def test_a_run_ends_before_the_first_block_that_changed(far: FarDaemon) -> None:
    with far.connect() as client, far.connect(staging_bytes=0, group="g") as engine:
        with far.connect(None, group="g") as worker:
            put(client, names(4))
            lease = leased(engine, names(4))
            wrong = lease.epochs.copy()
            rooms = [memoryview(bytearray(SIZE)) for _ in names(4)]
            assert isinstance(worker.arena, RemoteArena)
            assert worker.arena.receive(lease.offsets, wrong, rooms) == 4
            engine.release([lease])


# -- writes whose reservation ends -----------------------------------------------------------------------------------


def begin_write(line: RawLine, slots: kvstore.Reservation, size: int) -> None:
    line.ask(line.request(Operation.WRITE, slots.offsets, slots.epochs, size))
    assert line.stream.receive_reply()[0] is Status.GO


def test_a_slot_that_bytes_arrive_in_goes_to_nobody_else(far: FarDaemon, raw: Raw) -> None:
    with far.connect(LARGE) as client, far.connect(LARGE, staging_bytes=0, group="g") as engine:
        with far.connect(None, group="g") as worker:
            slots = engine.reserve(1)
            line = raw(worker)
            begin_write(line, slots, LARGE.block_bytes)
            line.stream.send(bytes(1000))
            # Half-filled slots are not published, and given back ones are not handed out.
            assert engine.commit(slots.generation, slots.offsets, [b"half"], epochs=slots.epochs).tolist() == [3]
            assert engine.abort(slots.generation, slots.offsets, slots.epochs) == 1
            others = client.reserve(100)
            taken = engine.reserve(100)
            offsets = set(taken.offsets.tolist())
            assert int(slots.offsets[0]) not in offsets
            line.stream.send(b"\xee" * (LARGE.block_bytes - 1000))
            assert line.stream.receive_reply()[0] is Status.OK
            assert engine.reserve(1).offsets.tolist() == slots.offsets.tolist()
            client.abort(others.generation, others.offsets, others.epochs)


def test_a_commit_of_what_was_never_sent_is_refused(far: FarDaemon, raw: Raw) -> None:
    keys = names(2, "faulty")
    with far.connect() as faulty, far.connect() as other:
        slots, _ = faulty.reserve_slots(2, 0, 0.0, (), None)
        line = raw(faulty)
        line.ask(line.request(Operation.WRITE, slots.offsets[:1], slots.epochs[:1], SIZE // 2))
        assert line.stream.receive_reply()[0] is Status.GO
        line.stream.send(bytes(SIZE // 2))
        assert line.stream.receive_reply()[0] is Status.OK
        for some in (slice(0, 2), slice(0, 1), slice(1, 2)):
            with pytest.raises(InvalidRequest, match="have not all arrived over the data port"):
                faulty.commit_slots(slots.generation, slots.offsets[some], slots.epochs[some], keys[some], 0, None)
            assert other.lookup(keys) == other.lookup(keys[1:]) == 0
        # Half of it was sent before; with the rest it is a block.
        line.ask(line.request(Operation.WRITE, slots.offsets[:1], slots.epochs[:1], SIZE // 2, first=SIZE // 2))
        assert line.stream.receive_reply()[0] is Status.GO
        line.stream.send(bytes(SIZE // 2))
        assert line.stream.receive_reply()[0] is Status.OK
        assert faulty.commit_slots(slots.generation, slots.offsets[:1], slots.epochs[:1], keys[:1], 0, None) == [1]
        assert other.lookup(keys) == 1


def test_a_writer_that_dies_gives_its_slot_back(far: FarDaemon, raw: Raw) -> None:
    with far.connect(LARGE, staging_bytes=0, group="g") as engine, far.connect(None, group="g") as worker:
        slots = engine.reserve(100)
        line = raw(worker)
        one = kvstore.Reservation(
            slots.generation, slots.offsets[:1], slots.epochs[:1], None, slots.exists, slots.request_id
        )
        begin_write(line, one, LARGE.block_bytes)
        line.stream.send(bytes(1000))
        engine.abort(slots.generation, slots.offsets, slots.epochs)
        assert len(engine.reserve(100).offsets) == len(slots.offsets) - 1
        line.stream.close()
        eventually(lambda: len(engine.reserve(1).offsets) == 1, "the slot is free")


def test_a_write_into_a_slot_that_was_given_back_is_refused(far: FarDaemon, raw: Raw) -> None:
    with far.connect(staging_bytes=0, group="g") as engine, far.connect(None, group="g") as worker:
        slots = engine.reserve(1)
        engine.abort(slots.generation, slots.offsets, slots.epochs)
        line = raw(worker)
        line.ask(line.request(Operation.WRITE, slots.offsets, slots.epochs))
        assert line.stream.receive_reply()[0] is Status.STALE


WRITER = """
import sys, threading, kvstore
from kvstore.data_wire import HELLO, Operation, Request, Stream
import socket
namespace = kvstore.Namespace(model="large", dtype="x", block_size=1, block_bytes=16 << 20)
engine = kvstore.connect(sys.argv[1], namespace, timeout_s=60, group="dies", staging_bytes=0)
worker = kvstore.connect(sys.argv[1], None, timeout_s=60, group="dies")
slots = engine.reserve(2)
who = worker.arena._who
stream = Stream(socket.create_connection(("127.0.0.1", int(sys.argv[2]))), 60)
_, nonce = HELLO.unpack(stream.receive(HELLO.size))
held = slots.offsets.tolist(), slots.epochs.tolist()
request = Request(Operation.WRITE, who.session, who.generation, 0, 16 << 20, *held)
stream.send(request.pack(who.secret, nonce, 0))
stream.receive_reply()
stream.send(bytes(5 << 20))
print("half", flush=True)
sys.stdin.read()
"""


def test_a_client_killed_in_the_middle_of_a_write(far: FarDaemon) -> None:
    with child(WRITER, far.endpoint, str(far.data_port)) as process:
        assert line_of(process) == "half"
        assert far.stats()["reserved_slots"] == 2
        process.kill()
        process.wait(PATIENCE_S)
    far.check_nothing_held()
    eventually(lambda: not far.stats()["tiers"][0]["segments"], "every slot is free")


# -- the loop --------------------------------------------------------------------------------------------------------


def test_transfers_do_not_hold_up_control(far: FarDaemon, raw: Raw) -> None:
    """Readers that do not read: their bytes wait in the daemon's threads, and calls are answered all the same."""
    with far.connect(LARGE) as client, far.connect(LARGE, staging_bytes=0, group="g") as engine:
        with far.connect(None, group="g") as worker:
            put(client, [b"slow"], LARGE.block_bytes)
            lease = leased(engine, [b"slow"])
            lines = [raw(worker) for _ in range(8)]
            for line in lines:
                line.ask(line.request(Operation.READ, lease.offsets, lease.epochs, LARGE.block_bytes))
            for line in lines:
                assert line.stream.receive_reply()[0] is Status.OK
            done = threading.Event()

            def control() -> None:
                for _ in range(50):
                    client.lookup([b"slow"])
                done.set()

            thread = threading.Thread(target=control)
            thread.start()
            assert done.wait(PATIENCE_S)
            thread.join()
            for line in lines:
                assert line.stream.receive(LARGE.block_bytes) == make_block(b"slow", LARGE.block_bytes)
            engine.release([lease])
