"""The daemon as a stranger sees it: gRPC by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.blocks import Namespace
from kvstore.endpoint import parse_endpoint
from kvstore.wire.channel import open_channel
from kvstore.wire.v1 import admin_pb2_grpc, engine_pb2, engine_pb2_grpc
from tests.support import PATIENCE_S, Daemon

#: Blocks of 64 KiB: small enough that a test may have a thousand.
NAMESPACE = Namespace(model="wire", dtype="bfloat16", block_size=64, block_bytes=64 << 10)


@dataclasses.dataclass
class Stranger:
    """A session without the mapping, made by hand."""

    channel: Any
    stub: Any
    admin: Any
    stream: Any
    session: bytes
    digest: bytes

    def call(self, method: str, request: Any) -> Any:
        """One call of the engine face."""
        return getattr(self.stub, method)(request, timeout=PATIENCE_S)


@pytest.fixture
def stranger(served: Daemon) -> Iterator[Stranger]:
    channel = open_channel(parse_endpoint(served.endpoint), None)
    stub = engine_pb2_grpc.EngineStub(channel)
    stream = stub.Attach(engine_pb2.AttachRequest(client_name="stranger", pid=1))
    session = next(stream).welcome.session
    opened = stub.OpenNamespace(
        engine_pb2.OpenNamespaceRequest(session=session, text=NAMESPACE.identity(), group_bytes=NAMESPACE.group_bytes),
        timeout=PATIENCE_S,
    )
    yield Stranger(channel, stub, admin_pb2_grpc.AdminStub(channel), stream, session, opened.digest)
    stream.cancel()
    channel.close()
