"""What the router is told, checked. Imports nothing that is only there with the `router` extra."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Sequence
from typing import Final

from kvstore.endpoint import Endpoint, parse_endpoint
from kvstore.errors import ConfigError, InvalidRequest

_FORM: Final = "write it as http://HOST:PORT"


@dataclasses.dataclass(frozen=True, slots=True)
class RouterSettings:
    """Made by :func:`router_settings`.

    Attributes:
        prefill, decode: Base URLs of the instances, without a slash at the end.
        listen: Where clients come.
        requests_max: Requests at a time; one more is answered 429.
        body_bytes_max: Largest body of a request.
        prefill_timeout_s: Longest time for the first step, over all attempts; then the request goes on without it.
        decode_timeout_s: Longest silence of a decode instance, before its first byte or between two.
        connect_timeout_s: Longest time to connect to an instance.
        health_interval_s: Pause between two looks at an instance's health.
        health_timeout_s: How long one look may take.
        retries: Further instances that are tried, in either step, after the first one failed.
        drain_s: How long requests that are running at SIGTERM may take to end.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    listen: Endpoint
    requests_max: int = 1024
    body_bytes_max: int = 64 << 20
    prefill_timeout_s: float = 120.0
    decode_timeout_s: float = 600.0
    connect_timeout_s: float = 2.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    retries: int = 2
    drain_s: float = 60.0


def router_settings(prefill: Sequence[str], decode: Sequence[str], listen: str, **numbers: float) -> RouterSettings:
    """Checks and normalizes.

    Raises:
        ConfigError: an address is malformed or named twice; the message says what to write.
    """
    try:
        place = parse_endpoint(listen)
    except InvalidRequest as error:
        raise ConfigError(f"--listen: {error}") from None
    if place.is_unix:
        raise ConfigError(f"--listen is {listen!r}: the router serves HTTP on HOST:PORT")
    settings = RouterSettings(
        prefill=tuple(_base_url("--prefill", url) for url in prefill),
        decode=tuple(_base_url("--decode", url) for url in decode),
        listen=place,
        **numbers,  # type: ignore[arg-type]
    )
    for flag, urls in (("--prefill", settings.prefill), ("--decode", settings.decode)):
        if not urls:
            raise ConfigError(f"{flag} is missing: name at least one instance")
        twice = {url for url in urls if urls.count(url) > 1}
        if twice:
            raise ConfigError(f"{flag} names {', '.join(sorted(twice))} twice")
    return settings


def _base_url(flag: str, text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}: its port is not a number up to 65535; {_FORM}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} is {text!r}: {_FORM}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{flag} is {text!r}: it holds more than an address; {_FORM}")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{flag} is {text!r}: leave out /v1; {_FORM}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"
