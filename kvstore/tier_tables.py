"""``[[tiers]]`` tables of the configuration file: the tiers below the pool, in their order, each with its settings.

A key of a table is a setting without the name of the kind in front: ``bytes`` of ``kind = "disk"`` is ``disk_bytes``.
So a flag or a variable overrides one key of a table, as it does anywhere else in the file.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from kvstore.errors import ConfigError

#: Kinds of tiers, in the order that they have below the pool where no table says another one.
KINDS: Final = ("disk", "redis")
_EXAMPLE: Final = '[[tiers]] with kind = "disk" or kind = "redis"'


@dataclasses.dataclass(frozen=True, slots=True)
class TierTables:
    """What the tables say.

    Attributes:
        kinds: In the order of the tables.
        settings: Values as written, by setting.
    """

    kinds: tuple[str, ...]
    settings: Mapping[str, object]


def read_tier_tables(value: object, place: str, known: Collection[str]) -> TierTables:
    """Reads the value of ``tiers`` in a file.

    Args:
        value: As tomllib gives it.
        place: The file, for errors.
        known: Names of all settings.

    Raises:
        ConfigError: a table has no kind, an unknown one, the kind of another table, or an unknown key.
    """
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{place}: tiers is {value!r}: write each tier as a table, {_EXAMPLE}")
    kinds: list[str] = []
    settings: dict[str, object] = {}
    for number, table in enumerate(value, 1):
        kind = _kind(table, f"{place}: [[tiers]] number {number}")
        if kind in kinds:
            several = "; several folders go into one table: dir = [...]" if kind == "disk" else ""
            raise ConfigError(f"{place}: [[tiers]] names {kind!r} twice: there is one tier of a kind{several}")
        kinds.append(kind)
        keys = [name.removeprefix(f"{kind}_") for name in known if name.startswith(f"{kind}_")]
        for key, written in table.items():
            if key == "kind":
                continue
            if key not in keys:
                near = difflib.get_close_matches(key.replace("-", "_").lower(), keys, n=1, cutoff=0.0)
                raise ConfigError(
                    f"{place}: [[tiers]] of kind {kind!r}: {key!r} is not a setting; the nearest one is {near[0]!r}"
                )
            settings[f"{kind}_{key}"] = written
    return TierTables(tuple(kinds), settings)


def _kind(table: Mapping[str, Any], place: str) -> str:
    kind = table.get("kind")
    if kind in KINDS:
        return str(kind)
    if kind is None:
        raise ConfigError(f"{place} has no kind: write {_EXAMPLE}")
    if kind == "cpu":
        raise ConfigError(f"{place}: the pool stands above all tiers and has no table: its size is cpu_bytes")
    near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)
    raise ConfigError(f"{place}: {kind!r} is not a kind of tier; the nearest one is {near[0]!r}")
