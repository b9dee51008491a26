"""Claims of engines, and `kvstore.drop_on_load` of the vLLM plugin, against a real daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine_plugin.vllm.coming import Query, Reply
from engine_plugin.vllm.link import DaemonLink
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.testing import make_block
from tests.support import PATIENCE_S, Daemon, eventually
from tests.wire.conftest import NAMESPACE

KEYS = [f"claimed{index}".encode() for index in range(8)]


@pytest.fixture
def client(served: Daemon) -> Iterator[Client]:
    with served.connect(NAMESPACE) as client:
        yield client


def put(client: Client) -> None:
    blocks = [make_block(key, NAMESPACE.block_bytes) for key in KEYS]
    assert client.insert(KEYS, blocks).wait(PATIENCE_S).stored == len(KEYS)


def test_a_claim_has_one_holder_and_ends_with_or_without_the_blocks(served: Daemon, client: Client) -> None:
    put(client)
    with served.connect(NAMESPACE) as other:
        mine = client.claim(KEYS)
        assert len(mine.offsets) == len(KEYS)
        assert other.claim(KEYS).id == 0
        assert client.release([mine]) == 1
        theirs = other.claim(KEYS)
        assert len(theirs.offsets) == len(KEYS)
        assert len(client.claim(KEYS[:3]).offsets) == 0
        other.release([theirs], remove=True)
        assert client.lookup(KEYS) == 0
        put(client)
        lease = client.acquire([(0, KEYS)])[0]
        with pytest.raises(InvalidRequest, match="ordinary reader"):
            client.release([lease], remove=True)
        client.release([lease])
        other.claim(KEYS)
    eventually(lambda: client.claim(KEYS).id, "the claim of a session that has ended goes to the next")


def test_of_many_engines_exactly_one_gets_a_prefix(served: Daemon, client: Client) -> None:
    put(client)
    clients = [served.connect(NAMESPACE) for _ in range(6)]
    links = [DaemonLink(each, stock_max=0) for each in clients]
    try:
        queries = [Query(KEYS, time.monotonic() + PATIENCE_S, drop=True) for _ in links]
        together = threading.Barrier(len(links))

        def ask(link: DaemonLink, query: Query) -> None:
            together.wait(PATIENCE_S)
            link.ask([query])

        threads = [threading.Thread(target=ask, args=pair) for pair in zip(links, queries, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        replies: list[Reply] = []
        for link in links:
            replies += eventually(link.replies)
        winners = [reply for reply in replies if reply.pins is not None]
        # Who comes second gets nothing, wherever the first one is by then.
        assert len(winners) == 1
        assert winners[0].available == len(KEYS)
        assert sum(reply.taken for reply in replies) == len(KEYS) * (len(links) - 1)
        pins = winners[0].pins
        assert pins is not None and pins.claimed
        winner = links[[query is winners[0].query for query in queries].index(True)]
        arena = client.arena
        assert arena is not None
        assert np.array_equal(arena.epochs_of(pins.offsets), pins.epochs)
        winner.release([pins], remove=True)
        eventually(lambda: client.lookup(KEYS) == 0)
        stats = client.stats()
        assert stats["leases"] == stats["pins"] == 0
    finally:
        for link in links:
            link.close()
