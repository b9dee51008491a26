from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pydantic
import pytest

from kvstore.config import Limits, Settings, parse_bytes
from kvstore.config_sources import FLAGS, flag_of, gather, load_settings, variable_of
from kvstore.errors import ConfigError
from kvstore.machine import OWN_BYTES, Machine

GIB = 1 << 30
ROOMY = Machine(available_bytes=64 * GIB)


def load(
    flags: Mapping[str, object] | None = None,
    toml: Path | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine = ROOMY,
) -> Settings:
    return load_settings({"cpu_bytes": "1GB"} if flags is None else flags, toml, environ or {}, machine)


def refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*args, **kwargs)  # type: ignore[arg-type]
    message = str(refused.value)
    assert len(message.splitlines()) == 1
    return message


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "kvstore.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("1e9", 10**9),
        ("1.5e9", 1_500_000_000),
        ("1GB", 10**9),
        ("1 GB", 10**9),
        ("1gb", 10**9),
        ("1GiB", GIB),
        ("0.5GiB", GIB // 2),
        ("1_000_000_000", 10**9),
        ("1000000000", 10**9),
        (10**9, 10**9),
        (1e9, 10**9),
        ("16MiB", 16 << 20),
    ],
)
def test_sizes(written: object, size_bytes: int) -> None:
    assert load({"cpu_bytes": written}).cpu_bytes == size_bytes


@pytest.mark.parametrize("written", ["", "x", "1GBB", "nan", "inf", "-1GB", "-5", "1e-3", True, [1]])
def test_what_is_no_size(written: object) -> None:
    assert "cpu_bytes (--cpu-bytes) is" in refusal({"cpu_bytes": written})


def test_a_pool_that_is_too_small_is_refused_with_the_least_size() -> None:
    assert str(16 << 20) in refusal({"cpu_bytes": (16 << 20) - 1})


@pytest.mark.parametrize(
    ("machine", "number"),
    [
        (Machine(available_bytes=3 * GIB), 3 * GIB - OWN_BYTES),
        # A pool of all that a container's limit leaves is killed for it as soon as it is full.
        (Machine(available_bytes=64 * GIB, cgroup_room_bytes=2 * GIB), 2 * GIB - OWN_BYTES),
        (Machine(available_bytes=1 * GIB, hugetlb_free_bytes=2 * GIB), 2 * GIB),
    ],
)
def test_a_pool_larger_than_the_machine_is_refused_with_the_numbers(machine: Machine, number: int) -> None:
    load({"cpu_bytes": number}, machine=machine)
    message = refusal({"cpu_bytes": number + 1}, machine=machine)
    assert str(number) in message and str(number + 1) in message and str(machine.available_bytes) in message


def test_reserved_huge_pages_are_no_room_for_a_pool_that_may_not_use_them() -> None:
    machine = Machine(available_bytes=GIB, hugetlb_free_bytes=8 * GIB)
    load({"cpu_bytes": 8 * GIB, "hugepages": "hugetlb"}, machine=machine)
    assert str(GIB - OWN_BYTES) in refusal({"cpu_bytes": 8 * GIB, "hugepages": "off"}, machine=machine)


def test_the_size_of_the_pool_must_be_given() -> None:
    message = refusal({})
    assert "--cpu-bytes" in message and "KVSTORE_CPU_BYTES" in message


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    toml = toml_file(tmp_path, 'cpu_bytes = "1GB"\nblock_size = 16\ndrain_s = 1\nkeys_max = 7\n')
    environ = {"KVSTORE_BLOCK_SIZE": "32", "KVSTORE_DRAIN_S": "2"}
    flags = {"block_size": "128", "keys_max": None, "listen": ()}
    settings = load(flags, toml, environ)
    assert (settings.block_size, settings.drain_s, settings.keys_max) == (128, 2.0, 7)
    origins = gather(flags, toml, environ)
    assert origins["block_size"].place == "--block-size"
    assert origins["drain_s"].place == "$KVSTORE_DRAIN_S"
    assert origins["keys_max"].place == str(toml)
    assert origins["listen"].place == "default"


def test_every_setting_can_be_given_in_all_three_ways(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    written: dict[str, object] = {
        "cpu_bytes": 10**9,
        "disk_dir": [str(tmp_path / "disk-0"), str(tmp_path / "disk-1")],
        "disk_bytes": 10**9,
        "disk_write_policy": "back",
        "disk_keep_promoted": True,
        "gds": "on",
        "redis_url": "redis://:secret@127.0.0.1:6379/0",
        "redis_bytes": 10**9,
        "redis_ttl_s": 3600,
        "redis_key_prefix": "kv:",
        "redis_connections": 2,
        "redis_deadline_s": 0.5,
        "peer": ["192.0.2.1:7070", "cache.lan:7071"],
        "peer_deadline_s": 0.125,
        "block_size": 16,
        "listen": ["unix:/a", "127.0.0.1:7070"],
        "token_file": str(token),
        "data_listen": "127.0.0.1:7080",
        "data_congestion": "reno",
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
        "tls_ca": str(tmp_path / "ca.pem"),
        "tls_clients": "verified",
        "hugepages": "off",
        "populate_threads": 3,
        "drain_s": 1.5,
        "message_bytes_max": 1 << 20,
        "keys_max": 1000,
        "metrics_listen": "127.0.0.1:9464",
        "log_level": "debug",
        "log_format": "json",
    }
    assert set(written) == set(FLAGS)
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in written.items()]
    texts = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in written.items()}
    several = {name: tuple(value) for name, value in written.items() if isinstance(value, list)}
    as_flags = load({**texts, **several})
    as_variables = load({}, None, {variable_of(name): text for name, text in texts.items()})
    as_file = load({}, toml_file(tmp_path, "".join(lines)))
    assert as_flags == as_variables == as_file
    assert [str(endpoint) for endpoint in as_file.listen] == written["listen"]
    assert as_file != load()


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    toml = toml_file(tmp_path, "block_size = 16")
    assert load(environ={"KVSTORE_CONFIG": str(toml)}).block_size == 16
    assert load(toml=toml_file(tmp_path, "block_size = 32"), environ={"KVSTORE_CONFIG": "/nowhere"}).block_size == 32


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("cpu_byts = 1", ["'cpu_byts'", "'cpu_bytes'"]),
        ("cpu-bytes = 1", ["'cpu-bytes'", "'cpu_bytes'"]),
        ("[daemon]\ncpu_bytes = 1", ["'daemon'", "nearest"]),
        ("cpu_bytes =", ["is not TOML", "line 1"]),
        ("hugepages = 'tph'", ["'tph'", "'thp'"]),
        ("block_size = 0", ["block_size", "greater than or equal to 1"]),
        ("block_size = '1.5'", ["block_size", "integer"]),
        ("drain_s = inf", ["drain_s", "finite"]),
        ("listen = [5]", ["listen"]),
        ("listen = []", ["listen"]),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    toml = toml_file(tmp_path, text)
    message = refusal(None, toml)
    assert str(toml) in message
    for part in parts:
        # The one thing that tomllib words differently from release to release is where a document ends.
        assert part in message or (part == "line 1" and "end of document" in message)


@pytest.mark.parametrize(
    ("path", "reason"), [("/nowhere/kvstore.toml", "No such file"), ("/", "Is a directory"), ("/proc/self/mem", "")]
)
def test_a_file_that_cannot_be_read_is_named(path: str, reason: str) -> None:
    message = refusal(None, Path(path))
    assert path in message and reason in message


@pytest.mark.parametrize(
    ("second", "word"), [("disk", "twice"), ("./disk/../disk", "twice"), ("link", "twice"), ("disk/more", "inside")]
)
def test_disks_that_are_one_are_refused(tmp_path: Path, second: str, word: str) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    text = f"disk_dir = ['{tmp_path}/disk', '{tmp_path}/{second}']\ndisk_bytes = '64MiB'\ncpu_bytes = '64MiB'"
    assert word in refusal(None, toml_file(tmp_path, text))


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    message = refusal(environ={"KVSTORE_BLOCKSIZE": "16"})
    assert "KVSTORE_BLOCKSIZE" in message and "'KVSTORE_BLOCK_SIZE'" in message


def test_other_variables_are_none_of_our_business() -> None:
    kubernetes = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "7070",
        "KVSTORE_SERVICE_PORT_GRPC": "7070",
        "KVSTORE_PORT": "tcp://10.0.0.1:7070",
        "KVSTORE_PORT_7070_TCP": "tcp://10.0.0.1:7070",
        "KVSTORE_PORT_7070_TCP_PROTO": "tcp",
        "KVSTORE_PORT_7070_TCP_PORT": "7070",
        "KVSTORE_PORT_7070_TCP_ADDR": "10.0.0.1",
        "KVSTORE_BLUE_SERVICE_HOST": "10.0.0.2",
    }
    assert load(environ={**kubernetes, "HOME": "/", "XKVSTORE_A": "1"}) == load()
    # What only looks like one of them is a slip.
    assert "KVSTORE_PORT" in refusal(environ={"KVSTORE_PORT": "7070"})


def test_an_unknown_flag_is_refused_with_the_nearest_name() -> None:
    assert "'--cpu-bytes'" in refusal({"cpu_byte": 1})


def test_the_endpoint_variable_is_where_the_daemon_listens() -> None:
    settings = load(environ={"KVSTORE_ENDPOINT": "unix:/x/y.sock"})
    assert [str(endpoint) for endpoint in settings.listen] == ["unix:/x/y.sock"]
    assert gather({}, None, {"KVSTORE_ENDPOINT": "unix:/x"})["listen"].place == "$KVSTORE_ENDPOINT"
    assert "KVSTORE_ENDPOINT" in refusal(environ={"KVSTORE_ENDPOINT": "nonsense"})


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:7070", "cache.lan:7070"])
def test_a_listener_for_other_machines_needs_a_token(tmp_path: Path, address: str) -> None:
    assert "--token-file" in refusal({"cpu_bytes": "1GB", "listen": (address,)})
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    settings = load({"cpu_bytes": "1GB", "listen": (address,), "token_file": str(token)})
    assert settings.read_token() == "0123456789abcdef"


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "[::1]:7070", "localhost:7070", "unix:/x"])
def test_a_listener_for_this_machine_needs_none(address: str) -> None:
    assert load({"cpu_bytes": "1GB", "listen": (address,)}).read_token() is None


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"data_listen": "127.0.0.1:7080"}, "--listen HOST:PORT"),
        ({"data_congestion": "no_such_thing"}, "one of"),
        ({"data_congestion": "name that is too long"}, "one of"),
        ({"data_listen": "unix:/x", "listen": ("127.0.0.1:7070",)}, "HOST:PORT"),
        ({"data_listen": "0.0.0.0:7080", "listen": ("127.0.0.1:7070",)}, "--token-file"),
        ({"tls_cert": "/cert", "listen": ("127.0.0.1:7070",)}, "--tls-key"),
        ({"tls_cert": "/cert", "tls_key": "/key", "listen": ("unix:/x",)}, "HOST:PORT"),
        ({"tls_ca": "/ca", "listen": ("127.0.0.1:7070",)}, "--tls-cert"),
        (
            {"tls_cert": "/c", "tls_key": "/k", "tls_clients": "verified", "listen": ("127.0.0.1:7070",)},
            "--tls-ca FILE",
        ),
        ({"peer": ("unix:/x",)}, "HOST:PORT"),
        ({"peer": ("127.0.0.1:7070",), "listen": ("127.0.0.1:7070",)}, "this daemon itself"),
        ({"peer": ("a:1", "a:1")}, "twice"),
    ],
)
def test_network_settings_that_cannot_be(flags: dict[str, object], part: str) -> None:
    assert part in refusal({"cpu_bytes": "1GB", **flags})


@pytest.mark.parametrize("content", [b"", b"short", b"0123456789abcdef 0123456789abcdef", b"0123456789abcde\xff", None])
def test_a_token_file_that_cannot_serve_is_refused_without_telling_the_token(
    tmp_path: Path, content: bytes | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    message = refusal({"cpu_bytes": "1GB", "token_file": str(token)})
    assert str(token) in message and "urandom" in message
    assert not content or "0123456789" not in message


def test_settings_that_cannot_both_be() -> None:
    assert "twice" in refusal({"cpu_bytes": "1GB", "listen": ("/a", "unix:/a")})
    assert "twice" in refusal({"cpu_bytes": "1GB", "listen": ("[::1]:7",), "metrics_listen": "[::1]:7"})
    load({"cpu_bytes": "1GB", "listen": ("127.0.0.1:0", "127.0.0.1:0")})
    assert "HTTP" in refusal({"cpu_bytes": "1GB", "metrics_listen": "unix:/a"})
    message = refusal({"cpu_bytes": "1GB", "keys_max": 1000, "message_bytes_max": "64KiB"})
    assert "--keys-max" in message and "--message-bytes-max" in message


def test_several_findings_come_in_one_line() -> None:
    message = refusal({"cpu_bytes": "1GB", "block_size": "0", "log_level": "warn"})
    assert "block_size" in message and "log_level" in message


def test_settings_do_not_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        load().block_size = 1


def test_limits_follow_the_two_settings() -> None:
    limits = load({"cpu_bytes": "1GB", "keys_max": 9, "message_bytes_max": "1MiB"}).limits
    assert (limits.keys_max, limits.message_bytes_max) == (9, 1 << 20)
    assert load().limits == Limits()


def test_every_setting_says_its_unit_and_what_it_does() -> None:
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict) and field.json_schema_extra["unit"], name
        assert field.description and field.description.rstrip(")").endswith("."), name
        assert flag_of(name).startswith("--")


def test_a_size_of_a_command_is_read_like_a_setting() -> None:
    assert parse_bytes("1GiB", "--free") == GIB
    with pytest.raises(ConfigError, match="--free is 'x'"):
        parse_bytes("x", "--free")
