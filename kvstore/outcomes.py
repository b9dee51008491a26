"""What became of what was asked of the hierarchy: of one slot, and of everything since the start."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter


class Outcome(enum.IntEnum):
    """What became of one committed slot."""

    STORED = 1
    EXISTS = 2
    NOT_RESERVED = 3


@dataclasses.dataclass(slots=True)
class Counts:
    """What happened since the start, for stats and metrics. Only ever grows.

    Attributes:
        hits: Blocks handed to a reader, by tier.
        misses: Keys asked for and not handed out, by reason.
        stores: Slots committed, by outcome.
        refused: Slots asked for and not given, by reason.
        bytes: Block bytes stored and handed out.
    """

    hits: Counter[str] = dataclasses.field(default_factory=Counter)
    misses: Counter[str] = dataclasses.field(default_factory=Counter)
    stores: Counter[str] = dataclasses.field(default_factory=Counter)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)
