"""Daemons that ask each other.

The suite that every tier passes stores through the tier, which nothing does through a peer. What it says of reading and
removing is checked here, with two real daemons: what is there, what is not, other sizes, damage, neighbours of what is
missing, removal with and without the peer, and peers that hang, die, and come back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
import kvstore.admin
import kvstore.errors
from kvstore.congestion import LOSS_BASED
from kvstore.testing import make_block
from tests.remote.conftest import SIZE, FarDaemon, check, far_daemon, names, put
from tests.support import eventually

#: Far beyond what a busy machine needs.
PATIENT = ("--peer-deadline-s", "20")


def tier(daemon: FarDaemon, name: str = "peer") -> dict[str, Any]:
    (found,) = (tier for tier in daemon.stats()["tiers"] if tier["name"] == name)
    return dict(found)


def peer(daemon: FarDaemon) -> dict[str, Any]:
    (found,) = tier(daemon)["peers"]
    return dict(found)


@contextlib.contextmanager
def asking(store: FarDaemon, *flags: str, **options: Any) -> Iterator[FarDaemon]:
    """A daemon that has another one as its peer, and has attached to it."""
    with far_daemon("--peer", store.endpoint, *(flags or PATIENT), **options) as daemon:
        eventually(lambda: tier(daemon)["state"] == "ok", "it has attached to its peer")
        yield daemon


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FarDaemon, FarDaemon]]:
    """One that stores, and one that asks it."""
    with far_daemon() as store, asking(store) as asks:
        yield store, asks


@pytest.fixture
def clients(pair: tuple[FarDaemon, FarDaemon]) -> Iterator[tuple[kvstore.Client, kvstore.Client]]:
    store, asks = pair
    with store.connect() as there, asks.connect() as here:
        yield there, here
        here.flush()
        there.flush()


def test_what_one_daemon_stored_another_one_serves(
    pair: tuple[FarDaemon, FarDaemon], clients: tuple[kvstore.Client, kvstore.Client]
) -> None:
    store, asks = pair
    there, here = clients
    keys = names(300)
    put(there, keys)
    before = asks.stats()["hits"].get("peer", 0)
    assert here.lookup([*keys, b"nowhere"]) == 300
    check(here, keys)
    assert asks.stats()["hits"]["peer"] - before == 300
    assert peer(asks)["congestion"] in LOSS_BASED
    # From here on they are its own, and nobody is asked.
    asked = peer(asks)["asked"]
    check(here, keys)
    assert here.lookup(keys) == 300 and peer(asks)["asked"] == asked
    assert there.stats()["stores"]["stored"] >= 300 and store.stats()["pins"] == 0


def test_the_rest_of_a_prefix_comes_from_the_peer(clients: tuple[kvstore.Client, kvstore.Client]) -> None:
    there, here = clients
    keys = names(20, "part")
    put(there, keys[:15])
    put(here, keys[:5])
    assert here.lookup(keys) == 15
    with here.select(keys, timeout_s=0.05) as found:
        assert len(found) <= 15
    check(here, keys[:15])


def test_removal_reaches_the_peer(clients: tuple[kvstore.Client, kvstore.Client]) -> None:
    there, here = clients
    keys = names(9, "gone")
    put(there, keys)
    check(here, keys[:3])
    assert here.delete(keys[:2]) == 2
    assert there.lookup(keys[:1]) == 0 and there.lookup(keys[2:]) == 7 and here.lookup(keys[:1]) == 0
    with here.drop_select(keys[2:4], timeout_s=20) as found:
        assert len(found) == 2
    assert there.lookup(keys[2:3]) == here.lookup(keys[2:3]) == 0
    assert here.flush() == 5
    assert there.lookup(keys[4:]) == 0
    # And what is removed there is no promise of others.
    put(there, keys)
    check(here, keys[:1])
    there.flush()
    assert here.lookup(keys) == 1


def test_another_block_size_is_not_handed_over(
    pair: tuple[FarDaemon, FarDaemon],
) -> None:
    store, asks = pair
    fields = {"model": "sizes", "dtype": "x", "block_size": 1}
    with store.connect(kvstore.Namespace(**fields, block_bytes=SIZE)) as there:
        put(there, [b"a"])
        with asks.connect(kvstore.Namespace(**fields, block_bytes=SIZE // 2)) as here:
            assert here.lookup([b"a"]) == 0
            with here.select([b"a"], timeout_s=0) as found:
                assert len(found) == 0
        there.flush()


def test_the_peers_disk_is_asked_too(tmp_path: Path) -> None:
    keys = names(400, "disk")
    disk = ("--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "100MB")
    with far_daemon(*disk, cpu_bytes="16MiB") as store, asking(store) as asks:
        with store.connect() as there, asks.connect() as here:
            for start in range(0, 400, 50):
                put(there, keys[start : start + 50])
                eventually(lambda: not store.stats()["transfers"]["queued_bytes"], "copied")
            assert tier(store, "cpu")["blocks"] < 400
            check(here, keys)
            assert asks.stats()["hits"]["peer"] == 400


def test_a_block_that_is_damaged_at_the_peer_is_a_miss_and_costs_no_neighbour(tmp_path: Path) -> None:
    keys = names(10, "damage")
    disk = ("--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "100MB")
    with far_daemon(*disk) as store, asking(store) as asks:
        with store.connect() as there, asks.connect() as here:
            put(there, keys)
            eventually(lambda: not store.stats()["transfers"]["queued_bytes"], "copied")
            with store.admin() as admin:
                admin.evict(1 << 40)
            assert not tier(store, "cpu")["blocks"]
            wanted = make_block(keys[5], SIZE)
            for path in (tmp_path / "disk").rglob("*"):
                if path.is_file() and (at := path.read_bytes().find(wanted[:4096])) >= 0:
                    break
            else:
                raise AssertionError("the block is in none of the files")
            with path.open("r+b") as file:
                file.seek(at + SIZE // 2)
                file.write(bytes([wanted[SIZE // 2] ^ 1]))
                os.fsync(file.fileno())
            with here.select(keys[5:6], timeout_s=1) as found:
                assert len(found) == 0
            check(here, keys[:5])
            check(here, keys[6:])
            assert here.lookup(keys) == 5
            assert tier(asks)["state"] == "ok"


def test_what_came_from_a_peer_is_kept_like_anything_else(tmp_path: Path) -> None:
    keys = names(50, "keep")
    disk = ("--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "100MB")
    with far_daemon() as store, asking(store, *PATIENT, *disk) as asks:
        with store.connect() as there, asks.connect() as here:
            put(there, keys)
            check(here, keys)
            eventually(lambda: tier(asks, "disk")["blocks"] == 50, "copied down")
            there.flush()
            with asks.admin() as admin:
                admin.evict(1 << 40)
            check(here, keys)
            assert asks.stats()["hits"]["disk"] == 50


def test_mutual_peers_do_not_go_round_in_circles() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as one, tempfile.TemporaryDirectory(prefix="kv") as other:
        left, right = FarDaemon(Path(one), *PATIENT), FarDaemon(Path(other), *PATIENT)
        for daemon, its_peer in ((left, right), (right, left)):
            daemon._arguments += ["--peer", its_peer.endpoint]
            daemon.spawn()
        try:
            for daemon in (left, right):
                eventually(lambda daemon=daemon: _is_ok(daemon), "they have attached to each other")
            with left.connect() as on_left, right.connect() as on_right:
                put(on_left, names(30, "l"))
                put(on_right, names(30, "r"))
                check(on_left, names(30, "r"))
                check(on_right, names(30, "l"))
                asked = peer(left)["asked"], peer(right)["asked"]
                assert on_left.lookup(names(10, "nowhere")) == 0
                assert peer(left)["asked"] - asked[0] == 10
                assert peer(right)["asked"] == asked[1], "a question was passed on"
                assert on_left.flush() == 60
                assert on_right.lookup(names(30, "r")) == 0
            for daemon in (left, right):
                eventually(lambda daemon=daemon: daemon.stats()["pins"] == 0, "no pin is left")
        finally:
            for daemon in (left, right):
                daemon.kill()


def _is_ok(daemon: FarDaemon) -> bool:
    with contextlib.suppress(kvstore.errors.KVStoreError):
        return bool(tier(daemon)["state"] == "ok")
    return False


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_peer_that_dies_costs_misses_and_one_that_is_back_is_found() -> None:
    with far_daemon() as store, asking(store) as asks, asks.connect() as here:
        with store.connect() as there:
            put(there, names(10, "old"))
            check(here, names(5, "old"))
            store.kill()
            eventually(lambda: tier(asks)["state"] == "failed", "it is known to be gone")
            assert here.lookup(names(10, "old")) == 5
            put(here, names(10, "mine"))
            check(here, names(10, "mine"))
            before = there.generation
            store.start()  # another life, and empty
            eventually(lambda: tier(asks)["state"] == "ok", "it has attached again")
            assert here.lookup(names(10, "old")) == 5
            eventually(lambda: there.generation not in (before, None))
            put(there, names(10, "new"))
            check(here, names(10, "new"))


def test_what_was_removed_while_a_peer_was_away_does_not_come_back(tmp_path: Path) -> None:
    disk = ("--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "100MB")
    with far_daemon(*disk) as store, asking(store) as asks, asks.connect() as here:
        with store.connect() as there:
            put(there, names(10))
            check(here, names(10))
            eventually(
                lambda: tier(store, "disk")["blocks"] == 10 and not tier(store, "disk")["uncommitted"], "on disk"
            )
        assert store.stop() == 0
        eventually(lambda: tier(asks)["state"] == "failed")
        assert here.delete(names(4)) == 4
        store.start()
        eventually(lambda: tier(asks)["state"] == "ok" and not peer(asks)["owed"], "it has been told")
        eventually(lambda: tier(store, "disk")["blocks"] == 6, "they are gone there")
        assert here.lookup(names(1)) == 0
        here.flush()
        with store.connect() as there:
            assert there.lookup(names(10)[4:]) == 0


def test_a_peer_that_hangs_is_given_up_and_found_again() -> None:
    with far_daemon() as store, asking(store, "--peer-deadline-s", "0.5") as asks:
        with store.connect() as there, asks.connect() as here:
            put(there, names(10, "far"))
            put(here, names(10, "near"))
            store.signal(signal.SIGSTOP)
            try:
                asked = peer(asks)["asked"]
                check(here, names(10, "near"))
                assert here.lookup(names(10, "near")) == 10
                assert peer(asks)["asked"] == asked, "what is here was looked for elsewhere"
                for _ in range(3):
                    assert here.lookup(names(10, "far")) == 0
                assert tier(asks)["state"] == "failed" and peer(asks)["fault"]
                asked = peer(asks)["asked"]
                assert here.lookup(names(10, "far")) == 0
                assert peer(asks)["asked"] == asked, "it was asked although it was given up"
            finally:
                store.signal(signal.SIGCONT)
            eventually(lambda: tier(asks)["state"] == "ok", "it is found again")
            eventually(lambda: here.lookup(names(10, "far")) == 10)
            check(here, names(10, "far"))
            eventually(lambda: store.stats()["pins"] == 0, "what the lost answers took is back")


def test_one_of_two_peers_is_enough() -> None:
    with far_daemon() as first, far_daemon() as second:
        with far_daemon("--peer", first.endpoint, "--peer", second.endpoint, *PATIENT) as asks:
            eventually(lambda: tier(asks)["state"] == "ok")
            with first.connect() as one, second.connect() as two, asks.connect() as here:
                put(one, names(10))
                put(two, names(20))
                check(here, names(20))
                here.flush()
                put(two, names(20))
                first.kill()
                eventually(lambda: tier(asks)["state"] == "degraded")
                check(here, names(20))


def test_peers_call_each_other_with_token_and_tls(tmp_path: Path, certificates: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-many-letters-0123456789\n")
    ca, certificate, key = (str(certificates / name) for name in ("ca.pem", "end.pem", "end.key"))
    flags = ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", ca, "--tls-clients", "verified")
    flags += ("--token-file", str(tmp_path / "token"))
    tls = kvstore.Tls(ca, certificate, key)
    token = "a-token-of-many-letters-0123456789"
    with secured(*flags, tls=tls, token=token) as store:
        with secured(*flags, "--peer", store.endpoint, *PATIENT, tls=tls, token=token) as asks:
            with store.connect(token=token) as there, asks.connect(token=token) as here:
                eventually(lambda: here.stats()["tiers"][1]["state"] == "ok")
                put(there, names(30))
                check(here, names(30))


class Secured(FarDaemon):
    """One that asks for a token."""

    token = ""

    def admin(self) -> Any:
        return kvstore.admin.AdminClient(self.endpoint, self.token, timeout_s=60, tls=self.tls)


@contextlib.contextmanager
def secured(*flags: str, tls: kvstore.Tls, token: str) -> Iterator[FarDaemon]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        daemon = Secured(Path(folder), *flags, tls=tls)
        daemon.token = token
        try:
            daemon.start()
            yield daemon
        finally:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.kill()
