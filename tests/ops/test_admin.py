from __future__ import annotations

from typing import Any

import pytest

import kvstore
from kvstore.admin import AdminClient
from kvstore.errors import DaemonUnavailable, InvalidRequest
from kvstore.metrics import exposition
from tests.ops.conftest import Daemon
from tests.ops.stats_sample import stats_sample

NAMESPACE = kvstore.Namespace(model="admin-test", dtype="bfloat16", block_size=16, block_bytes=64 << 10)

#: Objects whose keys are names of the moment (reasons, methods, fields of an identity), not part of the tree.
OPEN_OBJECTS = {
    "hits",
    "misses",
    "stores",
    "refused",
    "removed",
    "transfers",
    "moved",
    "speeds",
    "bytes",
    "calls",
    "call_seconds",
    "errors",
    "identity",
    "events",
    "congestion",
}


def shape(tree: Any) -> Any:
    """The keys of a tree, the first element standing for a list."""
    if isinstance(tree, dict):
        return {key: None if key in OPEN_OBJECTS else shape(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shape(tree[0])] if tree and isinstance(tree[0], dict) else []
    return None


def test_a_real_tree_has_the_shape_of_the_sample(daemon: Daemon, admin: AdminClient) -> None:
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        client.insert([b"k" * 32], [bytes(NAMESPACE.block_bytes)]).wait(30)
        tree = admin.stats()
        client.flush()
    assert shape(tree) == shape(stats_sample())
    exposition(tree)


def test_ping(daemon: Daemon, admin: AdminClient) -> None:
    first, second = admin.ping(), admin.ping()
    assert (first.pid, first.version) == (daemon.process.pid, kvstore.__version__)
    assert first.generation == second.generation != b""
    assert first.uptime_s <= second.uptime_s


def test_listing_and_flushing_by_digest(daemon: Daemon, admin: AdminClient) -> None:
    keys = [bytes([index]) * 32 for index in range(5)]
    with kvstore.connect(daemon.endpoint, namespace=NAMESPACE) as client:
        client.insert(keys, [bytes(NAMESPACE.block_bytes)] * 5).wait(30)
        blocks, total = admin.list_blocks(NAMESPACE.digest())
        assert (total, {block.key for block in blocks}) == (5, set(keys))
        assert all((block.pins, block.tiers, block.group) == (0, ("cpu",), 0) for block in blocks)
        with client.select(keys[:2], timeout_s=30) as found:
            assert len(found) == 2
            blocks, _ = admin.list_blocks(NAMESPACE.digest())
            assert {block.key for block in blocks if block.pins} == set(keys[:2])
        assert len(admin.list_blocks(limit=2)[0]) == 2
        assert admin.flush(NAMESPACE.digest()) == 5
        assert admin.list_blocks(NAMESPACE.digest()) == ([], 0)


def test_a_digest_that_is_cut_short_is_not_everything(admin: AdminClient) -> None:
    for digest in (b"", b"\xab" * 15):
        with pytest.raises(InvalidRequest):
            admin.flush(digest)
        with pytest.raises(InvalidRequest):
            admin.list_blocks(digest)


def test_nobody_there() -> None:
    with AdminClient("unix:/nowhere/kv.sock", timeout_s=5) as client, pytest.raises(DaemonUnavailable):
        client.ping()
