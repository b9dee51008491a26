"""Where the daemon's settings come from: flags, then ``KVSTORE_…`` variables, then a TOML file, then defaults."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pydantic

from kvstore.config import SIZE_ADVICE, Settings
from kvstore.endpoint import ENVIRONMENT_VARIABLE, default_endpoint
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.machine import Machine, read_machine
from kvstore.tier_tables import read_tier_tables

PREFIX: Final = "KVSTORE_"
#: Variable that names the TOML file where the flag is not given.
CONFIG_VARIABLE: Final = "KVSTORE_CONFIG"

# Kubernetes gives every pod such variables for each Service whose name begins with "kvstore" (KVSTORE_SERVICE_HOST,
# KVSTORE_PORT_7070_TCP_ADDR, …). They are not meant for the daemon, and refusing them would stop it in most clusters.
_KUBERNETES: Final = re.compile(
    r"KVSTORE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_KUBERNETES_URL: Final = re.compile(r"(tcp|udp|sctp)://")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """A value as it was written, and where.

    Attributes:
        value: As written.
        place: ``--flag``, ``$VARIABLE``, ``FILE`` or ``default``.
    """

    value: object
    place: str


#: What can only be written in the file.
FILE_ONLY: Final = frozenset({"tiers"})
#: Settings that have a flag and a variable.
FLAGS: Final = tuple(name for name in Settings.model_fields if name not in FILE_ONLY)


def flag_of(name: str) -> str:
    """Command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Environment variable of a setting."""
    return PREFIX + name.upper()


def gather(flags: Mapping[str, object], config_path: Path | None, environ: Mapping[str, str]) -> dict[str, Origin]:
    """Every setting that somebody wrote, by name, with the winner of flags, environment and file.

    Args:
        flags: Values by setting; None and empty tuples count as not given.
        config_path: TOML file; None: ``$KVSTORE_CONFIG``, else no file.
        environ: The environment.

    Raises:
        ConfigError: a name is unknown, or the file cannot be read.
    """
    found: dict[str, Origin] = {}
    if config_path is None and environ.get(CONFIG_VARIABLE):
        config_path = Path(environ[CONFIG_VARIABLE])
    if config_path is not None:
        written = _read_toml(config_path)
        for name, value in written.items():
            if name not in Settings.model_fields:
                raise _unknown(f"{config_path}: {name!r}", name, Settings.model_fields)
            found[name] = Origin(value, str(config_path))
        if "tiers" in written:
            found |= _from_tables(written, str(config_path))
    variables = {variable_of(name): name for name in FLAGS}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in (ENVIRONMENT_VARIABLE, CONFIG_VARIABLE):
            continue
        if variable in variables:
            found[variables[variable]] = Origin(text, f"${variable}")
        elif not _is_kubernetes(variable, text):
            raise _unknown(f"environment variable {variable}", variable, variables)
    for name, value in flags.items():
        if name not in FLAGS:
            raise _unknown(f"flag {flag_of(name)}", flag_of(name), map(flag_of, FLAGS))
        if value is not None and value != ():
            found[name] = Origin(value, flag_of(name))
    if "listen" not in found:
        place = f"${ENVIRONMENT_VARIABLE}" if environ.get(ENVIRONMENT_VARIABLE) else "default"
        try:
            found["listen"] = Origin((default_endpoint(environ),), place)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
    return found


def _from_tables(written: Mapping[str, object], place: str) -> dict[str, Origin]:
    tables = read_tier_tables(written["tiers"], place, Settings.model_fields)
    for name in written:
        if name in FLAGS and name.startswith(tuple(f"{kind}_" for kind in tables.kinds)):
            raise ConfigError(f"{place}: {name!r} stands beside [[tiers]]: write it in the table of its tier")
    found = {name: Origin(value, f"[[tiers]] in {place}") for name, value in tables.settings.items()}
    return found | {"tiers": Origin(tables.kinds, place)}


def load_settings(
    flags: Mapping[str, object],
    config_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> Settings:
    """Gathers, converts and checks the settings.

    Args:
        flags: Values by setting; None and empty tuples count as not given.
        config_path: TOML file; None: ``$KVSTORE_CONFIG``, else no file.
        environ: The environment; None: this process's.
        machine: What the pool may be carved from; None: this machine.

    Raises:
        ConfigError: a name is unknown or a value impossible; says which, where it was written, and why.
    """
    found = gather(flags, config_path, os.environ if environ is None else environ)
    if "cpu_bytes" not in found:
        raise ConfigError(
            "the size of the pool is not set: write --cpu-bytes 1GB, KVSTORE_CPU_BYTES=1GB or, in the --config file,"
            ' cpu_bytes = "1GB"'
        )
    try:
        settings = Settings(**{name: origin.value for name, origin in found.items()})
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error, found)) from error
    _check_fits(settings, found["cpu_bytes"], read_machine() if machine is None else machine)
    settings.read_token()
    return settings


def _check_fits(settings: Settings, origin: Origin, machine: Machine) -> None:
    room = machine.pool_bytes_max(hugetlb=settings.hugepages in ("auto", "hugetlb"))
    if settings.cpu_bytes > room:
        raise ConfigError(
            f"cpu_bytes ({origin.place}) is {int(settings.cpu_bytes)} bytes and this machine can give {room}"
            f" ({machine.describe()}): write a smaller size"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def _is_kubernetes(variable: str, text: str) -> bool:
    if variable.endswith("_PORT") and _KUBERNETES_URL.match(text):
        return True
    return _KUBERNETES.fullmatch(variable) is not None


def _unknown(what: str, name: str, valid: Iterable[str]) -> ConfigError:
    names = list(valid)
    # Dashes for underscores is the usual slip in a file, and case the usual one in a variable.
    folded = {valid_name.replace("-", "_").lower(): valid_name for valid_name in names}
    near = difflib.get_close_matches(name.replace("-", "_").lower(), folded, n=1, cutoff=0.0)
    return ConfigError(f"{what} is not a setting; the nearest one is {folded[near[0]]!r}")


def _explain(error: pydantic.ValidationError, found: Mapping[str, Origin]) -> str:
    """All findings in one line."""
    findings: list[str] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        reason = str(cause) if cause is not None else detail["msg"][:1].lower() + detail["msg"][1:]
        if not detail["loc"]:
            findings.append(reason)
            continue
        name = str(detail["loc"][0])
        origin = found.get(name, Origin(detail["input"], "default"))
        if detail["type"] == "literal_error":
            near = difflib.get_close_matches(str(origin.value), _choices(name), n=1, cutoff=0.0)
            reason += f"; the nearest one is {near[0]!r}"
        elif detail["type"].startswith("byte_size"):
            reason = SIZE_ADVICE
        findings.append(f"{name} ({origin.place}) is {origin.value!r}: {reason}")
    return "; ".join(findings)


def _choices(name: str) -> tuple[str, ...]:
    return typing.get_args(Settings.model_fields[name].annotation)
