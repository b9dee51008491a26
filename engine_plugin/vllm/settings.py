"""The keys of `kv_connector_extra_config` that mean something to this plugin.

vLLM's own keys keep their names and meaning; ours begin with `kvstore.`. Any other key is refused with the nearest one
that exists, since a typing mistake in a cache setting would otherwise only show as a low hit ratio.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, Final

from engine_plugin.copy.paths import CHOICES
from kvstore.congestion import AUTO
from kvstore.errors import ConfigError
from kvstore.remote import STAGING_BYTES
from kvstore.wire.tls import Tls

PREFIX: Final = "kvstore."

#: Keys of vLLM that mean here what they mean there. vLLM reads those that are not in PluginSettings itself.
NATIVE_KEYS: Final = (
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "cpu_bytes_to_use",
    "eviction_policy",
    "max_tracker_size",
    "offload_prompt_only",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
    "store_threshold",
)
#: vLLM reads these with bool(), to which "false" is true.
_NATIVE_BOOLS: Final = ("canonical_layout", "offload_prompt_only", "self_describing_kv_events")
#: Keys of vLLM that cannot work here, and what to do instead.
_NATIVE_REFUSED: Final = {
    "backpressure": "the daemon bounds what is copied to its tiers by itself",
    "cache_policy_module_path": "the daemon decides what leaves, for all engines together",
    "secondary_tiers": "the daemon brings its own tiers (kvstore serve --disk-dir, --redis-url)",
    "sync_load_budget_bytes": "a load inside of a step cannot be computed again where it fails",
    "tier_poll_interval_s": "the daemon brings its own tiers, and nothing is polled",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSettings:
    """What the user asked for, checked.

    Attributes:
        share_bytes: vLLM's `cpu_bytes_to_use`: this engine's share of the pool; 0: no limit but the pool.
        store_threshold: vLLM's: a block is stored when it is offered for this many times; below 2: at once.
        max_tracker_size: vLLM's: most blocks whose offers are counted for that.
        endpoint: `unix:PATH` or `HOST:PORT`; None: the default endpoint.
        autostart: Start a daemon of `share_bytes` if there is none.
        token: Access token, if the daemon asks for one.
        tenant: Keeps blocks of different owners apart.
        require_salt: Requests without a `cache_salt` are neither stored nor looked up.
        drop_on_load: Blocks are claimed when they are found, and leave every tier when they are loaded.
        load_policy: "auto": load what is faster to load than to compute; "always": load what is there.
        verdict_deadline_s: Longest time a request waits for the answer to its lookup; then it is a miss.
        pending_deadline_s: Longest time a request waits for its blocks to be brought up from disk; what has not come up
            by then is computed.
        pd_wait_s: Longest time a request that was prefilled elsewhere waits for blocks on their way from there.
        timeout_s: Deadline of one call to the daemon, made in the background.
        stock_blocks: Most empty slots held in reserve for the next stores; 0: as many as two steps can fill.
        staging_bytes: Where the daemon is on another host: memory of each worker for blocks on their way.
        data_congestion: TCP congestion control on the way there, as in kvstore.connect.
        tls_ca, tls_cert, tls_key: PEM files for a HOST:PORT that speaks TLS; without tls_ca there is no TLS.
        copy_threads: Threads that copy between KV memory on the host and the pool; 0: a quarter of the cores, max. 4.
        copy_engine: Which way bytes go between a GPU and the pool, one of engine_plugin.copy.paths.CHOICES.
        gds: Whether blocks on disk are read straight into GPU memory: "auto", "on" or "off"; None: as the daemon says.
    """

    share_bytes: int = 0
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    endpoint: str | None = None
    autostart: bool = False
    token: str | None = None
    tenant: str = ""
    require_salt: bool = False
    drop_on_load: bool = False
    load_policy: str = "auto"
    verdict_deadline_s: float = 0.5
    pending_deadline_s: float = 5.0
    pd_wait_s: float = 2.0
    timeout_s: float = 2.0
    stock_blocks: int = 0
    staging_bytes: int = STAGING_BYTES
    data_congestion: str = AUTO
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    copy_threads: int = 0
    copy_engine: str = "auto"
    gds: str | None = None

    @property
    def tls(self) -> Tls | None:
        """What to call the daemon with."""
        return Tls(self.tls_ca, self.tls_cert, self.tls_key) if self.tls_ca is not None else None

    def settled_copy_threads(self) -> int:
        """Copy threads with the default filled in."""
        return self.copy_threads or min(4, max(1, (os.cpu_count() or 1) // 4))


_NATIVE_FIELDS: Final = ("share_bytes", "store_threshold", "max_tracker_size")
#: What a text may be, where not everything goes.
_CHOICES: Final = {"load_policy": ("auto", "always"), "gds": ("auto", "on", "off")}
OWN_KEYS: Final = tuple(field.name for field in dataclasses.fields(PluginSettings) if field.name not in _NATIVE_FIELDS)


def parse_settings(extra: Mapping[str, Any]) -> PluginSettings:
    """Reads the plugin's settings.

    Raises:
        ConfigError: an unknown key or an impossible value; the message says what to write.
    """
    given: dict[str, Any] = {}
    for key, value in extra.items():
        name = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and name in OWN_KEYS:
            if value is not None:
                given[name] = _checked(key, name, value)
        elif key not in NATIVE_KEYS:
            _refuse_key(key, value)
    given.update(_native(extra))
    settings = PluginSettings(**given)
    if settings.copy_engine not in CHOICES:
        raise ConfigError(f"'kvstore.copy_engine' is {settings.copy_engine!r}: write one of {', '.join(CHOICES)}")
    if not settings.staging_bytes:
        raise ConfigError("'kvstore.staging_bytes' is 0: a worker needs room for several blocks")
    if settings.autostart and not settings.share_bytes:
        raise ConfigError("'kvstore.autostart' needs 'cpu_bytes_to_use': it says how large a daemon to start")
    return settings


def _refuse_key(key: str, value: Any) -> None:
    if key in _NATIVE_REFUSED:
        if not value:
            return  # off, which is what happens here
        raise ConfigError(f"kv_connector_extra_config: {key!r} does not work with kvstore: {_NATIVE_REFUSED[key]}")
    # By the names alone, so that a missing or needless "kvstore." does not lead astray; of equals, the kind that was
    # written.
    names = [PREFIX + name for name in OWN_KEYS] + list(NATIVE_KEYS)
    written = key.removeprefix(PREFIX).lower()
    near = max(
        names,
        key=lambda name: (
            difflib.SequenceMatcher(None, written, name.removeprefix(PREFIX)).ratio(),
            name.startswith(PREFIX) == key.startswith(PREFIX),
        ),
    )
    raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; did you mean {near!r}?")


def _native(extra: Mapping[str, Any]) -> dict[str, int]:
    """What vLLM's own keys say, where it is for this plugin to read."""
    policy = extra.get("eviction_policy")
    if policy not in (None, "lru"):
        raise ConfigError(
            f"'eviction_policy' is {policy!r}: the daemon decides for all engines together, by \"lru\"; leave it out"
        )
    for key in _NATIVE_BOOLS:
        if not isinstance(extra.get(key, False), bool | None):
            raise ConfigError(f"{key!r} is {extra[key]!r}: write true or false")
    given = {}
    for key, name in (
        ("cpu_bytes_to_use", "share_bytes"),
        ("store_threshold", "store_threshold"),
        ("max_tracker_size", "max_tracker_size"),
    ):
        value = extra.get(key)
        if value is None:
            continue
        try:
            given[name] = int(float(value))  # as a text too, and as 1e9: vLLM takes both
        except (TypeError, ValueError, OverflowError):
            what = "bytes" if name == "share_bytes" else "it"
            raise ConfigError(f"{key!r} is {value!r}: give {what} as a number, such as 1000000000") from None
        if given[name] < 0:
            raise ConfigError(f"{key!r} is {value!r}: it is a count and cannot be negative")
    return given


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
    if value not in _CHOICES.get(name, (value,)):
        raise ConfigError(f"{key!r} is {value!r}: write " + " or ".join(map(repr, _CHOICES[name])))
    return value
