from __future__ import annotations

import abc
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from engine_plugin.vllm import compat
from engine_plugin.vllm.guard import RateLimitedLog, guarded
from engine_plugin.vllm.settings import NATIVE_KEYS, OWN_KEYS, PREFIX, PluginSettings, parse_settings
from kvstore.errors import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_native_keys_and_ours() -> None:
    settings = parse_settings(
        {
            "block_size": 64,
            "cpu_bytes_to_use": 1e9,
            "eviction_policy": "lru",
            "store_threshold": 2,
            "max_tracker_size": 1000,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "secondary_tiers": [],
            "kvstore.endpoint": "unix:/x/y.sock",
            "kvstore.autostart": True,
            "kvstore.verdict_deadline_s": 1,
        }
    )
    assert settings == PluginSettings(
        share_bytes=1_000_000_000,
        store_threshold=2,
        max_tracker_size=1000,
        endpoint="unix:/x/y.sock",
        autostart=True,
        verdict_deadline_s=1.0,
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kvstore.endpont": "unix:/x"}, "did you mean 'kvstore.endpoint'"),
        ({"kvstore.auto_start": True}, "did you mean 'kvstore.autostart'"),
        ({"endpoint": "unix:/x"}, "unknown key 'endpoint'; did you mean 'kvstore.endpoint'"),
        ({"kvstore.block_size": 64}, "did you mean 'block_size'"),
        ({"blocksize": 64}, "did you mean 'block_size'"),
        ({"cpu_bytes": 1}, "did you mean 'cpu_bytes_to_use'"),
        ({"CPU_BYTES_TO_USE": 1}, "did you mean 'cpu_bytes_to_use'"),
        ({"offload_prompt": False}, "did you mean 'offload_prompt_only'"),
        ({"sync_load_budget_bytes": 1}, "does not work with kvstore: a load inside of a step"),
        ({"secondary_tiers": [{"type": "fs"}]}, "the daemon brings its own tiers"),
        ({"eviction_policy": "arc"}, 'by "lru"; leave it out'),
        ({"offload_prompt_only": "false"}, "write true or false"),
        ({"store_threshold": "many"}, "as a number"),
        ({"store_threshold": -1}, "cannot be negative"),
        ({"kvstore.autostart": "yes"}, "write true or false"),
        ({"kvstore.load_policy": "never"}, "write 'auto' or 'always'"),
        ({"kvstore.timeout_s": -1}, "not negative"),
        ({"kvstore.timeout_s": 0}, "above 0"),
        ({"kvstore.copy_threads": True}, "write a number"),
        ({"kvstore.endpoint": ""}, "not empty"),
        ({"cpu_bytes_to_use": "much"}, "give bytes as a number"),
        ({"cpu_bytes_to_use": -1}, "cannot be negative"),
        ({"kvstore.autostart": True}, "needs 'cpu_bytes_to_use'"),
    ],
)
def test_what_cannot_be_is_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_settings(extra)


def test_the_documented_keys_are_those_that_exist() -> None:
    rows = re.findall(r"^\| (`[\w.`, ]+`) \| ([^|]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    table = {key: default for keys, default in rows for key in re.findall(r"`([\w.]+)`", keys)}
    assert set(NATIVE_KEYS) <= set(table)
    documented = {key.removeprefix(PREFIX): default for key, default in table.items() if key.startswith(PREFIX)}
    assert set(documented) == set(OWN_KEYS)
    for field in dataclasses.fields(PluginSettings):
        if field.type == "bool":
            assert documented[field.name] == str(field.default).lower()
        elif field.type == "float":
            assert float(documented[field.name]) == field.default


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0"])
def test_supported_versions(version: str) -> None:
    compat.require_supported_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(compat.UnsupportedEngine, match=r"0\.32\.x and 0\.33\.x"):
        compat.require_supported_version(version)


def test_a_base_class_that_lost_a_parameter_is_refused() -> None:
    class Changed:
        class OffloadingManager:
            def lookup(self, key: bytes) -> None: ...

    with pytest.raises(compat.UnsupportedEngine, match=r"OffloadingManager\.lookup has no parameter req_context"):
        compat.require_signatures(find=lambda _name: Changed)


def test_who_tells_of_sleep() -> None:
    class Tells:
        def unregister_kv_caches(self) -> None: ...

    assert compat.tells_of_sleep(Tells)
    assert not compat.tells_of_sleep(object)


def test_a_hook_that_is_new_or_passes_more_is_refused() -> None:
    class Base(abc.ABC):
        @abc.abstractmethod
        def lookup(self, key: bytes) -> None: ...

        def submit(self, job: int, urgent: bool = False) -> None:
            raise NotImplementedError

        @classmethod
        def definitions(cls, extra: dict[str, Any]) -> None:
            raise NotImplementedError

    class Fits(Base):
        def lookup(self, key: bytes) -> None: ...

        def submit(self, job: int, urgent: bool = False, more: int = 0) -> None: ...

        @classmethod
        def definitions(cls, *args: Any, **kwargs: Any) -> None: ...

    class Lacks(Base):
        def submit(self, job: int) -> None: ...

    compat.require_overrides((Fits, Base))
    with pytest.raises(
        compat.UnsupportedEngine, match=r"lookup is new and is not served; Base\.submit has a new parameter urgent"
    ):
        compat.require_overrides((Lacks, Base))


def test_a_hook_that_fails_is_counted_and_answered() -> None:
    from collections import Counter

    class Hooks:
        def __init__(self) -> None:
            self.hook_errors: Counter[str] = Counter()

        @guarded(lambda _self, value: -value)
        def half(self, value: int) -> int:
            if value % 2:
                raise ValueError(value)
            return value // 2

    hooks = Hooks()
    assert [hooks.half(4), hooks.half(3)] == [2, -3]
    assert hooks.hook_errors == {"half": 1}


def test_log_is_rate_limited_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RateLimitedLog(every_s=30, now=lambda: now[0])
    with caplog.at_level("WARNING", logger="vllm.kvstore"):
        for _ in range(5):
            log("a", 30, "first")
        log("b", 30, "second")
        now[0] = 31
        log("a", 30, "first")
    assert [record.getMessage() for record in caplog.records] == ["first", "second", "first (4 more like this before)"]
