"""The classic faces of disaggregated prefill over the daemon: LookupBuffer (database) and Pipe (FIFO).

Both are met by name, from any process and host that reaches the daemon.
"""

from __future__ import annotations

from kvstore.buffer.lookup import LookupBuffer
from kvstore.buffer.pipe import Pipe

__all__ = ["LookupBuffer", "Pipe"]
