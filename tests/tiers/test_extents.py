"""Places on the disk that clients read by themselves: pinned, checked, given back with the session."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

import kvstore
from kvstore.endpoint import parse_endpoint
from kvstore.errors import Damage
from kvstore.extents import Extents
from kvstore.leases import LeaseTable
from kvstore.testing import FakeClock, make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, load, name_of, store
from kvstore.tier import KEY_PREFIX_BYTES, Held, ReadOutcome, TierState, WriteOutcome
from kvstore.tiers.striped import StripedTier
from kvstore.wire.channel import open_channel
from kvstore.wire.v1 import engine_pb2, engine_pb2_grpc
from tests.disk.media import CAPACITY_BYTES, SickIO, opened
from tests.tiers.test_service import BLOCK, NAMESPACE, Daemon, until

KEYS = [name_of(number) for number in range(48)]
NAMES = [bytes([number]) * 16 for number in range(12)]


def bytes_at(held: Held) -> bytes:
    with open(held.path, "rb") as file:
        file.seek(held.offset)
        return file.read(held.size_bytes)


# -- the tier ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["striped", "chain"])
async def test_who_is_gone_while_one_of_two_disks_answers_holds_nothing(tmp_path: Path, how: str) -> None:
    """What the other one has pinned by then goes back: its extents could never be used again."""
    io = SickIO()
    async with opened(tmp_path / "a", prewrite=False) as well, opened(tmp_path / "b", prewrite=False, io=io) as slow:
        for number, tier in enumerate((well, slow)):
            tier.name = f"disk{number}"
            await store(tier, KEYS if how == "striped" else KEYS[24 * number : 24 * number + 24])
        io.held.add("preadv")
        if how == "striped":
            asking = asyncio.ensure_future(StripedTier("disk", [well, slow]).hold(KEYS, 60))
        else:
            prefix = KEYS[0][:KEY_PREFIX_BYTES]

            async def own(_keyspace: object, keys: list[bytes]) -> set[bytes]:
                return set(keys)

            extents = Extents(SimpleNamespace(own=own, tiers=[well, slow]), LeaseTable(FakeClock()))  # type: ignore[arg-type]
            keyspace = SimpleNamespace(prefix=prefix, block_bytes=BLOCK_BYTES)
            session = LeaseTable(FakeClock()).attach("test", 1, "", 0)
            keys = [key[len(prefix) :] for key in KEYS]
            asking = asyncio.ensure_future(extents.lease(session, keyspace, keys, 0))  # type: ignore[arg-type]
        assert await asyncio.to_thread(io.reached.wait, 60)
        while not well.stats()["held_blocks"] or well.stats()["read_queue"]:
            await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        io.recover()
        async with asyncio.timeout(60):
            while well.stats()["held_blocks"] or slow.stats()["held_blocks"]:
                await asyncio.sleep(0.001)


async def test_what_is_held_stays_whatever_becomes_of_the_block(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        first, absent, second = await tier.hold([KEYS[0], name_of(99), KEYS[1]], 60)
        assert first is not None and second is not None and absent is None
        assert tier.stats()["held_blocks"] == 2
        await tier.delete(KEYS[:1])
        for number in range(1000, 2000, 50):  # over and over: everything else goes
            await store(tier, [name_of(each) for each in range(number, number + 50)])
        assert KEYS[1] not in tier.books.index
        for key, held in ((KEYS[0], first), (KEYS[1], second)):
            assert bytes_at(held) == make_block(key, BLOCK_BYTES)
        free = sum(len(slab.ready) for slab in tier.books.slabs.values())
        tier.let_go(first)
        tier.let_go(second)
        assert sum(len(slab.ready) for slab in tier.books.slabs.values()) == free + 2
        assert tier.stats()["held_blocks"] == 0


async def test_a_slab_waits_for_those_that_read_in_it(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        (held,) = await tier.hold(KEYS[:1], 60)
        assert held is not None and tier.room is not None
        slab = tier.books.index[KEYS[0]].slab
        await tier.room.give_up(slab)
        await tier.room.remove_leaving()
        assert bytes_at(held) == make_block(KEYS[0], BLOCK_BYTES)
        tier.let_go(held)
        await tier.room.remove_leaving()
        assert not Path(held.path).exists()


async def test_a_footer_that_is_not_right_is_not_held(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        await store(tier, KEYS)
        entry = tier.books.index[KEYS[5]]
        path = tier.folder.slab_path(entry.slab.number, entry.slab.extent_bytes)
        with path.open("r+b") as file:
            file.seek((entry.extent + 1) * entry.slab.extent_bytes - 200)
            file.write(b"\0" * 8)
        places = await tier.hold(KEYS[4:7], 60)
        assert [held is not None for held in places] == [True, False, True]
        assert tier.stats()["damaged"] == 1 and KEYS[5] not in tier.books.index
        assert await load(tier, KEYS[4:7]) == [ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.OK]


async def test_a_medium_that_hangs_holds_nothing(tmp_path: Path) -> None:
    io = SickIO()
    async with opened(tmp_path, io=io, prewrite=False) as tier:
        await store(tier, KEYS)
        io.held.add("preadv")
        assert await tier.hold(KEYS, 0.01) == [None] * 48
        assert tier.state is TierState.FAILED
        io.recover()
        while tier.stats()["held_blocks"]:
            await asyncio.sleep(0.001)


async def test_who_gives_up_waiting_holds_nothing(tmp_path: Path) -> None:
    io = SickIO()
    async with opened(tmp_path, io=io, prewrite=False) as tier:
        await store(tier, KEYS)
        io.held.add("preadv")
        holding = asyncio.ensure_future(tier.hold(KEYS, 60))
        while not io.reached.is_set():
            await asyncio.sleep(0.001)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        io.recover()
        while tier.stats()["held_blocks"]:
            await asyncio.sleep(0.001)


async def test_several_devices_hold_as_one(tmp_path: Path) -> None:
    async with (
        opened(tmp_path / "a", CAPACITY_BYTES) as one,
        opened(tmp_path / "b", CAPACITY_BYTES) as other,
    ):
        striped = StripedTier("disk", [one, other])
        assert set(await store(striped, KEYS)) == {WriteOutcome.STORED}
        places = await striped.hold(KEYS, 60)
        for key, held in zip(KEYS, places, strict=True):
            assert held is not None and bytes_at(held) == make_block(key, BLOCK_BYTES)
            striped.let_go(held)
        assert one.stats()["held_blocks"] == other.stats()["held_blocks"] == 0


# -- over the wire -----------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.stop(signal.SIGTERM)


def filled(daemon: Daemon, client: kvstore.Client) -> None:
    client.insert(NAMES, [make_block(name, BLOCK) for name in NAMES]).wait()
    until(lambda: daemon.blocks_on_disk() == len(NAMES), "copied down")


def held_blocks(daemon: Daemon) -> int:
    return int(daemon.tier("disk")["held_blocks"])


def test_a_client_reads_blocks_from_the_disk_by_itself(daemon: Daemon) -> None:
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        filled(daemon, client)
        asked = [NAMES[7], b"nowhere", NAMES[2], NAMES[3]]
        with client.lease_extents(asked) as extents:
            assert list(extents) == [NAMES[7], NAMES[2], NAMES[3]] and held_blocks(daemon) == 3
            page = mmap.mmap(-1, BLOCK)
            for name, extent in extents.items():
                fd = os.open(extent.path, os.O_RDONLY | os.O_DIRECT)
                assert extent.offset % 4096 == 0 and os.preadv(fd, [page], extent.offset) == BLOCK
                os.close(fd)
                assert extent.matches(memoryview(page)) and page[:] == make_block(name, BLOCK)
                buffer = memoryview(bytearray(BLOCK))
                extent.read_into(buffer)
                assert buffer == make_block(name, BLOCK)
            client.delete(asked)
            extents[NAMES[2]].read_into(buffer)  # its place is kept
            assert client.lookup(asked[:1]) == 0
            with client.lease_extents(asked) as none:
                assert none == {}
            with open(extents[NAMES[3]].path, "r+b") as file:
                file.seek(extents[NAMES[3]].offset + random.Random(1).randrange(BLOCK))
                file.write(b"!")
            with pytest.raises(Damage):
                extents[NAMES[3]].read_into(buffer)
        assert held_blocks(daemon) == 0


def test_a_lease_may_be_on_the_disk_in_part(daemon: Daemon) -> None:
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        filled(daemon, client)
    daemon.stop(signal.SIGTERM)
    daemon.start()
    until(lambda: daemon.blocks_on_disk() == len(NAMES), "the index is read")
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        with client.select(NAMES[:2], timeout_s=60) as found:
            assert len(found) == 2  # these are in the pool now
        (lease,) = client.acquire([(0, [*NAMES, b"nowhere"])], extents_min=[10])
        assert (len(lease.offsets), len(lease.extents), lease.pending) == (2, 10, 0) and held_blocks(daemon) >= 10
        buffer = memoryview(bytearray(BLOCK))
        for name, extent in zip(NAMES[2:], lease.extents, strict=True):
            extent.read_into(buffer)
            assert buffer == make_block(name, BLOCK)
        assert client.release([lease]) == 2 and held_blocks(daemon) == 0
        assert client.lookup(NAMES) == len(NAMES) and daemon.stats()["hits"]["extents"] == 10
        # Too few for it: they come up.
        (lease,) = client.acquire([(0, NAMES)], extents_min=[11])
        assert len(lease.offsets) == 2 and not lease.extents and lease.pending
        client.release([lease])


def test_leases_end_with_the_session_that_holds_them(daemon: Daemon) -> None:
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        filled(daemon, client)
        program = f"""
import sys, time, kvstore
namespace = kvstore.Namespace(model="m", dtype="bf16", block_size=16, block_bytes={BLOCK})
client = kvstore.connect({daemon.endpoint!r}, namespace=namespace)
lease = client.lease_extents({NAMES!r})
print(len(lease.__enter__()), flush=True)
sys.stdin.read()
"""
        reader = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(kvstore.__file__).parents[1])},
        )
        with reader:
            assert reader.stdout is not None and reader.stdout.readline() == b"12\n"
            assert held_blocks(daemon) == 12
            reader.kill()
        until(lambda: held_blocks(daemon) == 0, "given back")


def test_a_client_without_the_mapping_is_told_that_it_cannot(daemon: Daemon) -> None:
    with open_channel(parse_endpoint(daemon.endpoint), None) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        stream = stub.Attach(engine_pb2.AttachRequest(client_name="stranger", pid=1))
        session = next(stream).welcome.session
        opened = stub.OpenNamespace(
            engine_pb2.OpenNamespaceRequest(
                session=session, text=NAMESPACE.identity(), group_bytes=NAMESPACE.group_bytes
            ),
            timeout=60,
        )
        request = engine_pb2.LeaseExtentsRequest(session=session, namespace=opened.digest, keys=NAMES)
        with pytest.raises(grpc.RpcError, match="on this host only"):
            stub.LeaseExtents(request, timeout=60)
        stream.cancel()
