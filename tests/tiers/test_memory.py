"""Memory that the books of a disk take, and the warning of what they will."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.testing import make_block
from kvstore.testing.tier_suite import BLOCK_BYTES, name_of, store
from kvstore.tiers.slabs import MEMORY_BYTES_PER_BLOCK
from tests.disk.media import CAPACITY_BYTES, opened
from tests.support import Daemon, eventually

BLOCK = 4096
NAMESPACE = kvstore.Namespace(model="m", dtype="bf16", block_size=16, block_bytes=BLOCK)
#: A daemon on a machine with so much memory left.
SERVE = """
import sys
import kvstore.daemon
from kvstore.machine import Machine
from kvstore.cli import main
kvstore.daemon.read_machine = lambda: Machine(available_bytes={room})
sys.argv = ["kvstore", *sys.argv[1:]]
main()
"""


async def test_books_of_a_full_disk_are_reckoned_from_what_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path, prewrite=False) as tier:
        assert (tier.stats()["books_bytes"], tier.stats()["books_bytes_max"]) == (0, 0)
        await store(tier, [name_of(number) for number in range(10)])
        stats = tier.stats()
        assert stats["books_bytes"] == 10 * MEMORY_BYTES_PER_BLOCK
        full = stats["books_bytes_max"] / MEMORY_BYTES_PER_BLOCK * BLOCK_BYTES
        assert 0.5 * CAPACITY_BYTES < full < CAPACITY_BYTES


@pytest.mark.parametrize(("room", "warned"), [(1 << 20, True), (1 << 30, False)])
def test_a_disk_whose_books_will_not_fit_is_warned_of_at_the_start(tmp_path: Path, room: int, warned: bool) -> None:
    daemon = Daemon(tmp_path, "--disk-dir", str(tmp_path / "disk"), "--disk-bytes", "256MiB")
    assert daemon._arguments[1:3] == ["-m", "kvstore"]
    daemon._arguments[1:3] = ["-c", SERVE.format(room=room)]

    def said() -> list[dict[str, Any]]:
        lines = map(json.loads, daemon.log.read_text().splitlines())
        return [line for line in lines if "books" in line["event"]]

    try:
        daemon.start()
        with daemon.connect(NAMESPACE) as client:
            assert client.insert([b"a"], [make_block(b"a", BLOCK)]).wait(60).stored == 1
            eventually(lambda: daemon.stats()["tiers"][1]["blocks"] == 1, "it is copied down")
        daemon.stop()
        before = len(said())  # it may have been looked at when the block was there already
        daemon.start()
        eventually(lambda: "disk" in daemon.stats()["speeds"], "it was looked at")
        daemon.stop()
        assert [line["level"] for line in said()[before:]] == ["warning"] * warned
        if warned:
            line = said()[-1]
            assert line["room_bytes"] <= room < line["books_bytes_more"] < 256 * MEMORY_BYTES_PER_BLOCK * 256
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
