"""Other daemons as a tier: asked for what is not here, never written to.

What its answers mean
    stat    Whether a peer has it in its pool or its own tiers. Peers are asked side by side, within one deadline, and
            not about what is here; a peer does not ask its own peers on behalf of another daemon.
    read    Over the data port, straight into the slot. Checked there (see data_wire), so a block whose slot changed
            hands on the way is no block.
    delete, delete_namespace
            Reach the peers' pools and own tiers as well, so that what was removed here does not come back from there.
            Those that are away are told later, and until then count as not having it.
Faults
    A peer that fails three times in a row is not asked again before it has answered a probe.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore import congestion
from kvstore.clock import Clock
from kvstore.endpoint import Endpoint
from kvstore.tier import KEY_PREFIX_BYTES, ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome
from kvstore.tiers.peer_link import PeerLink
from kvstore.tiers.redis_turn import run_to_end
from kvstore.wire.tls import Tls

#: Blocks whose place is remembered between the question and the read.
_PLACES_MAX: Final = 65_536


class PeerTier(Tier):
    """See the module.

    Args:
        endpoints: In the order in which they are preferred.
        token: That all of them ask for, if they do.
        tls: To call them with, if they speak it.
        deadline_s: Longest time for an answer, and without a byte.
        congestion_choice: What data connections send with, see congestion.
    """

    asks_others = True

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        clock: Clock,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        deadline_s: float = 0.25,
        congestion_choice: str = congestion.AUTO,
        name: str = "peer",
    ) -> None:
        self.name = name
        self._links = [PeerLink(endpoint, clock, token, tls, deadline_s, congestion_choice) for endpoint in endpoints]
        self._namespaces: dict[bytes, TierNamespace] = {}
        self._places: OrderedDict[bytes, PeerLink] = OrderedDict()
        self._closed = False

    @property
    def state(self) -> TierState:
        well = sum(link.state is TierState.OK for link in self._links)
        if self._closed or not well:
            return TierState.FAILED
        return TierState.OK if well == len(self._links) else TierState.DEGRADED

    async def open(self) -> None:
        for link in self._links:
            link.open()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.gather(*(link.close() for link in self._links))

    def remember(self, namespace: TierNamespace) -> None:
        self._namespaces[namespace.digest] = namespace

    def namespaces(self) -> list[TierNamespace]:
        return list(self._namespaces.values())

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        by_prefix = _by_prefix(keys)
        questions = [(link, prefix, places) for link in self._links for prefix, places in by_prefix.items()]
        answers = await asyncio.gather(
            *(
                link.stat(prefix, [keys[place][KEY_PREFIX_BYTES:] for place in places])
                for link, prefix, places in questions
            )
        )
        sizes: list[int | None] = [None] * len(keys)
        for (link, _, places), found in zip(questions, answers, strict=True):
            if not found:
                continue
            for place in places:
                size = found.get(keys[place][KEY_PREFIX_BYTES:])
                if size is not None and sizes[place] is None:
                    sizes[place] = size
                    self._places[keys[place]] = link
                    self._places.move_to_end(keys[place])
        while len(self._places) > _PLACES_MAX:
            self._places.popitem(last=False)
        return sizes

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        # A thread may be filling the buffers: a caller that is cancelled waits for it all the same.
        outcomes: list[ReadOutcome] = await run_to_end(lambda: None, self._read(blocks, time.monotonic() + deadline_s))
        return outcomes

    async def _read(self, blocks: Sequence[tuple[bytes, memoryview]], until: float) -> list[ReadOutcome]:
        unknown = [name for name, _ in blocks if name not in self._places]
        if unknown:
            await self.stat(unknown)
        outcomes = [ReadOutcome.ABSENT] * len(blocks)
        # Blocks of one size from one peer travel together.
        batches: dict[tuple[PeerLink, bytes, int], list[int]] = {}
        for place, (name, room) in enumerate(blocks):
            link = self._places.pop(name, None)
            if link is not None:
                batches.setdefault((link, name[:KEY_PREFIX_BYTES], room.nbytes), []).append(place)
        results = await asyncio.gather(
            *(
                link.read(prefix, [(blocks[at][0][KEY_PREFIX_BYTES:], blocks[at][1].cast("B")) for at in places], until)
                for (link, prefix, _), places in batches.items()
            )
        )
        for places, found in zip(batches.values(), results, strict=True):
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        """Nothing is stored in other daemons."""
        return [WriteOutcome.NO_ROOM] * len(blocks)

    async def delete(self, keys: Sequence[bytes]) -> int:
        for key in keys:
            self._places.pop(key, None)
        return max(await asyncio.gather(*(link.delete(keys) for link in self._links)), default=0)

    async def delete_namespace(self, digest: bytes | None) -> int:
        removed = 0
        # Of all namespaces only those that this daemon knows: others are no business of its.
        for each in list(self._namespaces) if digest is None else [digest]:
            removed += max(await asyncio.gather(*(link.delete_namespace(each) for link in self._links)), default=0)
        return removed

    def touch(self, keys: Sequence[bytes]) -> None:
        """The peers note what is used when they hand it out."""

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        """Nothing rests here that others do not have."""
        return iter(())

    def stats(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "state": self.state.value,
            "capacity_bytes": 0,
            "used_bytes": 0,
            "blocks": 0,
            "peers": [link.describe() for link in self._links],
        }


def _by_prefix(names: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Places of names, by what they begin with."""
    found: dict[bytes, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name[:KEY_PREFIX_BYTES], []).append(place)
    return found
