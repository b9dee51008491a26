"""The conformance suite over every tier that there is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.testing.tier_suite import TierSuite
from kvstore.testing.tiers import DictTier, FaultyTier
from kvstore.tier import Tier
from kvstore.tiers.disk import DiskTier
from tests.disk.media import PlainIO


class TestDictTier(TierSuite):
    survives = False

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DictTier(capacity_bytes)


class TestFaultyTierWithoutFaults(TierSuite):
    survives = False

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return FaultyTier(DictTier(capacity_bytes))


class TestDiskTier(TierSuite):
    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DiskTier(folder, capacity_bytes, SystemClock())


class TestDiskTierOnMemory(TierSuite):
    """tmpfs: another file system, with other answers to O_DIRECT and fallocate."""

    @pytest.fixture(autouse=True)
    def _memory(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as self.folder:
            yield

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DiskTier(Path(self.folder) / folder.name, capacity_bytes, SystemClock())


class TestDiskTierBuffered(TierSuite):
    """A file system that knows neither O_DIRECT nor fallocate."""

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return DiskTier(folder, capacity_bytes, SystemClock(), io=PlainIO())
