"""Several tiers of one kind, one for each device, as one: each block has its place by its name."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import xxhash

from kvstore.tier import Held, ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome

Value = TypeVar("Value")

#: From well to ill: the whole is as ill as its worst part only where all of them are.
_ORDER = (TierState.OK, TierState.LOADING, TierState.DEGRADED, TierState.FAILED)


class StripedTier(Tier):
    """See the module. A part that fails takes its share of the blocks along and nothing else.

    Adding or removing a part moves the place of most blocks: those in the wrong place are misses until they leave.
    """

    def __init__(self, name: str, parts: Sequence[Tier]) -> None:
        self.name = name
        self.parts = tuple(parts)

    def _place(self, key: bytes) -> int:
        return int(xxhash.xxh3_64_intdigest(key)) % len(self.parts)

    def _split(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Indexes of the keys, by part."""
        places: list[list[int]] = [[] for _ in self.parts]
        for index, key in enumerate(keys):
            places[self._place(key)].append(index)
        return places

    @staticmethod
    def _join(count: int, places: Sequence[Sequence[int]], answers: Sequence[Sequence[Value]]) -> list[Value]:
        joined: dict[int, Value] = {}
        for indexes, several in zip(places, answers, strict=True):
            joined.update(zip(indexes, several, strict=True))
        return [joined[index] for index in range(count)]

    @property
    def state(self) -> TierState:
        states = [part.state for part in self.parts]
        if all(state is TierState.FAILED for state in states):
            return TierState.FAILED
        worst = max(states, key=_ORDER.index)
        return TierState.DEGRADED if worst is TierState.FAILED else worst

    async def open(self) -> None:
        opened: list[Tier] = []
        try:
            for part in self.parts:
                await part.open()
                opened.append(part)
        except BaseException:
            for part in opened:
                await part.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self.parts))

    def remember(self, namespace: TierNamespace) -> None:
        for part in self.parts:
            part.remember(namespace)

    def namespaces(self) -> list[TierNamespace]:
        return list({found.digest: found for part in self.parts for found in part.namespaces()}.values())

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        places = self._split(keys)
        answers = [
            await part.stat([keys[index] for index in indexes])
            for part, indexes in zip(self.parts, places, strict=True)
        ]
        return self._join(len(keys), places, answers)

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        places = self._split([key for key, _ in blocks])
        answers = await asyncio.gather(
            *(
                part.read([blocks[index] for index in indexes], deadline_s)
                for part, indexes in zip(self.parts, places, strict=True)
            )
        )
        return self._join(len(blocks), places, answers)

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        places = self._split([key for key, _ in blocks])
        answers = await asyncio.gather(
            *(
                part.write([blocks[index] for index in indexes], deadline_s)
                for part, indexes in zip(self.parts, places, strict=True)
            )
        )
        return self._join(len(blocks), places, answers)

    async def delete(self, keys: Sequence[bytes]) -> int:
        # In every part: a key may lie in the place it had when there were other parts.
        return sum(await asyncio.gather(*(part.delete(keys) for part in self.parts)))

    async def delete_namespace(self, digest: bytes | None) -> int:
        return sum(await asyncio.gather(*(part.delete_namespace(digest) for part in self.parts)))

    def touch(self, keys: Sequence[bytes]) -> None:
        for part, indexes in zip(self.parts, self._split(keys), strict=True):
            part.touch([keys[index] for index in indexes])

    async def hold(self, keys: Sequence[bytes], deadline_s: float) -> list[Held | None]:
        places = self._split(keys)
        calls = [
            asyncio.ensure_future(part.hold([keys[index] for index in indexes], deadline_s))
            for part, indexes in zip(self.parts, places, strict=True)
        ]
        try:
            answers = await asyncio.gather(*calls)
        except BaseException:
            # Cancelled, most likely: a part that was through has pinned what nobody will ever let go of.
            for part, call in zip(self.parts, calls, strict=True):
                call.add_done_callback(functools.partial(_let_all_go, part))
            raise
        joined = self._join(len(keys), places, answers)
        return [
            held and dataclasses.replace(held, hold=(self.parts[self._place(key)], held))
            for key, held in zip(keys, joined, strict=True)
        ]

    def let_go(self, held: Held) -> None:
        part, own = held.hold
        part.let_go(own)

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        for part in self.parts:
            yield from part.scan(digest)

    def stats(self) -> Mapping[str, Any]:
        parts = [dict(part.stats()) for part in self.parts]
        sums = {
            key: sum(part[key] for part in parts)
            for key, value in parts[0].items()
            if isinstance(value, int)
            and not isinstance(value, bool)
            and all(isinstance(part.get(key), int) for part in parts)
        }
        return {"name": self.name, "state": self.state.value, **sums, "parts": parts}


def _let_all_go(part: Tier, call: asyncio.Future[list[Held | None]]) -> None:
    if not call.cancelled() and call.exception() is None:
        for held in call.result():
            if held is not None:
                part.let_go(held)
