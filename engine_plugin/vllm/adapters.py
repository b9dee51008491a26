"""LoRA adapters by content. vLLM's block hashes carry an adapter's name and path only: on another host there may be
other weights in that path, and so there are when an adapter is trained further and written there again, while the
blocks of before are still on disk.

So the daemon's keys of a request with an adapter carry a fingerprint of the adapter's files as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from engine_plugin.vllm.naming import revision_of

#: Adapters that are remembered. vLLM holds far fewer.
_MOST: Final = 4096


class Adapters:
    """Which request uses which adapter. Scheduler thread only."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], tuple[object, bytes]] = {}
        self._by_request: dict[str, bytes] = {}

    def arrived(self, req_id: str, adapter: Any) -> None:
        """A request has come, with vLLM's LoRARequest or None."""
        if adapter is not None:
            self._by_request[req_id] = self._identity(adapter)

    def of(self, req_id: str) -> bytes:
        """What tells the adapter of a request from others of its name; empty where there is none."""
        return self._by_request.get(req_id, b"")

    def finished(self, req_id: str) -> None:
        self._by_request.pop(req_id, None)

    def _identity(self, adapter: Any) -> bytes:
        """Read when an adapter is first used, which is when vLLM loads it: what becomes of its files later is not what
        the engine computes with, unless it is told to load them again.
        """
        key = (adapter.lora_int_id, adapter.lora_path)
        known = self._by_id.get(key)
        seen = _signs(adapter.lora_path) if adapter.load_inplace else None
        if known is None or known[0] != seen:
            if len(self._by_id) >= _MOST:
                del self._by_id[next(iter(self._by_id))]
            text = revision_of(adapter.lora_path, None, "adapter_config.json") or adapter.lora_path
            known = self._by_id[key] = (seen, text.encode())
        return known[1]


def _signs(folder: str) -> object:
    """Changes with the files of a folder."""
    try:
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(folder).iterdir())]
    except OSError:
        return None
