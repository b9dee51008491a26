"""The keys of a pipe; pipe.py says what each is for."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Final

from kvstore.blocks import POOL_LIFE_BYTES
from kvstore.following import Spot

#: The receiver's end of a pipe.
RECEIVER: Final = b"R"
#: The life of the pool that it began in, and random bytes.
STREAM_ID_BYTES: Final = 16
#: Longest single wait at the daemon; whoever waits longer asks again. Far below the daemon's own limit.
WAIT_S: Final = 60.0
#: Between two attempts to store in a pool that is full.
PAUSE_S: Final = 0.02

#: What is there: keys in the order in which they came, and whether each is claimed.
Listed = Mapping[bytes, Spot]


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """What one life of a sender sends."""

    id: bytes

    @classmethod
    def begun_in(cls, generation: bytes) -> Stream:
        """A new one."""
        life = generation[:POOL_LIFE_BYTES]
        return cls(life + secrets.token_bytes(STREAM_ID_BYTES - len(life)))

    def is_of(self, generation: bytes) -> bool:
        """Whether it began in this life of the pool. What is left below the pool of one before may lack its last
        cursors, so that nobody can say what of it was received.
        """
        return self.id.startswith(generation[:POOL_LIFE_BYTES])

    @property
    def life(self) -> bytes:
        """Claimed by the sender."""
        return b"L" + self.id

    @property
    def mark(self) -> bytes:
        """There as long as something of the stream is to be received."""
        return b"S" + self.id

    def head(self, number: int) -> bytes:
        """The head of one tensor."""
        return b"H" + self.id + number.to_bytes(8, "big")

    def cursor(self, count: int) -> bytes:
        """So many were received."""
        return b"C" + self.id + count.to_bytes(8, "big")

    def heads(self, listed: Listed) -> Iterator[int]:
        """Numbers of the tensors that are there."""
        return self._numbers(b"H", listed)

    def cursors(self, listed: Listed) -> Iterator[int]:
        """Counts of the cursors that are there: one, or two while it moves."""
        return self._numbers(b"C", listed)

    def sender_lives(self, listed: Listed) -> bool:
        """Whether more may come."""
        life = listed.get(self.life)
        return life is not None and life.claimed

    def keys(self, listed: Listed) -> list[bytes]:
        """All keys of the stream."""
        return [key for key in listed if key[1 : 1 + STREAM_ID_BYTES] == self.id]

    def _numbers(self, kind: bytes, listed: Listed) -> Iterator[int]:
        start = kind + self.id
        return (int.from_bytes(key[len(start) :], "big") for key in listed if key.startswith(start))


def streams_of(listed: Listed) -> list[Stream]:
    """The streams that are to be received, in the order in which they began."""
    return [Stream(key[1:]) for key in listed if key.startswith(b"S")]


def strays_of(listed: Listed) -> list[bytes]:
    """Keys of streams that nobody sends or receives any more."""
    alive = {key[1:] for key in listed if key[:1] in (b"S", b"L")}
    return [key for key in listed if key[:1] in (b"H", b"C") and key[1 : 1 + STREAM_ID_BYTES] not in alive]


def left_of(deadline: float | None) -> float:
    """Seconds of the next wait; 0 where the time is up."""
    return WAIT_S if deadline is None else min(WAIT_S, max(0.0, deadline - time.monotonic()))
