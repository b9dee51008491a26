"""The daemon's settings: names, units, defaults and what they must satisfy. Where they come from: config_sources.

pydantic checks and converts. Its companion pydantic-settings is not used: it reads only ``os.environ``, it cannot say
which variable is unknown nor where a value came from, and its import is as long as that of all the rest together, in a
process that promises to be ready within a second.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import pydantic

from kvstore import congestion
from kvstore.blocks import KEY_BYTES_MAX
from kvstore.endpoint import Endpoint, default_endpoint, parse_endpoint
from kvstore.errors import ConfigError
from kvstore.secret import read_token
from kvstore.tier_tables import KINDS

_MIB: Final = 1 << 20
#: Sizes are 64 bits in messages and in offsets.
_BYTES_MAX: Final = 1 << 62
#: What to write where a size cannot be read.
SIZE_ADVICE: Final = "write a size such as 1GB, 1GiB, 1e9 or 1000000000"
#: Every key costs its own bytes, a tag and a length of at most two bytes in a message.
_KEY_WIRE_BYTES_MAX: Final = KEY_BYTES_MAX + 3


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of the wire. What goes over one is answered RESOURCE_EXHAUSTED with the limit named.

    Attributes:
        keys_max: Keys in one call. A 1 M token prompt of 16-token blocks has 65,536.
        message_bytes_max: Bytes of one gRPC message. Room for `keys_max` of the longest keys, and four times gRPC's own
            default of 4 MiB, which a batch of a long prompt already passes.
        sessions_max: Sessions at once. Each holds a stream and an fd of the daemon; a host runs tens of engines.
        wait_s_max: Longest wait that a Select or a Reserve may ask for, so that no forgotten call waits for ever.
    """

    keys_max: int = 65_536
    message_bytes_max: int = 16 * _MIB
    sessions_max: int = 4_096
    wait_s_max: float = 600.0


def _parse_bytes(value: object) -> object:
    """`1e9` and `1_000` are numbers to people; the library below reads only digits and units."""
    if isinstance(value, bool):
        raise ValueError(SIZE_ADVICE)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{value} is not a whole number of bytes")
        return int(value)
    return value


def _check_bytes(value: int) -> int:
    if value > _BYTES_MAX:
        raise ValueError(f"more than any machine has ({_BYTES_MAX})")
    return value


def _parse_listeners(value: object) -> object:
    texts: object = value
    if isinstance(value, str):
        texts = [part for part in value.split(",") if part.strip()]
    if not isinstance(texts, (list, tuple)):
        raise ValueError("write one endpoint or a list of them")
    return tuple(_parse_endpoint(text) for text in texts)


def _parse_folders(value: object) -> object:
    texts: object = value
    if isinstance(value, str):
        texts = [part for part in value.split(",") if part.strip()]
    if not isinstance(texts, (list, tuple)):
        raise ValueError("write one folder or a list of them")
    return tuple(Path(text.strip()).absolute() if isinstance(text, str) else text for text in texts)


def _parse_endpoint(value: object) -> object:
    return parse_endpoint(value) if isinstance(value, str) else value


def _field(unit: str, default: Any = dataclasses.MISSING, *, help: str, metavar: str = "", **checks: Any) -> Any:
    """A setting: unit and help are what `--help` and docs/config.md print."""
    extra: dict[str, Any] = {"unit": unit, "metavar": metavar or unit.upper()}
    if callable(default):
        checks["default_factory"] = default
    elif default is not dataclasses.MISSING:
        checks["default"] = default
    return pydantic.Field(description=help, json_schema_extra=extra, **checks)


Bytes = Annotated[pydantic.ByteSize, pydantic.BeforeValidator(_parse_bytes), pydantic.AfterValidator(_check_bytes)]
Folders = Annotated[tuple[Path, ...], pydantic.BeforeValidator(_parse_folders)]
Listeners = Annotated[tuple[Endpoint, ...], pydantic.BeforeValidator(_parse_listeners)]
Address = Annotated[Endpoint, pydantic.BeforeValidator(_parse_endpoint)]


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


class Settings(pydantic.BaseModel):
    """What `kvstore serve` is told. Made by :func:`load_settings`; made directly, only the values given are looked
    at.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cpu_bytes: Bytes = _field(
        "bytes",
        ge=16 * _MIB,
        metavar="SIZE",
        help="Size of the pool in memory, with all its bookkeeping: 1GB, 1GiB, 1e9 or a plain number of bytes. "
        "Required. At least 16 MiB, at most what the machine has free.",
    )
    disk_dir: Folders = _field(
        "folder",
        (),
        help="Folder of the disk tier, for this daemon alone; made where there is none. May be repeated, one for each "
        "device: blocks are spread over them. Default: no disk tier.",
    )
    disk_bytes: Bytes | None = _field(
        "bytes",
        None,
        ge=4 * _MIB,
        metavar="SIZE",
        help="Hard budget of each --disk-dir, with its index and all. Required with --disk-dir.",
    )
    disk_write_policy: Literal["through", "back"] = _field(
        "choice",
        "through",
        help="When a block is copied to disk. through: as soon as it is stored, so that a restart loses little. back: "
        "when its turn to leave the pool has come, and at a clean stop. Redis below the disk gets it right after.",
    )
    disk_keep_promoted: bool = _field(
        "choice",
        False,
        metavar="true|false",
        help="Whether the disk keeps what came up from Redis too, so that the next time it need not come over the "
        "network.",
    )
    gds: Literal["auto", "on", "off"] = _field(
        "choice",
        "auto",
        metavar="auto|on|off",
        help="Whether engines read blocks on disk straight into a GPU's memory (GPUDirect Storage), past the pool. "
        "auto: where the driver has nvidia-fs and it is the faster way. on: also through host memory of the engine, "
        "where there is no nvidia-fs. An engine's kvstore.gds goes before this.",
    )
    redis_url: str | None = _field(
        "url",
        None,
        help="Redis or Valkey below the other tiers, shared by daemons on several hosts: redis://, rediss:// (TLS), "
        "redis+cluster://, redis+sentinel:// or unix:// (its socket), with user, password and database. Default: no "
        "Redis tier.",
    )
    redis_bytes: Bytes | None = _field(
        "bytes",
        None,
        ge=_MIB,
        metavar="SIZE",
        help="Budget of all blocks under the key prefix in Redis, for a server without a maxmemory of its own.",
    )
    redis_ttl_s: int | None = _field(
        "seconds",
        None,
        ge=1,
        help="How long a block stays in Redis after it was stored. Default: until it is evicted.",
    )
    redis_key_prefix: str = _field(
        "text",
        "kvstore:",
        help="What every key in Redis begins with. Daemons that share blocks use the same.",
    )
    redis_connections: int = _field(
        "connections",
        4,
        ge=2,
        le=64,
        help="Connections to each server.",
    )
    redis_deadline_s: float = _field(
        "seconds",
        0.25,
        gt=0,
        le=60,
        help="How long Redis may take to answer, or to move the next bytes, before it counts as a miss.",
    )
    peer: Listeners = _field(
        "endpoint",
        (),
        metavar="HOST:PORT",
        help="Another daemon that is asked for what is not here. May be repeated. It is called with --token-file and, "
        "where this daemon has --tls-cert, over TLS.",
    )
    peer_deadline_s: float = _field(
        "seconds",
        0.25,
        gt=0,
        le=60,
        help="How long a peer may take to say what it has, or to move the next bytes, before it counts as a miss.",
    )
    block_size: int = _field(
        "tokens",
        64,
        ge=1,
        le=1 << 20,
        help="Tokens per block that the daemon advertises. An engine with another block size is served in a "
        "namespace of its own.",
    )
    listen: Listeners = _field(
        "endpoint",
        lambda: (default_endpoint(),),
        min_length=1,
        help="Where to listen: unix:PATH (folder 0700, socket 0600) or HOST:PORT. May be repeated. A HOST that other "
        "machines can reach needs --token-file. Default: $KVSTORE_ENDPOINT, else "
        "unix:$XDG_RUNTIME_DIR/kvstore/kvstore.sock, else unix:/run/kvstore/kvstore.sock.",
    )
    token_file: Path | None = _field(
        "file",
        None,
        help="File with the bearer token that every call on a HOST:PORT listener must carry. Calls on a Unix socket "
        "need none: the socket's permissions decide.",
    )
    data_listen: Address | None = _field(
        "endpoint",
        None,
        metavar="HOST:PORT",
        help="Where the bytes of blocks travel for clients of other hosts and for peers. Default: the HOST of the "
        "first HOST:PORT listener and a free port, which clients learn when they attach.",
    )
    data_congestion: str = _field(
        "text",
        congestion.AUTO,
        metavar="auto|system|NAME",
        help="TCP congestion control that the bytes of blocks are sent with. auto: one that goes by loss (cubic, else "
        "reno) where both ends are on this host, else the system's. system: the system's. NAME: that one.",
    )
    tls_cert: Path | None = _field(
        "file",
        None,
        help="Certificate (PEM, with its chain) of the HOST:PORT listeners and of the data port, which then speak TLS.",
    )
    tls_key: Path | None = _field("file", None, help="Key of --tls-cert (PEM).")
    tls_ca: Path | None = _field(
        "file",
        None,
        help="CA certificates (PEM) that those of peers, and of clients where --tls-clients says so, must come from. "
        "Default: those of the system, for peers.",
    )
    tls_clients: Literal["any", "verified"] = _field(
        "choice",
        "any",
        metavar="any|verified",
        help="verified: clients on HOST:PORT must show a certificate that --tls-ca signed.",
    )
    hugepages: Literal["auto", "hugetlb", "thp", "off"] = _field(
        "choice",
        "auto",
        metavar="auto|hugetlb|thp|off",
        help="Page size of the pool. auto: reserved huge pages, else transparent ones, else 4 KiB pages with one "
        "warning. hugetlb and thp: only that kind, or the daemon does not start. off: 4 KiB pages.",
    )
    populate_threads: int = _field(
        "threads",
        lambda: min(4, _cpus()),
        ge=1,
        le=64,
        help="Threads that touch the pool's pages after the start. Default: the CPUs of this process, at most 4.",
    )
    drain_s: float = _field(
        "seconds",
        10.0,
        ge=0,
        le=3600,
        help="How long a stopping daemon waits for leases and reservations to come back.",
    )
    message_bytes_max: Bytes = _field(
        "bytes",
        Limits().message_bytes_max,
        ge=64 * 1024,
        le=1 << 30,
        metavar="SIZE",
        help="Largest gRPC message, in either direction. Must hold keys_max keys of the longest kind.",
    )
    keys_max: int = _field(
        "keys",
        Limits().keys_max,
        ge=1,
        le=1 << 20,
        help="Most keys in one call.",
    )
    metrics_listen: Address | None = _field(
        "endpoint",
        None,
        metavar="HOST:PORT",
        help="Serve Prometheus metrics over HTTP there, at /metrics. Default: no listener (`kvstore stats "
        "--prometheus` prints the same text).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _field(
        "choice",
        "info",
        metavar="debug|info|warning|error",
        help="Least important log line that is written.",
    )
    log_format: Literal["auto", "console", "json"] = _field(
        "choice",
        "auto",
        metavar="auto|console|json",
        help="Log lines on stderr. auto: console on a terminal, one JSON object a line in a pipe.",
    )

    tiers: tuple[Literal["disk", "redis"], ...] = _field(
        "tables",
        (),
        metavar="",
        help="Only in the file: one [[tiers]] table for each tier below the pool, in the order in which blocks are "
        "copied down and looked for. Default: disk, then Redis, as far as they are set.",
    )

    @pydantic.field_validator("data_congestion")
    @classmethod
    def _congestion_is_there(cls, value: str) -> str:
        try:
            return congestion.check_choice(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @pydantic.field_validator("metrics_listen")
    @classmethod
    def _metrics_speak_http(cls, value: Endpoint | None) -> Endpoint | None:
        if value is not None and value.is_unix:
            raise ValueError(f"metrics are served over HTTP on HOST:PORT, not on {value}")
        return value

    @pydantic.model_validator(mode="after")
    def _agree(self) -> Self:
        """Rules about several settings at once."""
        seen: set[Endpoint] = set()
        for endpoint in (*self.listen, *([self.metrics_listen] if self.metrics_listen else [])):
            # Port 0 is a different port each time.
            if endpoint in seen and (endpoint.is_unix or endpoint.port):
                raise ValueError(f"{endpoint} is listened on twice: remove one --listen or --metrics-listen")
            seen.add(endpoint)
            if endpoint != self.metrics_listen and not endpoint.is_loopback and self.token_file is None:
                raise ValueError(
                    f"--listen {endpoint} can be reached from other machines and needs --token-file FILE"
                    " (or listen on 127.0.0.1 or a Unix socket)"
                )
        self._check_network()
        given = [kind for kind, first in zip(KINDS, (self.disk_dir, self.redis_url), strict=True) if first]
        for kind, first in zip(KINDS, ("dir", "url"), strict=True):
            if self.tiers and kind in given and kind not in self.tiers:
                raise ValueError(
                    f"--{kind}-{first} names a tier that has no [[tiers]] table, which say the order: add one with"
                    f' kind = "{kind}", or remove the flag'
                )
            if kind in self.tiers and kind not in given:
                raise ValueError(f"[[tiers]] of kind {kind!r} has no {first}: write it there, or --{kind}-{first}")
        if self.disk_dir and self.disk_bytes is None:
            raise ValueError("--disk-dir needs --disk-bytes SIZE: the budget of the disk tier is never open-ended")
        if self.disk_bytes is not None and not self.disk_dir:
            raise ValueError("--disk-bytes needs --disk-dir FOLDER")
        if self.redis_bytes is not None and self.redis_url is None:
            raise ValueError("--redis-bytes needs --redis-url URL")
        folders = [Path(os.path.realpath(folder)) for folder in self.disk_dir]
        if len(set(folders)) != len(folders):
            raise ValueError(f"--disk-dir names a folder twice: {', '.join(map(str, self.disk_dir))}")
        if any(folder in other.parents for folder in folders for other in folders):
            raise ValueError(f"--disk-dir names a folder inside of another: {', '.join(map(str, self.disk_dir))}")
        if self.keys_max * _KEY_WIRE_BYTES_MAX > self.message_bytes_max:
            raise ValueError(
                f"{self.keys_max} keys (--keys-max) of {KEY_BYTES_MAX} bytes do not fit a message of"
                f" {int(self.message_bytes_max)} bytes (--message-bytes-max):"
                f" it takes {self.keys_max * _KEY_WIRE_BYTES_MAX}"
            )
        return self

    def _check_network(self) -> None:
        """Rules about the data port, TLS and peers."""
        if self.data_listen is not None:
            if self.data_listen.is_unix or self.first_tcp is None:
                raise ValueError("--data-listen is HOST:PORT, and needs a --listen HOST:PORT beside it")
            if not self.data_listen.is_loopback and self.token_file is None:
                raise ValueError(
                    f"--data-listen {self.data_listen} can be reached from other machines and needs --token-file FILE"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_cert is not None and self.first_tcp is None:
            raise ValueError("--tls-cert is for HOST:PORT listeners, and there is none")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key")
        if self.tls_clients == "verified" and self.tls_ca is None:
            raise ValueError("--tls-clients verified needs --tls-ca FILE")
        for peer in self.peer:
            if peer.is_unix or not peer.port:
                raise ValueError(f"--peer {peer}: a peer is HOST:PORT")
            if peer in self.listen:
                raise ValueError(f"--peer {peer} is this daemon itself: it is in --listen")
        if len(set(self.peer)) != len(self.peer):
            raise ValueError(f"--peer names a daemon twice: {', '.join(map(str, self.peer))}")

    @property
    def first_tcp(self) -> Endpoint | None:
        """The first listener on HOST:PORT."""
        return next((endpoint for endpoint in self.listen if not endpoint.is_unix), None)

    @property
    def tier_order(self) -> tuple[str, ...]:
        """Kinds of the tiers below the pool, in the order in which blocks are copied down and looked for."""
        if self.tiers:
            return self.tiers
        return tuple(kind for kind, first in zip(KINDS, (self.disk_dir, self.redis_url), strict=True) if first)

    @property
    def limits(self) -> Limits:
        """Ceilings of the wire, with the two that can be set."""
        return Limits(keys_max=self.keys_max, message_bytes_max=int(self.message_bytes_max))

    def read_token(self) -> str | None:
        """The token that HOST:PORT listeners ask for; None where none is asked.

        Raises:
            ConfigError: the file cannot be used.
        """
        return None if self.token_file is None else read_token(self.token_file)


def parse_bytes(text: str, place: str) -> int:
    """Reads a size as the settings do.

    Args:
        text: Such as 1GB, 1GiB, 1e9 or 1000000000.
        place: The flag it was written at, for the error.

    Raises:
        ConfigError: it is not a size.
    """
    try:
        return int(pydantic.TypeAdapter(Bytes).validate_python(text))
    except pydantic.ValidationError:
        raise ConfigError(f"{place} is {text!r}: {SIZE_ADVICE}") from None
