"""Clients that are killed at the worst moments: what they held comes back, and nobody sees half a block."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Iterator

import pytest

from kvstore.testing import make_block
from tests.crash.conftest import ACTOR, NAMESPACE
from tests.support import PATIENCE_S, Daemon, child, eventually, line_of

pytestmark = pytest.mark.crash
SIZE = NAMESPACE.block_bytes
KILLS = 12


@contextlib.contextmanager
def actor(daemon: Daemon, group: str = "") -> Iterator[subprocess.Popen[str]]:
    with child(ACTOR, daemon.endpoint, group) as process:
        assert line_of(process) == "attached"
        yield process


def tell(process: subprocess.Popen[str], order: str) -> None:
    assert process.stdin is not None
    process.stdin.write(order + "\n")
    process.stdin.flush()


def ask(process: subprocess.Popen[str], order: str) -> str:
    tell(process, order)
    return line_of(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)


def test_what_a_killed_client_held_comes_back(daemon: Daemon) -> None:
    with actor(daemon) as one:
        assert ask(one, "put a b") == "2 0"
        assert ask(one, "acquire a b") == "2" and ask(one, "reserve 5") == "5"
        assert ask(one, "half 3") == "done" and ask(one, "view a") == "done"
        tree = daemon.stats()
        assert (tree["pins"], tree["reserved_slots"]) == (3, 8)
        kill(one)
    daemon.check_nothing_held()
    with daemon.connect(NAMESPACE) as client, client.select([b"a", b"b"], timeout_s=0) as found:
        assert [bytes(view) for view in found] == [make_block(b"a", SIZE), make_block(b"b", SIZE)]


def test_a_stopped_client_keeps_what_it_holds(daemon: Daemon) -> None:
    """Time alone takes nothing away: it may go on at any moment, and look at what it was given."""
    with actor(daemon) as one:
        ask(one, "put a")
        ask(one, "view a")
        one.send_signal(signal.SIGSTOP)
        with daemon.connect(NAMESPACE) as client:
            # Everything that may leave leaves, several times over.
            for turn in range(5):
                names = [b"%d/%d" % (turn, index) for index in range(60)]
                client.insert(names, [make_block(name, SIZE) for name in names]).wait(PATIENCE_S)
            client.flush()
        assert daemon.stats()["pins"] == 1
        one.send_signal(signal.SIGCONT)
        assert ask(one, "check a") == "right"


def test_a_winner_that_is_killed_in_its_with_block_loses_nothing(daemon: Daemon) -> None:
    """Each time the next of those who wait gets the blocks, until one of them confirms."""
    with contextlib.ExitStack() as stack, daemon.connect(NAMESPACE) as client:
        actors = [stack.enter_context(actor(daemon)) for _ in range(4)]
        assert ask(actors[0], "take") == ""
        client.insert([b"a", b"b"], [make_block(b"a", SIZE), make_block(b"b", SIZE)]).wait(PATIENCE_S)
        for turn, one in enumerate(actors):
            if turn:
                # It waits already while the one before still has them.
                tell(one, "take a b")
                eventually(lambda: daemon.stats()["waiters"] == 1)
                kill(actors[turn - 1])
                assert line_of(one) == "right right"
            else:
                assert ask(one, "take a b") == "right right"
            assert daemon.stats()["waiters"] == 0 and client.lookup([b"a", b"b"]) == 2
        assert ask(actors[-1], "confirm") == "done"
        assert client.lookup([b"a", b"b"]) == 0


def test_a_client_that_is_killed_while_it_waits_gets_no_lease(daemon: Daemon) -> None:
    with actor(daemon) as one, daemon.connect(NAMESPACE) as client:
        tell(one, "take a")
        eventually(lambda: daemon.stats()["waiters"] == 1)
        kill(one)
        client.insert([b"a"], [make_block(b"a", SIZE)]).wait(PATIENCE_S)
        eventually(lambda: daemon.stats()["waiters"] == 0)
        tree = daemon.stats()
        assert not tree["pins"] and not tree["leases"]
        with client.drop_select([b"a"], timeout_s=PATIENCE_S) as found:
            assert len(found) == 1


def test_of_an_engine_whose_scheduler_is_killed_the_slots_stay_until_its_worker_is_gone(daemon: Daemon) -> None:
    with actor(daemon, "engine") as worker:
        with actor(daemon, "engine") as scheduler:
            assert ask(scheduler, "put a") == "1 0"
            assert ask(scheduler, "acquire a") == "1" and ask(scheduler, "reserve 4") == "4"
            kill(scheduler)
        eventually(lambda: [each["state"] for each in daemon.stats()["sessions"]].count("lingering") == 1)
        tree = daemon.stats()
        assert (tree["pins"], tree["reserved_slots"]) == (1, 4)
        # The worker goes on as before.
        assert ask(worker, "put b") == "1 0" and ask(worker, "acquire a b") == "2"
        kill(worker)
    daemon.check_nothing_held()


def test_clients_that_are_killed_in_the_middle_of_an_insert_leave_whole_blocks_only(daemon: Daemon) -> None:
    """At a moment that nobody chose, many times over."""
    chance = random.Random(11)
    with daemon.connect(NAMESPACE) as client:
        for turn in range(KILLS):
            names = [f"{turn}/{index}" for index in range(24)]
            with actor(daemon) as one:
                tell(one, "insert " + " ".join(names))
                # After as many blocks as chance says were seen, if it gets that far before the reply.
                wanted = [name.encode() for name in names[: chance.randrange(1, 24)]]
                if chance.random() < 0.7:
                    eventually(lambda wanted=wanted: client.lookup(wanted) == len(wanted))  # type: ignore[misc]
                kill(one)
            eventually(lambda: not daemon.stats()["reserved_slots"], "slots come back")
            keys = [name.encode() for name in names]
            with client.select(keys, timeout_s=0) as found:
                for key, view in zip(keys, found, strict=False):
                    assert bytes(view) == make_block(key, SIZE), "half a block was seen"
            client.flush()
