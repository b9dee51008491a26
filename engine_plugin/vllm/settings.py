"""The keys of `kv_connector_extra_config` that mean something to this plugin.

vLLM's own keys keep their names; ours begin with `kvstore.`. A key of ours that does not exist is refused with the
nearest one that does, since a typing mistake in a cache setting would otherwise only show as a low hit ratio.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, Final

from kvstore.errors import ConfigError

PREFIX: Final = "kvstore."


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSettings:
    """What the user asked for, checked.

    Attributes:
        share_bytes: vLLM's `cpu_bytes_to_use`: this engine's share of the pool; 0: no limit but the pool.
        endpoint: `unix:PATH` or `HOST:PORT`; None: the default endpoint.
        autostart: Start a daemon of `share_bytes` if there is none.
        token: Access token, if the daemon asks for one.
        tenant: Keeps blocks of different owners apart.
        verdict_deadline_s: Longest time a request waits for the answer to its lookup; then it is a miss.
        pending_deadline_s: Longest time a request waits for its blocks to be brought up from disk; what has not come up
            by then is computed.
        timeout_s: Deadline of one call to the daemon, made in the background.
        stock_blocks: Most empty slots held in reserve for the next stores; 0: as many as two steps can fill.
        copy_threads: Threads that copy between KV memory and the pool; 0: a quarter of the cores, at most 4.
    """

    share_bytes: int = 0
    endpoint: str | None = None
    autostart: bool = False
    token: str | None = None
    tenant: str = ""
    verdict_deadline_s: float = 0.5
    pending_deadline_s: float = 5.0
    timeout_s: float = 2.0
    stock_blocks: int = 0
    copy_threads: int = 0

    def settled_copy_threads(self) -> int:
        """Copy threads with the default filled in."""
        return self.copy_threads or min(4, max(1, (os.cpu_count() or 1) // 4))


OWN_KEYS: Final = tuple(field.name for field in dataclasses.fields(PluginSettings) if field.name != "share_bytes")


def parse_settings(extra: Mapping[str, Any]) -> PluginSettings:
    """Reads the plugin's settings.

    Raises:
        ConfigError: an unknown `kvstore.*` key or an impossible value; the message says what to write.
    """
    given: dict[str, Any] = {}
    for key, value in extra.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in OWN_KEYS:
            near = difflib.get_close_matches(name, OWN_KEYS, n=1, cutoff=0.0)
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; did you mean '{PREFIX}{near[0]}'?")
        if value is not None:
            given[name] = _checked(key, name, value)
    share = extra.get("cpu_bytes_to_use") or 0
    try:
        given["share_bytes"] = int(float(share))
    except (TypeError, ValueError):
        raise ConfigError(f"cpu_bytes_to_use is {share!r}: give bytes as a number, such as 1000000000") from None
    if given["share_bytes"] < 0:
        raise ConfigError(f"cpu_bytes_to_use is {share!r}: it counts bytes and cannot be negative")
    settings = PluginSettings(**given)
    if settings.autostart and not settings.share_bytes:
        raise ConfigError("'kvstore.autostart' needs 'cpu_bytes_to_use': it says how large a daemon to start")
    return settings


def _checked(key: str, name: str, value: Any) -> Any:
    kind = {field.name: field.type for field in dataclasses.fields(PluginSettings)}[name]
    if kind == "bool":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{key!r} is {value!r}: write true or false")
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{key!r} is {value!r}: write a number that is not negative")
        if kind == "float" and value == 0:
            raise ConfigError(f"{key!r} is 0: write a number of seconds above 0")
        return int(value) if kind == "int" else float(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key!r} is {value!r}: write a text that is not empty")
    return value
