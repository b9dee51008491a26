"""Write-back over the wire: what has to leave is copied first, and who stores waits for that."""

from __future__ import annotations

from pathlib import Path

import kvstore
from kvstore.pool import Shortfall
from kvstore.service import _SHORTFALLS
from kvstore.testing import make_block
from kvstore.wire.v1 import engine_pb2
from tests.tiers.test_service import BLOCK, LIMIT_S, NAMESPACE, Daemon, check, until


def test_every_shortfall_has_a_word_on_the_wire() -> None:
    assert set(_SHORTFALLS) == {None, *Shortfall}
    assert set(_SHORTFALLS.values()) == set(engine_pb2.Shortfall.values())


def test_nothing_is_lost_when_more_is_stored_than_the_pool_holds(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "--disk-write-policy", "back")
    daemon.start()
    try:
        keys = [b"%d" % index for index in range(120)]  # three times the pool
        with kvstore.connect(daemon.endpoint, NAMESPACE, timeout_s=LIMIT_S, share_bytes=30 << 20) as client:
            for start in range(0, len(keys), 10):
                several = keys[start : start + 10]
                result = client.insert(several, [make_block(key, BLOCK) for key in several]).wait(LIMIT_S)
                assert result.stored == len(several), (start, result, daemon.stats()["refused"])
            until(lambda: client.lookup(keys) == len(keys), "all are there")
            for start in range(0, len(keys), 12):
                check(client, keys[start : start + 12])
            assert daemon.stats()["reserved_slots"] == 0
    finally:
        daemon.stop(9)
