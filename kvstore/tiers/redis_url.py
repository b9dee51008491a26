"""Which servers a URL means, and how to log in there.

::

    redis://[user[:password]@]host[:port][/database][?option=value]
    rediss://...                                      TLS
    redis+cluster://...@host:port,host:port           a cluster; rediss+cluster:// with TLS
    redis+sentinel://...@host:port,host:port/service[/database]     rediss+sentinel:// with TLS
    unix://[user[:password]@]/path/to/socket[?db=database]

Options are those of redis-py (ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname, ...), and for
Sentinel its own login: sentinel_username, sentinel_password.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from redis.connection import parse_url

from kvstore.errors import ConfigError

_REDIS_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
#: What a URL may not set: these belong to the tier.
_OURS: Final = {
    "connection_class",
    "decode_responses",
    "health_check_interval",
    "legacy_responses",
    "max_connections",
    "parser_class",
    "protocol",
    "retry_on_error",
    "retry_on_timeout",
    "socket_connect_timeout",
    "socket_read_size",
    "socket_timeout",
    "timeout",
}
_parse_url: Any = parse_url  # has no types
_SECRETS: Final = ("password", "sentinel_password", "ssl_password")


class Kind(enum.Enum):
    """What stands behind a URL."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"
    UNIX = "unix"


_SCHEMES: Final = {
    "redis": (Kind.SINGLE, False),
    "rediss": (Kind.SINGLE, True),
    "redis+cluster": (Kind.CLUSTER, False),
    "rediss+cluster": (Kind.CLUSTER, True),
    "redis+sentinel": (Kind.SENTINEL, False),
    "rediss+sentinel": (Kind.SENTINEL, True),
    "unix": (Kind.UNIX, False),
}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RedisAddress:
    """A URL, taken apart.

    Attributes:
        hosts: Of a single server one, of a cluster or of the Sentinels at least one.
        service: What the Sentinels call the servers; empty elsewhere.
        login: Keyword arguments of redis-py's connections. Holds secrets.
        sentinel_login: The same for the connections to the Sentinels.
        shown: The URL as it may be shown.
        secrets: What must not be shown.
    """

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    service: str
    login: dict[str, Any]
    sentinel_login: dict[str, Any]
    shown: str
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<RedisAddress {self.shown}>"

    def scrub(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_redis_url(url: str) -> RedisAddress:
    """Takes a URL apart.

    Raises:
        ConfigError: see the module for what it should look like. The message never repeats the URL.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES or "://" not in url:
        raise ConfigError(f"a Redis URL begins with one of {', '.join(f'{each}://' for each in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    try:
        split = urlsplit(url)
        login_text, at, hosts_text = split.netloc.rpartition("@")
        # redis-py reads one host and a database; several hosts and the service are read here.
        plain = "unix" if kind is Kind.UNIX else "rediss" if tls else "redis"
        netloc = login_text + at + ("" if kind is Kind.UNIX else "host")
        path = split.path if kind is Kind.UNIX else ""
        options: dict[str, Any] = _parse_url(f"{plain}://{netloc}{path}?{split.query}")
        hosts: tuple[tuple[str, int], ...] = ()
        service, database = "", None
        if kind is not Kind.UNIX:
            hosts = _hosts(hosts_text, _SENTINEL_PORT if kind is Kind.SENTINEL else _REDIS_PORT)
            service, database = _path(kind, split.path)
        if kind is Kind.SINGLE and len(hosts) > 1:
            raise ValueError("several hosts need redis+cluster:// or redis+sentinel://")
    except ValueError as error:
        raise ConfigError(f"the Redis URL cannot be read: {error}") from None
    for name in ("connection_class", "host", "port"):
        options.pop(name, None)
    if bad := sorted(_OURS & options.keys()):
        raise ConfigError(f"the Redis URL may not set {', '.join(bad)}")
    if database is not None:
        options.setdefault("db", database)
    if kind is Kind.CLUSTER and options.pop("db", 0):
        raise ConfigError("a Redis cluster has only database 0: leave the database out of the URL")
    secrets = {options[name] for name in _SECRETS if options.get(name)}
    sentinel_login = {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in options
    }
    login = {name: value for name, value in options.items() if value is not None}
    if tls or "ssl_ca_certs" in login:
        sentinel_login |= {name: value for name, value in login.items() if name.startswith("ssl_")}
    shown_login = f"{quote(options['username'])}@" if options.get("username") else ""
    shown = f"{scheme}://{shown_login}{hosts_text}{split.path}"
    return RedisAddress(
        kind,
        tls,
        hosts,
        service,
        login,
        sentinel_login,
        shown,
        # The longest first: one may be part of another.
        tuple(sorted(secrets | {quote(secret, safe="") for secret in secrets}, key=len, reverse=True)),
    )


def _hosts(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for each in text.split(","):
        split = urlsplit(f"//{each}")
        if not split.hostname:
            raise ValueError("a host is missing")
        hosts.append((unquote(split.hostname), split.port or default_port))
    return tuple(hosts)


def _path(kind: Kind, path: str) -> tuple[str, int | None]:
    """Service and database."""
    pieces = [unquote(piece) for piece in path.split("/") if piece]
    service = ""
    if kind is Kind.SENTINEL:
        if not pieces:
            raise ValueError("the name of the service that the Sentinels watch is missing: .../service")
        service = pieces.pop(0)
    if len(pieces) > 1 or (pieces and not pieces[0].isdigit()):
        raise ValueError("the database must be a number")
    return service, int(pieces[0]) if pieces else None
