"""AdminClient: what an operator asks of a daemon. Opens no session and maps nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from kvstore.blocks import DIGEST_BYTES
from kvstore.endpoint import Endpoint, default_endpoint, parse_endpoint
from kvstore.errors import InvalidRequest
from kvstore.wire.channel import open_channel
from kvstore.wire.convert import client_errors
from kvstore.wire.tls import Tls
from kvstore.wire.v1 import admin_pb2, admin_pb2_grpc


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """A daemon's sign of life.

    Attributes:
        generation: Names this life of its pool.
        version: Of the daemon.
        pid: Of the daemon, in its own pid namespace.
        uptime_s: Seconds since it started.
    """

    generation: bytes
    version: str
    pid: int
    uptime_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ListedBlock:
    """One block as `kvstore ls` shows it.

    Attributes:
        namespace: Digest.
        group: Index of the KV-cache group.
        key: Block hash.
        size_bytes: Bytes of the block.
        pins: Leases that hold it now.
        tiers: Names of the tiers that have a copy.
    """

    namespace: bytes
    group: int
    key: bytes
    size_bytes: int
    pins: int
    tiers: tuple[str, ...]


class AdminClient:
    """Calls the Admin service of one daemon. May be used from several threads; not after a fork.

    Every call has a deadline of `timeout_s` and raises DaemonUnavailable where nothing answers, DeadlineExceeded where
    the answer is late, AccessDenied where the token is wrong.

    Args:
        endpoint: ``unix:PATH`` or ``HOST:PORT``; None: the default endpoint.
        token: Bearer token, for HOST:PORT.
        timeout_s: Deadline of each call.
        tls: Files for a HOST:PORT that speaks TLS.

    Raises:
        InvalidRequest: the endpoint is none.
        ConfigError: a file of `tls` cannot be read.
    """

    def __init__(
        self,
        endpoint: str | Endpoint | None = None,
        token: str | None = None,
        timeout_s: float = 5.0,
        tls: Tls | None = None,
    ) -> None:
        if endpoint is None:
            endpoint = default_endpoint()
        elif isinstance(endpoint, str):
            endpoint = parse_endpoint(endpoint)
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._channel = open_channel(endpoint, token, tls)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def ping(self) -> Ping:
        with client_errors(self.endpoint):
            reply = self._stub.Ping(admin_pb2.PingRequest(), timeout=self._timeout_s)
        return Ping(reply.generation, reply.version, reply.pid, reply.uptime_s)

    def stats(self) -> dict[str, Any]:
        """The daemon's figures as a tree; docs/stats.md describes them."""
        with client_errors(self.endpoint):
            reply = self._stub.Stats(admin_pb2.StatsRequest(), timeout=self._timeout_s)
        tree: dict[str, Any] = json.loads(reply.json)
        return tree

    def list_blocks(self, digest: bytes | None = None, limit: int = 1000) -> tuple[list[ListedBlock], int]:
        """Some blocks of a namespace, or of all, in no particular order; and how many there are."""
        request = admin_pb2.ListRequest(namespace=_digest(digest), limit=limit)
        with client_errors(self.endpoint):
            reply = self._stub.List(request, timeout=self._timeout_s)
        blocks = [
            ListedBlock(block.namespace, block.group, block.key, block.size_bytes, block.pins, tuple(block.tiers))
            for block in reply.blocks
        ]
        return blocks, reply.total

    def flush(self, digest: bytes | None) -> int:
        """Removes the blocks of a namespace, or with None of all, from every tier. How many were removed."""
        request = admin_pb2.FlushRequest(namespace=_digest(digest))
        with client_errors(self.endpoint):
            reply = self._stub.Flush(request, timeout=self._timeout_s)
        return int(reply.removed)

    def prefetch(self, digest: bytes | None, max_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Brings blocks of a namespace, or with None of all, from the tiers below into the free part of the pool.

        Args:
            max_bytes: Of blocks; 0: as much as is free.

        Yields:
            Blocks and bytes so far. The work goes on as long as this is read; it has no deadline.
        """
        request = admin_pb2.PrefetchRequest(namespace=_digest(digest), max_bytes=max_bytes)
        with client_errors(self.endpoint):
            for event in self._stub.Prefetch(request):
                yield event.blocks, event.bytes

    def evict(self, free_bytes: int) -> tuple[int, int]:
        """Evicts the coldest unpinned blocks until so many bytes are free. Blocks evicted, and bytes free now."""
        with client_errors(self.endpoint):
            reply = self._stub.Evict(admin_pb2.EvictRequest(free_bytes=free_bytes), timeout=self._timeout_s)
        return reply.evicted_blocks, reply.free_bytes

    def close(self) -> None:
        """Ends the connection. Calls after it raise."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(digest: bytes | None) -> bytes:
    """On the wire an empty digest means every namespace; one that is empty or short by mistake must not."""
    if digest is None:
        return b""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return digest
