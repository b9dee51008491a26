"""Channels to a daemon, opened in one way."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from kvstore.endpoint import Endpoint
from kvstore.wire.convert import TOKEN_KEY
from kvstore.wire.tls import Tls

_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    # The daemon states and enforces the limits; a client that had its own would fail with a message about itself.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A daemon that comes back is found again within 2 s, not after gRPC's default of up to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Also the least time that an attempt to connect is given: a daemon that is only busy must not count as absent.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A peer that vanished without a word (host down, cable out) is noticed within 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each client has its own connection; a shared one would tie the life of one session to another.
    ("grpc.use_local_subchannel_pool", 1),
    # Proxies are for the internet.
    ("grpc.enable_http_proxy", 0),
)


class _CallDetails(
    collections.namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready")),
    grpc.ClientCallDetails,
):
    """gRPC's details are read by attribute and have no constructor of their own."""


class _TokenInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds the token to each call. Call credentials would do the same, but gRPC sends those over TLS only."""

    def __init__(self, token: str) -> None:
        self._metadata = (TOKEN_KEY, f"Bearer {token}")

    def _with_token(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        metadata = [*(details.metadata or ()), self._metadata]
        return _CallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)


def open_channel(endpoint: Endpoint, token: str | None, tls: Tls | None = None) -> grpc.Channel:
    """A channel to a daemon; connects at the first call. The caller closes it. TLS is for HOST:PORT.

    Raises:
        ConfigError: a file of `tls` cannot be read.
    """
    if tls is None or endpoint.is_unix:
        channel = grpc.insecure_channel(endpoint.grpc_target, options=_OPTIONS)
    else:
        channel = grpc.secure_channel(endpoint.grpc_target, tls.channel_credentials(), options=_OPTIONS)
    return grpc.intercept_channel(channel, _TokenInterceptor(token)) if token else channel


def open_async_channel(endpoint: Endpoint, tls: Tls | None = None) -> grpc.aio.Channel:
    """As open_channel, for an event loop; a token goes with each call."""
    if tls is None or endpoint.is_unix:
        return grpc.aio.insecure_channel(endpoint.grpc_target, options=_OPTIONS)
    return grpc.aio.secure_channel(endpoint.grpc_target, tls.channel_credentials(), options=_OPTIONS)
