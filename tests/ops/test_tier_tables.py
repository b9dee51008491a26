"""`[[tiers]]`: the order of what is below the pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.config import Settings
from kvstore.config_sources import gather, load_settings
from kvstore.errors import ConfigError
from kvstore.machine import Machine
from tests.ops.conftest import Run

ROOMY = Machine(available_bytes=64 << 30)
DISK = '[[tiers]]\nkind = "disk"\ndir = "/d"\nbytes = "1GB"\n'
REDIS = '[[tiers]]\nkind = "redis"\nurl = "redis://h:1"\n'
FLAGS_OF_BOTH = {"disk_dir": ("/d",), "disk_bytes": "1GB", "redis_url": "redis://h:1"}


def load(
    folder: Path, text: str, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    path = folder / "kvstore.toml"
    path.write_text(text)
    return load_settings({"cpu_bytes": "1GB", **(flags or {})}, path, environ or {}, ROOMY)


def refusal(
    folder: Path, text: str, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, text, flags, environ)
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("", ()),
        (DISK, ("disk",)),
        (REDIS, ("redis",)),
        (DISK + REDIS, ("disk", "redis")),
        (REDIS + DISK, ("redis", "disk")),
    ],
)
def test_the_order_is_that_of_the_tables(tmp_path: Path, text: str, order: tuple[str, ...]) -> None:
    settings = load(tmp_path, text)
    assert settings.tier_order == order
    assert (settings.disk_dir, settings.redis_url) == (
        (Path("/d"),) if "disk" in order else (),
        "redis://h:1" if "redis" in order else None,
    )


def test_flags_give_disk_before_redis(tmp_path: Path) -> None:
    assert load(tmp_path, "", FLAGS_OF_BOTH).tier_order == ("disk", "redis")
    assert load(tmp_path, 'redis_url = "redis://h:1"').tier_order == ("redis",)


def test_a_key_of_a_table_is_a_setting(tmp_path: Path) -> None:
    text = REDIS + 'bytes = "5GB"\nttl_s = 60\n' + DISK + "keep_promoted = true\n"
    settings = load(tmp_path, text)
    assert (settings.redis_bytes, settings.redis_ttl_s, settings.disk_keep_promoted) == (5 * 10**9, 60, True)
    origins = gather({}, tmp_path / "kvstore.toml", {})
    assert origins["redis_ttl_s"].place == f"[[tiers]] in {tmp_path / 'kvstore.toml'}"


def test_a_flag_wins_over_a_variable_over_a_key_of_a_table(tmp_path: Path) -> None:
    environ = {"KVSTORE_REDIS_URL": "redis://:secret@h:2", "KVSTORE_DISK_BYTES": "2GB"}
    settings = load(tmp_path, REDIS + DISK, {"disk_bytes": "3GB"}, environ)
    assert (settings.redis_url, settings.disk_bytes) == ("redis://:secret@h:2", 3 * 10**9)
    assert settings.tier_order == ("redis", "disk")
    # A table may leave it to a variable altogether.
    assert load(tmp_path, '[[tiers]]\nkind = "redis"', None, {"KVSTORE_REDIS_URL": "redis://h:3"}).redis_url


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tiers = 5", ["5", "[[tiers]]"]),
        ('tiers = ["disk"]', ["[[tiers]]"]),
        ("[tiers]\nkind = 'disk'", ["[[tiers]]"]),
        ("[[tiers]]\ndir = '/d'", ["number 1", "kind"]),
        (DISK + "[[tiers]]\nkind = 'reddis'", ["number 2", "'reddis'", "'redis'"]),
        ("[[tiers]]\nkind = ['disk']", ["['disk']"]),
        ("[[tiers]]\nkind = 'cpu'\nbytes = '1GB'", ["cpu_bytes"]),
        (DISK + DISK, ["'disk' twice", "dir = [...]"]),
        (REDIS + REDIS, ["'redis' twice"]),
        (DISK + "byts = 1", ["'byts'", "'bytes'"]),
        (DISK + "disk_bytes = 1", ["'disk_bytes'", "'bytes'"]),
        (DISK + "ttl_s = 1", ["'ttl_s'"]),
        ("disk_bytes = '1GB'\n" + DISK, ["'disk_bytes'", "in the table"]),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert str(tmp_path / "kvstore.toml") in message
    for part in parts:
        assert part in message


def test_what_a_table_lacks_is_named(tmp_path: Path) -> None:
    assert "'disk' has no dir" in refusal(tmp_path, "[[tiers]]\nkind = 'disk'\nbytes = '1GB'")
    assert "--disk-bytes" in refusal(tmp_path, "[[tiers]]\nkind = 'disk'\ndir = '/d'")
    assert "'redis' has no url" in refusal(tmp_path, "[[tiers]]\nkind = 'redis'")


def test_a_bad_value_names_the_table(tmp_path: Path) -> None:
    message = refusal(tmp_path, DISK.replace("1GB", "1GBB"))
    assert "disk_bytes ([[tiers]] in" in message


@pytest.mark.parametrize(
    ("text", "flags", "environ"),
    [
        (DISK, {"redis_url": "redis://h:1"}, {}),
        (DISK, {}, {"KVSTORE_REDIS_URL": "redis://h:1"}),
        ("redis_url = 'redis://h:1'\n" + DISK, {}, {}),
    ],
)
def test_a_tier_without_a_table_beside_tables_is_refused(
    tmp_path: Path, text: str, flags: Mapping[str, object], environ: Mapping[str, str]
) -> None:
    message = refusal(tmp_path, text, flags, environ)
    assert "--redis-url" in message and 'kind = "redis"' in message


def test_config_prints_tables_that_give_the_same_settings(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('cpu_bytes = "64MiB"\n' + REDIS.replace("h:1", "u:secret@h:1") + DISK)
    first = run("config", "--config", str(path))
    assert "# the order of the tiers: cpu -> redis -> disk" in first.out
    assert "secret" not in first.out and f"  # [[tiers]] in {path}" in first.out
    path.write_text(first.out)
    second = run("config", "--config", str(path))
    assert [line.partition("  # ")[0] for line in second.out.splitlines()] == [
        line.partition("  # ")[0] for line in first.out.splitlines()
    ]
    assert "cpu -> disk" in run("config", "--cpu-bytes", "64MiB", "--disk-dir", "/d", "--disk-bytes", "1GB").out
