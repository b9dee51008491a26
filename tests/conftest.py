"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.testing import SteppedLoop
from tests.support import Daemon, running_daemon


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """One daemon of 64 MiB for the tests of a module that give back what they take."""
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def served(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The module's daemon, empty at first. Afterwards it must still run, and nobody may hold anything of it."""
    yield shared_daemon
    assert shared_daemon.process is not None and shared_daemon.process.poll() is None, shared_daemon.log.read_text()
    shared_daemon.check_nothing_held()
    with shared_daemon.admin() as admin:
        admin.flush(None)
        (tier,) = admin.stats()["tiers"]
        assert not tier["used_bytes"] and not tier["blocks"] and not tier["segments"]


@pytest.fixture
def stepped_loop() -> Iterator[SteppedLoop]:
    """A loop that a test moves by hand."""
    loop = SteppedLoop()
    yield loop
    loop.close()
