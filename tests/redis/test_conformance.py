"""The conformance suite over a single server, a Valkey server and a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.testing.tier_suite import DEADLINE_S, TierSuite
from kvstore.tier import Tier
from kvstore.tiers.redis import RedisTier
from tests.redis.servers import RedisCluster, RedisServer


def tier_at(url: str, folder: Path, capacity_bytes: int) -> Tier:
    """Keys of one test are those of one folder. The deadline is that of the suite: this is no test of speed."""
    prefix = f"{folder.parent.name}:{folder.name}:"
    return RedisTier(url, SystemClock(), capacity_bytes=capacity_bytes, key_prefix=prefix, deadline_s=DEADLINE_S / 3)


class RedisSuite(TierSuite):
    async def ready(self, tier: Tier) -> None:
        """As in general, and until what is there was looked at: with a budget, nothing is stored before that."""
        await super().ready(tier)
        assert isinstance(tier, RedisTier)
        async with asyncio.timeout(DEADLINE_S):
            await tier.swept.wait()


class TestSingle(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, shared_server: RedisServer) -> None:
        self.url = shared_server.url

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return tier_at(self.url, folder, capacity_bytes)


class TestValkey(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, shared_valkey: RedisServer) -> None:
        self.url = shared_valkey.url

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return tier_at(self.url, folder, capacity_bytes)


class TestCluster(RedisSuite):
    @pytest.fixture(autouse=True)
    def _server(self, shared_cluster: RedisCluster) -> None:
        self.url = shared_cluster.url

    def new_tier(self, folder: Path, capacity_bytes: int) -> Tier:
        return tier_at(self.url, folder, capacity_bytes)
