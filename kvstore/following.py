"""What Client.follow tells: changes of a group of blocks, and where those are."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, NamedTuple

from kvstore.arena import ArenaView
from kvstore.connection import Attached
from kvstore.wire.convert import epochs_array, offsets_array
from kvstore.wire.v1 import engine_pb2

Wanted = Literal["anything", "coming", "going"]
WANTED: Final = {
    "anything": engine_pb2.WATCH_FOR_ANYTHING,
    "coming": engine_pb2.WATCH_FOR_COMING,
    "going": engine_pb2.WATCH_FOR_GOING,
}
_NOWHERE: Final = (1 << 64) - 1


class Spot(NamedTuple):
    """A block that answers.

    Attributes:
        claimed: Whether a drop_select holds it.
        resting: Whether it is below the pool.
        offset: Where it is in this client's mapping; None: it rests, or there is no mapping. Not pinned: a copy
            of it is good if its epoch is still `epoch` afterwards.
        epoch: Of its slot.
    """

    claimed: bool
    resting: bool = False
    offset: int | None = None
    epoch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """One answer.

    Attributes:
        changes: For the next call.
        whole: Whether `spots` are all blocks of the group, and what is not among them is gone.
        spots: What is there, of what changed, in the order of the changes.
        gone: What is not there any more.
        generation: Life of the pool that the spots are in.
    """

    changes: int
    whole: bool
    spots: dict[bytes, Spot]
    gone: list[bytes]
    generation: bytes


def changes_in(reply: engine_pb2.WatchReply, attached: Attached) -> Changes:
    """Reads an answer."""
    mapped = isinstance(attached.arena, ArenaView)
    places = zip(offsets_array(reply.offsets).tolist(), epochs_array(reply.epochs).tolist(), strict=True)
    spots = {
        key: Spot(bool(claimed), offset == _NOWHERE, offset if mapped and offset != _NOWHERE else None, epoch)
        for key, claimed, (offset, epoch) in zip(reply.keys, reply.claimed, places, strict=True)
    }
    return Changes(reply.changes, reply.whole, spots, list(reply.gone), attached.generation)


class Following:
    """A list of a group that one thread at a time keeps up to date.

    Attributes:
        spots: Its blocks, by key, in the order in which they came.
    """

    def __init__(self) -> None:
        self.spots: dict[bytes, Spot] = {}
        self.seen = 0

    def take(self, changes: Changes) -> None:
        """Brings the list up to date."""
        if changes.whole:
            # Those that were known keep their place: order tells what came first.
            self.spots = {key: changes.spots[key] for key in self.spots if key in changes.spots} | changes.spots
        else:
            self.spots.update(changes.spots)
            for key in changes.gone:
                self.spots.pop(key, None)
        self.seen = changes.changes
