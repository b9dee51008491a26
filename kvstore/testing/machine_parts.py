"""What the Hierarchy machine draws and what it notes: chains of keys, aims of readers, sessions, leases, calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any, Final

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

from kvstore.arena import Epochs
from kvstore.leases import Lease, Session
from kvstore.testing.data import make_block

#: Sessions at once; more would only make runs longer.
MEMBERS_MAX: Final = 6
_CHAIN_LENGTH: Final = 10

#: Three chains of keys that part after the third block.
CHAINS: Final = tuple(
    tuple(b"%d/%d" % (branch if index > 2 else 0, index) for index in range(_CHAIN_LENGTH)) for branch in range(3)
)

a_member = st.integers(0, MEMBERS_MAX - 1)
a_space = st.integers(0, 3)


@st.composite
def key_runs(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A run of keys and the key before it."""
    chain = draw(st.sampled_from(CHAINS))
    start = draw(st.sampled_from((0, 0, 0, 1, 2, 3, 5, 8)))
    stop = min(_CHAIN_LENGTH, start + draw(st.integers(1, 5)))
    return chain[start - 1] if start else b"", list(chain[start:stop])


@dataclasses.dataclass(frozen=True)
class Aim:
    """What a reader asks for: `length` keys of a chain, from one that is stored on (`hot`) or from anywhere."""

    hot: bool
    which: int
    length: int


aims = st.builds(Aim, st.sampled_from((True, True, True, False)), st.integers(0, 1 << 20), st.integers(1, 4))


def _made(serial: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(make_block(b"%d" % serial, size_bytes), dtype=np.uint8)


_made_small = functools.lru_cache(maxsize=1024)(_made)
_made_large = functools.lru_cache(maxsize=16)(_made)


def content(serial: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """What is written into a slot."""
    return _made_small(serial, size_bytes) if size_bytes < 1 << 17 else _made_large(serial, size_bytes)


@dataclasses.dataclass
class Held:
    """What a lease should show: of each block its key, its place and the serial of what was written there."""

    lease: Lease
    space: int
    blocks: list[tuple[bytes, int, int]]
    epochs: Epochs


@dataclasses.dataclass
class Member:
    """A session as its process sees it.

    Attributes:
        stock: Space and serial of each reserved slot, by offset.
        held: By lease id.
    """

    session: Session
    group: str
    stock: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    held: dict[int, Held] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Waiting:
    """A call that waits: a select, or a reserve where there are no keys."""

    task: asyncio.Task[Any]
    member: Member
    space: int
    keys: list[bytes]
    drop: bool
