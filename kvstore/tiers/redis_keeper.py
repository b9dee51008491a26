"""When a Redis tier's upkeep is done: on the event loop, one thing after another."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvstore.blocks import DIGEST_BYTES
from kvstore.tier import TierNamespace, TierState
from kvstore.tiers.io_threads import Lane
from kvstore.tiers.redis_calls import Answer
from kvstore.tiers.redis_health import Fault
from kvstore.tiers.redis_upkeep import ServerFacts, Upkeep

if TYPE_CHECKING:
    from kvstore.tiers.redis import RedisTier

T = TypeVar("T")
_LOOK_S: Final = 0.25
#: How often the order of use is written down.
_ORDER_S: Final = 0.5
_ORDER_MAX: Final = 4096
#: Removals of single blocks that are remembered until the servers take them; beyond it, the whole namespace goes.
OWED_MAX: Final = 65_536
#: Least time between two looks at the topology.
_REFRESH_S: Final = 0.5


class Keeper:
    """See the module. Runs by itself from start() to stop().

    Attributes:
        facts: What the servers said of themselves, by node.
        notes: What an operator should change about them.
        owed: Blocks that were removed and are still there, as far as anybody knows: they answer as absent.
        owed_flushes: The same for namespaces; None: everything.
    """

    def __init__(self, tier: RedisTier, upkeep: Upkeep, sweep_interval_s: float) -> None:
        self._tier = tier
        self._upkeep = upkeep
        self._sweep_interval_s = sweep_interval_s
        self.facts: dict[str, ServerFacts] = {}
        self.notes: list[str] = []
        self.owed: dict[bytes, None] = {}
        self.owed_flushes: dict[bytes | None, None] = {}
        self._removing: Counter[bytes] = Counter()
        self._flushing: Counter[bytes | None] = Counter()
        self._texts: dict[bytes, TierNamespace | None] = {}
        self._texts_read = False
        self._refresh_due = True
        self._refresh_at = 0.0
        self._sweep_at = 0.0
        self._order_at = 0.0
        self._orphans: set[bytes] = set()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"{self._tier.name} keeper")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            try:
                await self.tend()
            except Exception as error:
                self._tier.log.error("upkeep failed", tier=self._tier.name, exc_info=error)
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)
            except TimeoutError:
                pass

    def hurry(self) -> None:
        """There is something to do."""
        self._wake.set()

    async def tend(self) -> None:
        """Does all that is due."""
        async with self._turn:
            await self._look_after_servers()
            if self._tier.state is not TierState.FAILED:
                await self._pay()
                if self._tier.clock.monotonic() >= self._sweep_at:
                    await self._sweep()

    async def settle(self) -> None:
        """Writes down what is not written yet, if that goes at once."""
        async with self._turn:
            if self._tier.state is not TierState.FAILED:
                self._order_at = 0.0
                await self._pay()

    async def _ask(self, work: Callable[[float], Answer[T]], node: str = "") -> Answer[T]:
        """Something short, on the thread that is kept for it."""
        until = time.monotonic() + self._tier.step_s
        answer = await self._tier.asking.call(Lane.KEEP, lambda: work(until))
        if answer.fault is not None:
            if node:
                self._tier.health.failed(node, answer.fault)
            else:
                self._tier.health.note(answer.fault)
            self.refresh_soon()
        elif answer.elsewhere:
            self.refresh_soon()
        return answer

    # -- servers -----------------------------------------------------------------------------------------------------

    def refresh_soon(self) -> None:
        """The topology may have changed."""
        if not self._refresh_due:
            self._refresh_due = True
            self.hurry()

    async def _look_after_servers(self) -> None:
        health, servers = self._tier.health, self._tier.servers
        now = self._tier.clock.monotonic()
        opening = health.whole.open and health.whole.probe_due()
        due = [node for node in servers.nodes() if health.breaker(node).probe_due()]
        moved = self._refresh_due and now >= self._refresh_at and not health.whole.open
        if not (opening or due or moved):
            return
        self._refresh_due = False
        self._refresh_at = now + _REFRESH_S
        fault: Fault | None = await self._tier.asking.call(Lane.KEEP, self._upkeep.refresh)
        if fault is not None:
            # One unreachable Sentinel or node is no reason to stop asking those that answer.
            if health.whole.open or not servers.nodes() or due:
                health.give_up(fault)
            else:
                health.note(fault)
            return
        nodes = servers.nodes()
        health.keep_only(nodes)
        for node in nodes:
            if opening or node in due or (node not in self.facts and not health.breaker(node).open):
                await self._probe(node)
        self.facts = {node: facts for node, facts in self.facts.items() if node in nodes}
        if any(not health.breaker(node).open for node in nodes) and health.whole.open:
            health.whole.fine()
            self._texts_read = False
            self._sweep_at = min(self._sweep_at, now)
        self._judge_policy()
        health.say()

    async def _probe(self, node: str) -> None:
        answer = await self._ask(functools.partial(self._upkeep.probe, node))
        breaker = self._tier.health.breaker(node)
        if answer.fault is not None or not answer.done:
            breaker.trip()
            return
        self.facts[node] = answer.outcomes[0]
        if breaker.fine():
            # It may have lost what it had.
            self._texts_read = False
            self._sweep_at = self._tier.clock.monotonic()

    def _judge_policy(self) -> None:
        """What should be said about the servers' settings."""
        notes = []
        facts = list(self.facts.values())
        budget, ttl_s = self._tier.capacity_bytes, self._tier.ttl_s
        if any(each.maxmemory and each.policy == "noeviction" for each in facts) and budget is None:
            notes.append(
                "maxmemory-policy is noeviction: once the server is full it takes nothing more. Set it to allkeys-lru, "
                "or give this tier a budget below maxmemory"
            )
        if (
            any(each.maxmemory and each.policy.startswith("volatile-") for each in facts)
            and ttl_s is None
            and budget is None
        ):
            notes.append(
                "maxmemory-policy evicts only keys that expire, and ours don't: set a TTL, or the policy to allkeys-lru"
            )
        if any(each.version and not each.maxmemory for each in facts) and budget is None:
            notes.append(
                "the server has no maxmemory and this tier no budget: nothing bounds what is stored. Set maxmemory and "
                "maxmemory-policy allkeys-lru, or a budget"
            )
        limit = sum(each.maxmemory for each in facts)
        if budget is not None and limit and all(each.maxmemory for each in facts) and budget > limit:
            notes.append(f"the budget of {budget} bytes is more than the servers' maxmemory of {limit} bytes")
        if notes != self.notes:
            self.notes = notes
            for note in notes:
                self._tier.log.warning("redis settings", tier=self._tier.name, note=note)

    # -- what is owed --------------------------------------------------------------------------------------------------

    def owe_text(self, digest: bytes, namespace: TierNamespace | None) -> None:
        self._texts[digest] = namespace
        self.hurry()

    def owe(self, names: list[bytes]) -> None:
        """Blocks whose removal did not get through."""
        for name in names:
            self.owed[name] = None
        if len(self.owed) > OWED_MAX:
            for name in self.owed:
                self.owed_flushes[name[:DIGEST_BYTES]] = None
            self.owed.clear()

    def is_owed(self, name: bytes) -> bool:
        """Whether a block was removed, wherever it may still be."""
        return name in self.owed or name in self._removing or self.is_flushing(name)

    def is_flushing(self, name: bytes) -> bool:
        """Whether a block's namespace is being removed, or still has to be."""
        flushes = self.owed_flushes
        return bool(flushes) and (None in flushes or name[:DIGEST_BYTES] in flushes)

    @contextlib.contextmanager
    def removing(self, names: Sequence[bytes]) -> Iterator[None]:
        """While blocks are being removed, they answer as absent."""
        self._removing.update(names)
        try:
            yield
        finally:
            self._removing.subtract(names)
            for name in names:
                if not self._removing[name]:
                    del self._removing[name]

    @contextlib.contextmanager
    def flushing(self, digest: bytes | None) -> Iterator[None]:
        """While somebody else flushes a namespace (None: all). It stays owed unless flush() comes through."""
        self.owed_flushes[digest] = None
        self._flushing[digest] += 1
        try:
            yield
        finally:
            self._flushing[digest] -= 1
            if not self._flushing[digest]:
                del self._flushing[digest]

    async def _pay(self) -> None:
        for digest in list(self.owed_flushes):
            if digest not in self._flushing:
                await self.flush(digest)
        if self.owed:
            await self._tier.remove(list(self.owed))
        if not self._texts_read:
            read = await self._ask(self._upkeep.read_namespaces)
            if read.done:
                self._texts_read = True
                # What the servers have lost comes back from here.
                self._texts = self._tier.adopt(read.outcomes[0]) | self._texts
        if self._texts:
            texts, self._texts = self._texts, {}
            told = await self._ask(functools.partial(self._upkeep.write_namespaces, texts))
            if not told.done or told.full or told.elsewhere:
                self._texts = texts | self._texts
        if self._tier.books.order and self._tier.clock.monotonic() >= self._order_at:
            self._order_at = self._tier.clock.monotonic() + _ORDER_S
            await self._write_order()

    async def _write_order(self) -> None:
        order, self._tier.books.order = self._tier.books.order, {}
        by_digest: dict[bytes, list[tuple[bytes, int | None]]] = {}
        for name, use in order.items():
            by_digest.setdefault(name[:DIGEST_BYTES], []).append((name, use))
        for digest, uses in by_digest.items():
            for begin in range(0, len(uses), _ORDER_MAX):
                some = uses[begin : begin + _ORDER_MAX]
                told = await self._ask(functools.partial(self._upkeep.write_order, digest, some))
                if not told.done:
                    # A newer use may have been noted meanwhile.
                    self._tier.books.order = dict(some) | self._tier.books.order

    # -- scans -------------------------------------------------------------------------------------------------------

    async def flush(self, digest: bytes | None) -> int:
        """Removes a namespace (None: all) from every node. Stays owed where a node could not be asked. Returns how many
        blocks were there.
        """
        removed, complete = 0, bool(self._tier.servers.nodes())
        for node in self._tier.servers.nodes():
            cursor = 0
            while True:
                step = await self._ask(functools.partial(self._upkeep.flush, node, digest, cursor), node)
                removed += step.outcomes[0].removed
                if not step.done:
                    complete = False
                    break
                cursor = step.outcomes[0].cursor
                if not cursor:
                    break
        if complete and digest is not None:
            await self._ask(functools.partial(self._upkeep.drop_order, digest))
        if complete:
            self.owed_flushes.pop(digest, None)
        return removed

    async def _sweep(self) -> None:
        """Looks at all that is there: what others have stored, what was evicted, what a writer left unfinished."""
        tier, books = self._tier, self._tier.books
        books.begin_sweep()
        digests: set[bytes] = set()
        firsts: set[bytes] = set()
        others: dict[str, dict[bytes, int]] = {}
        for node in tier.servers.nodes():
            cursor = 0
            parts = others.setdefault(node, {})
            while True:
                step = await self._ask(functools.partial(self._upkeep.sweep, node, cursor), node)
                if not step.done:
                    books.give_up_sweep()
                    self._sweep_at = tier.clock.monotonic() + min(1.0, self._sweep_interval_s)
                    return
                swept = step.outcomes[0]
                books.found((name, size) for name, size in swept.blocks if not self.is_owed(name))
                firsts.update(name for name, _ in swept.blocks)
                for name, part in swept.others:
                    parts[name] = max(part, parts.get(name, 0))
                digests.update(name[:DIGEST_BYTES] for name, _ in swept.blocks)
                cursor = swept.cursor
                if not cursor:
                    break
        uses = {} if books.complete or books.capacity_bytes is None else await self._read_order(digests)
        tier.counts["vanished"] += books.end_sweep(uses)
        orphans = set()
        for node, parts in others.items():
            alone = {name: part for name, part in parts.items() if name not in firsts}
            # Twice in a row: nobody is writing that block.
            abandoned = {name: part for name, part in alone.items() if name in self._orphans}
            orphans.update(alone.keys() - abandoned.keys())
            if abandoned:
                gone = await self._ask(functools.partial(self._upkeep.remove_parts, node, abandoned), node)
                tier.counts["orphans_removed"] += gone.outcomes[0]
        self._orphans = orphans
        self._sweep_at = tier.clock.monotonic() + self._sweep_interval_s
        tier.swept.set()

    async def _read_order(self, digests: set[bytes]) -> dict[bytes, float]:
        uses: dict[bytes, float] = {}
        for digest in digests:
            cursor = 0
            while True:
                step = await self._ask(functools.partial(self._upkeep.read_order, digest, cursor))
                cursor, found = step.outcomes[0]
                uses.update(found)
                if not step.done or not cursor:
                    break
        return uses

    def describe(self) -> dict[str, Any]:
        return {
            "notes": list(self.notes),
            "servers": [
                {
                    "node": node,
                    "version": facts.version,
                    "maxmemory_bytes": facts.maxmemory,
                    "policy": facts.policy,
                    "used_bytes": facts.used,
                    "role": facts.role,
                }
                for node, facts in sorted(self.facts.items())
            ],
            "kind": self._tier.address.kind.value,
            "owed": len(self.owed) + len(self.owed_flushes),
        }
