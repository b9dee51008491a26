"""kvstore: a KV-cache service for inference engines.

`connect` gives a Client; `Namespace` says whose blocks it speaks of; `kvstore.errors` holds everything that can go
wrong. Names load on first use, so that `import kvstore` costs nothing to a command that only asks for the version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvstore.blocks import Namespace
    from kvstore.client import Client, connect
    from kvstore.engine_calls import Lease, Reservation
    from kvstore.found import Found
    from kvstore.insert import InsertResult, Ticket
    from kvstore.wire.tls import Tls

_HOME: Final = {
    "Client": "kvstore.client",
    "Found": "kvstore.found",
    "InsertResult": "kvstore.insert",
    "Lease": "kvstore.engine_calls",
    "Namespace": "kvstore.blocks",
    "Reservation": "kvstore.engine_calls",
    "Ticket": "kvstore.insert",
    "Tls": "kvstore.wire.tls",
    "connect": "kvstore.client",
}

__all__ = [
    "Client",
    "Found",
    "InsertResult",
    "Lease",
    "Namespace",
    "Reservation",
    "Ticket",
    "Tls",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
