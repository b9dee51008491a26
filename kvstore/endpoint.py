"""Where a daemon listens, as one frozen value: a Unix socket or HOST:PORT."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Final

from kvstore.errors import InvalidRequest

#: Name of the variable that holds the default endpoint of clients and of the daemon.
ENVIRONMENT_VARIABLE: Final = "KVSTORE_ENDPOINT"
#: What a Unix socket path may be long: `sun_path` holds 108 bytes with the closing zero.
UNIX_PATH_BYTES_MAX: Final = 107
ACCEPTED_FORMS: Final = "unix:/path, /path, HOST:PORT, tcp://HOST:PORT or [IPv6]:PORT"

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class EndpointKind(enum.Enum):
    UNIX = "unix"
    TCP = "tcp"


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a daemon listens or is called. Made by :func:`parse_endpoint`.

    Attributes:
        kind: Unix socket or TCP.
        path: Absolute path of the socket; empty for TCP.
        host: Name or address without brackets; empty for a Unix socket.
        port: 0 for a Unix socket; for a listener on TCP, 0 means any free port.
    """

    kind: EndpointKind
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return self.kind is EndpointKind.UNIX

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it. A name other than ``localhost`` is not looked up and counts as reachable."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def grpc_target(self) -> str:
        """What gRPC calls this place, both for a channel and for a listener."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """The form that :func:`parse_endpoint` reads back to an equal value."""
        return self.grpc_target


def parse_endpoint(text: str) -> Endpoint:
    """Reads an endpoint in any of the accepted forms.

    Raises:
        InvalidRequest: it is none of them; one line that quotes the text and names the accepted forms.
    """
    text = text.strip()
    if text.startswith(("unix:", "/")):
        return _unix(text)
    address = text.removeprefix("tcp://")
    if "://" in address:
        raise _refused(text, f"{address.split('://', 1)[0]!r} is not a scheme of this daemon")
    host, colon, port_text = address.rpartition(":")
    if not colon:
        raise _refused(text, "there is no port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise _refused(text, f"{host!r} is not an IPv6 address") from None
    elif ":" in host:
        raise _refused(text, "an IPv6 address stands in brackets")
    elif not _HOST.fullmatch(host):
        raise _refused(text, f"{host!r} is not a host name" if host else "there is no host")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise _refused(text, f"{port_text!r} is not a port (0 to 65535)")
    return Endpoint(EndpointKind.TCP, host=host, port=int(port_text))


def default_endpoint(environ: Mapping[str, str] | None = None) -> Endpoint:
    """``$KVSTORE_ENDPOINT``, else a socket in ``$XDG_RUNTIME_DIR``, else one in ``/run``.

    Args:
        environ: Where the variables are read; None: this process's environment.

    Raises:
        InvalidRequest: the variable is set to something that is not an endpoint.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(ENVIRONMENT_VARIABLE)
    if named:
        try:
            return parse_endpoint(named)
        except InvalidRequest as error:
            raise InvalidRequest(f"${ENVIRONMENT_VARIABLE}: {error}") from None
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # The XDG rules say that a relative path there is to be ignored.
    folder = runtime if runtime.startswith("/") else "/run"
    return parse_endpoint(f"unix:{folder.rstrip('/')}/kvstore/kvstore.sock")


def _unix(text: str) -> Endpoint:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        # unix:///x has an empty authority; unix://x/y would name a host, which a socket does not have.
        path = path[2:]
    if not path.startswith("/"):
        raise _refused(text, "a socket path must be absolute")
    if "\0" in path or path.endswith("/"):
        raise _refused(text, "the path names no file")
    size = len(os.fsencode(path))
    if size > UNIX_PATH_BYTES_MAX:
        raise _refused(text, f"the path has {size} bytes and a Unix socket allows {UNIX_PATH_BYTES_MAX}")
    return Endpoint(EndpointKind.UNIX, path=path)


def _refused(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{text!r} is not an endpoint: {why}; write {ACCEPTED_FORMS}")
