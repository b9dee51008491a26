"""Engines with several KV-cache groups: what their keys are, and which of a request's keys depend on each other.

vLLM lays all groups out in blocks of one size, so that slots are of one size too, and a block's group is told by its
key alone. Of a group with full attention a prefix is of use from its start: its keys are one run, which ends at the
first block that is missing. Of a sliding window or a recurrent state the end counts, wherever it lies: there each key
is a run of its own.

Knows nothing of vLLM, and makes no calls.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from engine_plugin.vllm.coming import Grant
from kvstore.direct import DiskExtent

GROUP_BYTES: Final = 4
_FIRST_GROUP: Final = bytes(GROUP_BYTES)


def group_of(key: bytes) -> int:
    """The KV-cache group that an engine's key names."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def hash_of(key: bytes, apart: bytes = b"") -> bytes:
    """The daemon's key: the engine's block hash; for other groups than the first one with the group behind it.

    Args:
        apart: What makes other KV of the same tokens and is not in the engine's key.
    """
    name = key[:-GROUP_BYTES] if key.endswith(_FIRST_GROUP) else key
    return hashlib.sha256(len(apart).to_bytes(4, "big") + apart + name).digest() if apart else name


def runs_of(keys: Sequence[bytes], windowed: Collection[int]) -> tuple[int, ...]:
    """Lengths of the runs that keys consist of, as they follow each other; empty where they are one."""
    runs: list[int] = []
    for group, members in itertools.groupby(keys, group_of):
        count = sum(1 for _ in members)
        runs += [1] * count if group in windowed else [count]
    return tuple(runs) if len(runs) > 1 else ()


def by_group(keys: Iterable[bytes]) -> dict[int, list[bytes]]:
    """Keys by group, in their order."""
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        groups.setdefault(group_of(key), []).append(key)
    return groups


def split(keys: Sequence[bytes], runs: Sequence[int]) -> list[Sequence[bytes]]:
    """The runs themselves."""
    ends = list(itertools.accumulate(runs))
    return [keys[end - count : end] for count, end in zip(runs, ends, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """Leases on several runs as one.

    Attributes:
        places: Which of the query's keys the offsets belong to, ascending.
        leases: One for each run that something is held of.
        extents: None: nothing is asked for in this way where there are several runs.
    """

    generation: bytes
    offsets: np.ndarray
    epochs: np.ndarray
    pending: int
    pending_from: str
    places: np.ndarray
    leases: tuple[Grant, ...]
    extents: tuple[DiskExtent, ...] = ()
    below_s: float = 0.0
    token_s: float = 0.0


def gather(leases: Sequence[Grant], runs: Sequence[int]) -> Gathered:
    """Puts together what was answered for the runs of one query, in one call."""
    begins = [0, *itertools.accumulate(runs)][: len(runs)]
    held = [(begin, lease) for begin, lease in zip(begins, leases, strict=True) if len(lease.offsets)]
    return Gathered(
        generation=leases[0].generation,
        offsets=np.concatenate([lease.offsets for lease in leases]),
        epochs=np.concatenate([lease.epochs for lease in leases]),
        pending=sum(lease.pending for lease in leases),
        pending_from=next((lease.pending_from for lease in leases if lease.pending_from), ""),
        places=np.array([begin + i for begin, lease in held for i in range(len(lease.offsets))], np.int64),
        leases=tuple(lease for _, lease in held),
        # They come up together. One of which it is not known makes all of it so.
        below_s=0.0
        if any(lease.pending and not lease.below_s for lease in leases)
        else max(lease.below_s for lease in leases),
        token_s=leases[0].token_s,
    )
