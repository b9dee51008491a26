"""The Redis tier: blocks in one Redis or Valkey server, behind Sentinel, or in a cluster, shared by many daemons.

What its answers mean
    STORED
        All parts were taken by the server. As durable as the server is.
    delete, delete_namespace
        What could not be removed now, since a server did not answer, answers as absent and is removed when it is back.
        Should this process end before, it may come back.
    Reads
        Every part that is handed out was checked: name, sizes and place by its header, bytes by their xxh3, and that
        all parts belong together. A block with anything missing, foreign or damaged is a miss, and is removed.
Who may evict
    The server by its policy, at any time. With a budget of its own the tier evicts as well, suffixes first; then the
    order of use is kept in Redis. Several daemons that share servers each count all that they know of; what one stores,
    the others learn by the next sweep.
Faults
    No call waits longer than deadline_s for a server that does nothing. A server that fails three times in a row is
    given up: it is not asked any more, and looked after by probes until it is well again. See redis_health.
Threads
    Loads and stores, questions, and upkeep each have threads of their own. See redis_turn for how buffers are given
    back.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvstore.blocks import DIGEST_BYTES
from kvstore.clock import Clock
from kvstore.errors import ConfigError
from kvstore.log import get_logger
from kvstore.tier import ReadOutcome, Tier, TierNamespace, TierState, WriteOutcome
from kvstore.tiers.io_threads import IoThreads, Lane
from kvstore.tiers.redis_batches import Batches
from kvstore.tiers.redis_books import Books
from kvstore.tiers.redis_calls import Answer, Calls
from kvstore.tiers.redis_health import RedisHealth
from kvstore.tiers.redis_keeper import Keeper
from kvstore.tiers.redis_server import make_servers
from kvstore.tiers.redis_turn import Call, Progress, Stopper, run_to_end
from kvstore.tiers.redis_upkeep import Upkeep
from kvstore.tiers.redis_url import parse_redis_url
from kvstore.tiers.redis_value import NAME_BYTES_MAX, Names

KEY_PREFIX: Final = "kvstore:"
#: Threads for questions: one may wait for a node that does not answer.
_ASK_THREADS: Final = 2
_WRITE_QUEUE_BYTES: Final = 256 << 20
#: How long open() waits for a look at what is there, and close() for what is still owed.
_OPEN_S: Final = 2.0
_CLOSE_S: Final = 2.0
#: Longest removal.
_DELETE_S: Final = 30.0


def open_redis_tier(
    url: str,
    clock: Clock,
    *,
    capacity_bytes: int | None = None,
    key_prefix: str = KEY_PREFIX,
    ttl_s: int | None = None,
    connections: int = 4,
    deadline_s: float = 0.25,
) -> Tier:
    """A Redis tier that was not opened yet. See RedisTier for what the arguments mean.

    Raises:
        ConfigError: the URL or another setting is impossible.
    """
    return RedisTier(
        url,
        clock,
        capacity_bytes=capacity_bytes,
        key_prefix=key_prefix,
        ttl_s=ttl_s,
        connections=connections,
        deadline_s=deadline_s,
    )


class RedisTier(Tier):
    """See the module. All methods on one event loop.

    Attributes:
        counts: What happened; only ever grows.
        swept: Set once all that is there was looked at.
    """

    shared = True

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        capacity_bytes: int | None = None,
        key_prefix: str = KEY_PREFIX,
        ttl_s: int | None = None,
        connections: int = 4,
        deadline_s: float = 0.25,
        name: str = "redis",
        probe_interval_s: float = 0.5,
        sweep_interval_s: float = 600.0,
    ) -> None:
        """Nothing is connected before open().

        Args:
            url: See redis_url.
            capacity_bytes: Budget for the bytes of all blocks under the prefix; None: the server's policy decides.
            key_prefix: In front of every key; printable ASCII without braces.
            ttl_s: How long a block is kept at most; None: as long as there is room.
            connections: How many threads move bytes at once, half of them for loads alone.
            deadline_s: Longest wait for a server that does nothing, and for the whole answer of stat().
            probe_interval_s: First wait before a server that was given up is looked at; doubles up to 10 s.
            sweep_interval_s: How often all that is there is looked at.

        Raises:
            ConfigError: one of them is impossible.
        """
        if not key_prefix or not key_prefix.isascii() or not key_prefix.isprintable() or set(key_prefix) & set("{} "):
            raise ConfigError(f"the Redis key prefix {key_prefix!r} must be printable ASCII without braces and spaces")
        if connections < 2:
            raise ConfigError("the Redis tier needs at least 2 connections: one for loads, one for stores")
        if deadline_s <= 0 or (ttl_s is not None and ttl_s < 1) or (capacity_bytes is not None and capacity_bytes < 1):
            raise ConfigError("deadline, TTL and budget of the Redis tier must be more than nothing")
        self.name = name
        self.address = parse_redis_url(url)
        self.clock = clock
        self.capacity_bytes = capacity_bytes
        self.ttl_s = ttl_s
        self.log = get_logger(__name__)
        #: Longest step of upkeep.
        self.step_s = 4 * deadline_s
        self._deadline_s = deadline_s
        self._lanes = {Lane.READ: -(-connections // 2), Lane.WRITE: connections // 2}
        try:
            self.servers = make_servers(self.address, deadline_s, connections + _ASK_THREADS + 1)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the Redis URL has an option that does not fit: {self.address.scrub(str(error))}"
            ) from None
        self.health = RedisHealth(name, clock, probe_interval_s)
        self.books = Books(capacity_bytes, clock)
        self.counts: Counter[str] = Counter()
        self.swept = asyncio.Event()
        self._names = Names(key_prefix)
        self._progress = Progress()
        self._batches = Batches(
            self.servers, self._names, self.health, self.counts, deadline_s, lambda: self._keeper.refresh_soon()
        )
        self._calls = Calls(
            self.address,
            self.servers,
            self._names,
            self._batches.may_ask,
            self._progress,
            ttl_s=ttl_s,
            stall_s=deadline_s,
        )
        upkeep = Upkeep(self.address, self.servers, self._names, self._calls, ttl_s)
        self._keeper = Keeper(self, upkeep, sweep_interval_s)
        self._namespaces: dict[bytes, TierNamespace] = {}
        #: Blocks that are being written, and what became of them.
        self._writing: dict[bytes, asyncio.Future[dict[bytes, WriteOutcome]]] = {}
        self._queued_bytes = 0
        self._moving: IoThreads | None = None
        self._asking: IoThreads | None = None
        self._closed = False

    # -- life --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        return TierState.FAILED if self._closed else self.health.state

    @property
    def asking(self) -> IoThreads:
        """Threads for questions and upkeep. Only between open() and close()."""
        assert self._asking is not None, "the tier is not open"
        return self._asking

    async def open(self) -> None:
        self._moving = IoThreads(f"kvstore-{self.name}", self._lanes)
        self._asking = IoThreads(f"kvstore-{self.name}-ask", {Lane.READ: _ASK_THREADS, Lane.KEEP: 1})
        self.health.whole.probe_now()
        first = asyncio.ensure_future(self._keeper.tend())
        await asyncio.wait({first}, timeout=_OPEN_S)
        if first.done():
            first.result()
        self._keeper.start()

    async def close(self) -> None:
        if self._asking is None or self._moving is None or self._closed:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settle(), _CLOSE_S)
        self._closed = True
        await self._keeper.stop()
        for threads in (self._moving, self._asking):
            if not await asyncio.to_thread(threads.close, 2 * self._deadline_s):
                self.log.warning("closed while a call hangs", tier=self.name)
        await asyncio.to_thread(self.servers.close)

    async def _settle(self) -> None:
        while self._writing:
            await asyncio.wait(set(self._writing.values()))
        await self._keeper.settle()

    async def tend(self) -> None:
        """What is done now and then, at once: probes, sweeps, what is owed. Runs by itself, too."""
        await self._keeper.tend()

    # -- namespaces --------------------------------------------------------------------------------------------------

    def remember(self, namespace: TierNamespace) -> None:
        if self._namespaces.get(namespace.digest) != namespace:
            self._namespaces[namespace.digest] = namespace
            self._keeper.owe_text(namespace.digest, namespace)

    def namespaces(self) -> list[TierNamespace]:
        return list(self._namespaces.values())

    def adopt(self, found: list[TierNamespace]) -> dict[bytes, TierNamespace | None]:
        """Takes in what the servers remember. Returns what they don't."""
        there = {namespace.digest: namespace for namespace in found}
        missing = {digest: each for digest, each in self._namespaces.items() if there.get(digest) != each}
        self._namespaces = there | self._namespaces
        return dict(missing)

    # -- blocks ------------------------------------------------------------------------------------------------------

    async def stat(self, keys: Sequence[bytes]) -> list[int | None]:
        sizes: list[int | None] = [None] * len(keys)
        places = [place for place, key in enumerate(keys) if not self._keeper.is_owed(key) and _fits(key)]
        if self.state is TierState.FAILED or not places:
            return sizes
        until = time.monotonic() + self._deadline_s
        stopper = Stopper()
        await run_to_end(
            stopper.stop,
            self._batches.ask(
                sizes,
                keys,
                places,
                None,
                lambda: Call(self.asking, Lane.READ, until, self._deadline_s, self._progress),
                lambda turn, node, piece: self._calls.stat(turn, node, until, [keys[place] for place in piece]),
                stopper,
            ),
        )
        return sizes

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[ReadOutcome]:
        stopper = Stopper()
        outcomes: list[ReadOutcome] = await run_to_end(stopper.stop, self._read(blocks, deadline_s, stopper))
        return outcomes

    async def _read(
        self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float, stopper: Stopper
    ) -> list[ReadOutcome]:
        names = [key for key, _ in blocks]
        places = [place for place, key in enumerate(names) if not self._keeper.is_owed(key) and _fits(key)]
        outcomes = [ReadOutcome.ABSENT] * len(blocks)
        if self.state is TierState.FAILED or self._moving is None:
            return outcomes
        for place in places:
            outcomes[place] = ReadOutcome.FAILED
        moving = self._moving
        rooms = [buffer.cast("B") for _, buffer in blocks]
        until = time.monotonic() + deadline_s
        answers = await self._batches.ask(
            outcomes,
            names,
            places,
            [room.nbytes for room in rooms],
            lambda: Call(moving, Lane.READ, until, self._deadline_s, self._progress),
            lambda turn, node, piece: self._calls.read(
                turn, node, until, [(names[place], rooms[place]) for place in piece]
            ),
            stopper,
        )
        gone = []
        for key, room, outcome in zip(names, rooms, outcomes, strict=True):
            self.counts[f"read_{outcome.value}"] += 1
            if outcome is ReadOutcome.OK:
                self.counts["read_bytes"] += room.nbytes
                if key not in self.books and not self._keeper.is_owed(key):
                    self.books.add([(key, room.nbytes)])
            elif outcome in (ReadOutcome.ABSENT, ReadOutcome.DAMAGED):
                gone.append(key)
        self.books.forget(gone)
        for answer in answers:
            self._keeper.owe(answer.spoiled)
        return outcomes

    async def write(self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[WriteOutcome]:
        stopper = Stopper()
        outcomes: list[WriteOutcome] = await run_to_end(stopper.stop, self._write(blocks, deadline_s, stopper))
        return outcomes

    async def _write(
        self, blocks: Sequence[tuple[bytes, memoryview]], deadline_s: float, stopper: Stopper
    ) -> list[WriteOutcome]:
        outcomes = [WriteOutcome.FAILED] * len(blocks)
        if self.state is TierState.FAILED or self._moving is None:
            return outcomes
        moving = self._moving
        #: What becomes of the blocks of this call, for others that want to store them too.
        written: asyncio.Future[dict[bytes, WriteOutcome]] = asyncio.get_running_loop().create_future()
        until = time.monotonic() + deadline_s
        sizes = [data.nbytes for _, data in blocks]
        mine: dict[bytes, int] = {}
        theirs: dict[int, asyncio.Future[dict[bytes, WriteOutcome]]] = {}
        held = 0
        victims: list[bytes] = []
        full = self.health.full
        most = sys.maxsize if self.capacity_bytes is None else self.capacity_bytes
        waits = self.capacity_bytes is not None and not self.books.complete
        for place, (key, _) in enumerate(blocks):
            size = sizes[place]
            if not _fits(key):
                outcomes[place] = WriteOutcome.NO_ROOM
            elif key in self._writing:
                theirs[place] = self._writing[key]
            elif full or size > most:
                outcomes[place] = WriteOutcome.NO_ROOM
            elif waits or self._queued_bytes >= _WRITE_QUEUE_BYTES or self._keeper.is_flushing(key):
                outcomes[place] = WriteOutcome.THROTTLED
            else:
                if key not in self.books:
                    fits, leaving = self.books.hold(size)
                    victims += leaving
                    if not fits:
                        outcomes[place] = WriteOutcome.NO_ROOM
                        continue
                    held += size
                self._queued_bytes += size
                mine[key] = place
                self._writing[key] = written
        answers: list[Answer[WriteOutcome]] = []
        try:
            if victims:
                self.counts["evicted"] += len(victims)
                await self.remove(victims)
            if mine and not stopper.stopped:
                datas = [data.cast("B") for _, data in blocks]
                answers = await self._batches.ask(
                    outcomes,
                    [key for key, _ in blocks],
                    list(mine.values()),
                    sizes,
                    lambda: Call(moving, Lane.WRITE, until, self._deadline_s, self._progress),
                    lambda turn, node, piece: self._calls.write(
                        turn, node, until, [(blocks[place][0], datas[place]) for place in piece]
                    ),
                    stopper,
                )
        finally:
            self.books.let_go(held)
            self._queued_bytes -= sum(sizes[place] for place in mine.values())
            there = [key for key, place in mine.items() if outcomes[place] in _THERE]
            for key in there:
                self._keeper.owed.pop(key, None)
            self.books.add((key, sizes[mine[key]]) for key in there)
            for key in mine:
                del self._writing[key]
            written.set_result({key: outcomes[place] for key, place in mine.items()})
        for answer in answers:
            if answer.full:
                self.health.refused(answer.full)
            elif WriteOutcome.STORED in answer.outcomes:
                self.health.took()
        for place, future in theirs.items():
            if not future.done():
                await asyncio.wait({future}, timeout=max(0.0, until - time.monotonic()))
            if future.done():
                outcome = future.result()[blocks[place][0]]
                outcomes[place] = WriteOutcome.EXISTS if outcome in _THERE else outcome
        for outcome, count in Counter(outcomes).items():
            self.counts[f"write_{outcome.value}"] += count
        stored = zip(outcomes, sizes, strict=True)
        self.counts["written_bytes"] += sum(size for outcome, size in stored if outcome is WriteOutcome.STORED)
        return outcomes

    # -- removal -----------------------------------------------------------------------------------------------------

    async def _written(self, names: Sequence[bytes]) -> None:
        """Waits for writes under way: what they store must not come after its removal."""
        if writes := {self._writing[name] for name in names if name in self._writing}:
            await asyncio.wait(writes)

    async def delete(self, keys: Sequence[bytes]) -> int:
        names = list(dict.fromkeys(key for key in keys if _fits(key)))
        await self._written(names)
        return await self.remove(names)

    async def remove(self, names: list[bytes]) -> int:
        """Forgets blocks, whoever wants it. What does not get through stays owed."""
        self.books.forget(names)
        if not names:
            return 0
        outcomes: list[bool | None] = [None] * len(names)
        with self._keeper.removing(names):
            if self.state is not TierState.FAILED and self._asking is not None:
                until = time.monotonic() + _DELETE_S
                stopper = Stopper()
                await run_to_end(
                    stopper.stop,
                    self._batches.ask(
                        outcomes,
                        names,
                        range(len(names)),
                        None,
                        lambda: Call(self.asking, Lane.READ, until, self._deadline_s, self._progress),
                        lambda turn, node, piece: self._calls.delete(
                            turn, node, until, [names[place] for place in piece]
                        ),
                        stopper,
                    ),
                )
            for name, outcome in zip(names, outcomes, strict=True):
                if outcome is not None:
                    self._keeper.owed.pop(name, None)
            self._keeper.owe([name for name, outcome in zip(names, outcomes, strict=True) if outcome is None])
        return outcomes.count(True)

    async def delete_namespace(self, digest: bytes | None) -> int:
        assert digest is None or len(digest) == DIGEST_BYTES
        with self._keeper.flushing(digest):
            self.books.forget(self.books.names(digest))
            for known in [digest] if digest is not None else list(self._namespaces):
                if self._namespaces.pop(known, None) is not None:
                    self._keeper.owe_text(known, None)
            await self._written([name for name in self._writing if digest is None or name.startswith(digest)])
            # What was stored meanwhile is known again.
            self.books.forget(self.books.names(digest))
            return 0 if self.state is TierState.FAILED else await self._keeper.flush(digest)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.books.touch(keys)

    def scan(self, digest: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        return iter(()) if self.state is TierState.FAILED else self.books.items(digest)

    def stats(self) -> Mapping[str, Any]:
        facts = self._keeper.facts.values()
        capacity_bytes = self.capacity_bytes
        if capacity_bytes is None:
            capacity_bytes = sum(each.maxmemory for each in facts)
        return {
            "name": self.name,
            "state": self.state.value,
            "capacity_bytes": capacity_bytes,
            "used_bytes": self.books.used_bytes,
            "blocks": len(self.books),
            "evictions": self.counts["evicted"],
            "url": self.address.shown,
            "budget": self.capacity_bytes is not None,
            "ttl_s": self.ttl_s,
            "swept": self.books.complete,
            "counts": dict(self.counts),
            **self.health.describe(),
            **self._keeper.describe(),
        }


_THERE: Final = (WriteOutcome.STORED, WriteOutcome.EXISTS)


def _fits(key: bytes) -> bool:
    return DIGEST_BYTES <= len(key) <= NAME_BYTES_MAX
