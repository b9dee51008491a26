"""vLLM's OffloadingManager: the scheduler's side. Translates, and decides nothing; see lookups and stores.

Every hook answers at once and none raises: what goes wrong is counted and answered as a miss. The one exception is
`answered_at_once`, which waits for a moment where nobody else can be kept waiting.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_plugin.vllm import metrics
from engine_plugin.vllm.acks import Acks
from engine_plugin.vllm.adapters import Adapters
from engine_plugin.vllm.announced import Announced, Rounds
from engine_plugin.vllm.callers import engine_queue
from engine_plugin.vllm.coming import NOTHING_EXPECTED, Expected
from engine_plugin.vllm.direct import DirectLoads
from engine_plugin.vllm.guard import guarded, limited_log, note_failure, nothing
from engine_plugin.vllm.layout import SlotFormat
from engine_plugin.vllm.link import DaemonLink
from engine_plugin.vllm.lookups import Lookups, Verdict
from engine_plugin.vllm.messages import SlotSpec, WorkerReport, no_slots
from engine_plugin.vllm.offers import Offers
from engine_plugin.vllm.pd import PrefillDecode
from engine_plugin.vllm.plan import LoadPlan
from engine_plugin.vllm.rates import LoadPolicy, Steps
from engine_plugin.vllm.rest import Rest
from engine_plugin.vllm.runs import by_group, group_of
from engine_plugin.vllm.stores import KnownKeys, Stores
from engine_plugin.vllm.worth import Block

#: By Verdict, which is a number: enumerations hash slowly, and this is looked up for each block.
_RESULT_OF: Final = (LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY)
assert (Verdict.HIT, Verdict.MISS, Verdict.RETRY) == (0, 1, 2)

#: A request of which a step computes fewer tokens than this is decoding, with some tokens speculated perhaps.
PREFILL_CHUNK_MIN: Final = 32
#: How long the only request of an engine waits for its answer within the step that asks, which saves it another step
#: and the pause that vLLM makes after one without tokens: 2 ms of a time to first token. Most answers take 1 ms.
AT_ONCE_S: Final = 0.005
#: Pause of a step that has nothing to compute while a load is under way, of whose end only another step learns. Not
#: where the engine has paused by itself since the step before, as its loop does in a process of its own.
GIVE_WAY_LOADING_S: Final = 0.0005


def _nothing_to_store(*_args: object, **_kwargs: object) -> PrepareStoreOutput:
    return PrepareStoreOutput(keys_to_store=[], store_spec=no_slots(), evicted_keys=[])


class KVStoreManager(OffloadingManager):
    """See the module. One per engine; scheduler thread only.

    Args:
        link: The line to the daemon; owned and closed by this manager.
        slot_format: How ranks divide a slot.
        workers: Number of workers (ranks) of the engine.
        blocks: By KV-cache group, what a stored block is.
        windowed: Groups of which the end of a prefix is needed only, and how many of its blocks.
        deadline_s: Longest wait for the answer to a lookup.
        pd: What is said to and heard from engines of the other side of disaggregated prefill.
        loads: The engine's role lets it load.
        stores: The engine's role lets it store.
        announced: What KV events tell.
        drop: Blocks are claimed when they are found, and removed when they are loaded.
        require_salt: Requests without a cache salt are left alone.
        policy: Says what is faster to load than to compute; None: everything is.
        direct: Says which blocks on the disk are read past the pool; None: none.
        offers: Says which of the blocks that are not there are to be stored.
        acks: Hears from workers between steps; owned and closed by this manager.
    """

    def __init__(
        self,
        link: DaemonLink,
        *,
        slot_format: SlotFormat,
        workers: int,
        blocks: Mapping[int, Block],
        windowed: Mapping[int, int],
        deadline_s: float,
        pd: PrefillDecode,
        loads: bool = True,
        stores: bool = True,
        announced: Announced | None = None,
        drop: bool = False,
        require_salt: bool = False,
        policy: LoadPolicy | None = None,
        direct: DirectLoads | None = None,
        offers: Offers | None = None,
        acks: Acks | None = None,
    ) -> None:
        self._link = link
        self._acks = acks
        self._format = slot_format
        self._workers = workers
        self._tokens_per_block = tokens_per_block = {group: block.tokens for group, block in blocks.items()}
        self._prefix_group = next((group for group in tokens_per_block if group not in windowed), -1)
        self._grouped = len(tokens_per_block) > 1 or bool(windowed)
        self._stores_allowed = stores
        self._pd = pd
        self._mapped: dict[int, bytes] = {}  # rank -> generation its worker has mapped
        self._registered: dict[int, int] = {}  # rank -> bytes of the pool registered with its GPU
        self._known = KnownKeys(time.monotonic)
        self._adapters = Adapters()
        self._announced = announced or Announced(on=False)
        self._rounds = Rounds(self._announced, link.ask_whether_there, time.monotonic)
        self._lookups = Lookups(
            link,
            deadline_s=deadline_s,
            now=time.monotonic,
            ready_generation=self.ready_generation,
            on_present=self._known.add,
            on_absent=self._known.discard,
            pin=loads,
            expect=self._expected,
            apart=self._adapters.of,
            announced=self._announced,
            drop=drop,
            policy=policy,
            blocks=blocks,
            windowed=windowed if self._grouped else None,
            only_windows=len(windowed) == len(tokens_per_block),
            end_of=self._end_of,
        )
        self._policy = policy
        self._direct = direct
        self._steps = Steps(policy.note_step if policy is not None else nothing, time.monotonic)
        self._copies_s: dict[str, float] = {}  # of loads whose completion is about to be told
        self._load_nothing: set[str] = set()
        self._require_salt = require_salt
        self._store_nothing: set[str] = set()
        self._may_rest = not pd.nested  # another connector may have work to do in steps
        self._rest = Rest(link.wait_answer, engine_queue)
        self._stores = Stores(
            link,
            workers=workers,
            known=self._known,
            ready_generation=self.ready_generation,
            ask_about=self._lookups.ask_about,
            announced=self._announced,
            offers=offers,
            windowed=windowed,
            acks=acks,
        )
        #: Request -> by group, end token and key of its last load or store.
        self._last_offered: dict[str, dict[int, tuple[int, OffloadKey]]] = {}
        self._alive: dict[str, ReqContext] = {}
        self._gave_way_at = 0.0
        self._counts: Counter[tuple[str, str]] = Counter()
        self.hook_errors: Counter[str] = Counter()

    def ready_generation(self) -> bytes | None:
        """The generation that every worker has mapped; None while one has none or they differ."""
        generations = set(self._mapped.values())
        if len(self._mapped) < self._workers or len(generations) != 1:
            return None
        return generations.pop() or None

    @guarded(nothing)
    def give_way(self) -> None:
        """Where a request waits for an answer or a load: lets other threads of this process run, for a moment; and
        other processes too, where nothing else is to be done before an answer is in.
        """
        if self._lookups.loading():
            if time.monotonic() - self._gave_way_at < 2 * GIVE_WAY_LOADING_S:
                self._link.wait_answer(GIVE_WAY_LOADING_S)
        elif self._lookups.waiting():
            if self._may_rest and not self._stores.any_under_way and self._lookups.all_wait(self._alive):
                self._rest.rest(self._lookups.due)
            else:
                self._rest.pause()
        self._gave_way_at = time.monotonic()

    @guarded(nothing)
    def await_load(self, ended: Callable[[], bool]) -> None:
        """Where nothing is computed and a load is under way: until `ended` says that one has ended, for a short time
        at most.
        """
        if self._may_rest and self._lookups.loading() and not self._lookups.waiting():
            self._rest.until(ended)

    @guarded(lambda _self: False)
    def answered_at_once(self) -> bool:
        """Whether it is worth asking again in this very step, after lookups that were to be asked again: where nobody
        else can be kept waiting, they go out at once, and the answer may be in after a moment.
        """
        return len(self._alive) == 1 and self._lookups.ask_now(alone=True) and self._link.wait_answer(AT_ONCE_S)

    @guarded(lambda _self: False)
    def has_pending_work(self) -> bool:
        """Whether the engine has to go on stepping though it has no requests and no store of its own under way."""
        return self._stores.waits_for_workers()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # Once for each block of each prefix, so this spells out what `guarded` does.
        try:
            if self._load_nothing and req_context.req_id in self._load_nothing:
                return LookupResult.MISS
            if self._grouped and self._is_part(key, req_context):
                return LookupResult.MISS
            return _RESULT_OF[self._lookups.lookup(req_context.req_id, key)]
        except Exception:
            note_failure(self, "lookup")
            return LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    @guarded(lambda _self, _keys, req_context: no_slots(req_context.req_id))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        plan = self._lookups.prepare_load(req_context.req_id, keys)
        if plan is None:
            limited_log("load", logging.ERROR, "kvstore: a load was asked for blocks that are not pinned; it will fail")
            return no_slots(req_context.req_id)
        self._note_offered(list(keys), req_context, len(keys))
        return self._slots_of(plan, req_context.req_id)

    def _slots_of(self, plan: LoadPlan, req_id: str) -> SlotSpec:
        return SlotSpec(
            plan.generation, plan.offsets, plan.epochs, req_id=req_id, format=self._format, extents=plan.extents
        )

    @guarded(nothing)
    def only_load(self, req_id: str) -> SlotSpec | None:
        """What a request will load as soon as it has memory, where the engine has nothing else to do."""
        plan = self._lookups.about_to_load(req_id) if len(self._alive) == 1 else None
        return self._slots_of(plan, req_id) if plan is not None else None

    @guarded(nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._lookups.load_done(req_context.req_id, self._copies_s.pop(req_context.req_id, None))

    @guarded(nothing)
    def on_no_load(self, req_id: str) -> None:
        """A request has got its memory, and nothing is loaded for it from here: what is pinned for it goes back."""
        self._lookups.finished(req_id)

    # -- stores --------------------------------------------------------------------------------------------------------

    @guarded(nothing)
    def on_foreign_load_failed(self) -> None:
        """Another connector's load has left wrong bytes in KV memory, which stores under way may be copying."""
        self._stores.distrust()

    @guarded(_nothing_to_store)
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        if not self._stores_allowed or not keys:
            return _nothing_to_store()
        if req_context.req_id in self._store_nothing:
            self._counts["skipped", "no_salt"] += len(keys)
            return _nothing_to_store()
        ordered = [key for key in keys if not self._is_part(key, req_context)]
        if not ordered:
            return _nothing_to_store()
        groups = by_group(ordered)
        prefix = groups.get(self._prefix_group, [])
        settled = self._stores.leading(prefix, under_way=False) if self._pd.tells_of(req_context.req_id) else 0
        parents = {group: self._parent_of(members[0], req_context) for group, members in groups.items()}
        store = self._stores.prepare(
            ordered,
            {group: parent for group, parent in parents.items() if parent is not None},
            (lambda key: req_context.get_offload_key_position(OffloadKey(key)) or 0) if len(groups) > 1 else None,
            self._adapters.of(req_context.req_id),
        )
        self._note_offered(ordered, req_context, settled)
        if store is None:
            # Not None, which would have vLLM offer the same blocks again in every step, each time with a warning.
            return _nothing_to_store()
        slots = store.slots
        spec = SlotSpec(
            slots.generation,
            slots.offsets,
            slots.epochs,
            ticket=store.ticket,
            format=self._format,
            acks=self._stores.ack_address,
        )
        return PrepareStoreOutput(keys_to_store=list(store.keys), store_spec=spec, evicted_keys=[])

    def _is_part(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Whether a key is of a state in the middle of a block, which is neither stored nor found."""
        end = req_context.get_offload_key_position(key)
        return end is not None and end % self._tokens_per_block[group_of(key)] != 0

    def _note_offered(self, keys: list[OffloadKey], req_context: ReqContext, settled: int) -> None:
        """Remembers the last keys that were loaded or offered, as the parents of the next. Of those of which a whole
        prefix is needed, `settled` were there before.
        """
        req_id = req_context.req_id
        for group, members in by_group(keys).items():
            last = OffloadKey(members[-1])
            end = req_context.get_offload_key_position(last)
            if end is None:
                return
            self._last_offered.setdefault(req_id, {})[group] = (end, last)
            if group == self._prefix_group and self._pd.tells_of(req_id):
                stored = self._stores.leading(members, under_way=True)
                begin = end - len(members) * self._tokens_per_block[group]
                self._pd.note_offered(req_id, begin, min(settled, len(members)), stored, len(members))

    def _parent_of(self, key: bytes, req_context: ReqContext) -> bytes | None:
        """The key before this one in its group of its request, where this manager has seen it."""
        end, group = req_context.get_offload_key_position(OffloadKey(key)), group_of(key)
        if end is None or end <= self._tokens_per_block[group]:
            return None
        offered_end, offered = self._last_offered.get(req_context.req_id, {}).get(group, (0, None))
        return offered if offered_end == end - self._tokens_per_block[group] else None

    @guarded(nothing)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._stores.complete(keys, success)

    # -- disaggregated prefill -----------------------------------------------------------------------------------------

    @guarded(nothing)
    def arrived(self, req_id: str, params: object, prompt_tokens: int) -> None:
        """A request has come in with parameters of disaggregated prefill."""
        self._pd.arrived(req_id, params, prompt_tokens)

    @guarded(nothing)
    def handover(self, req_id: str, token_ids: Sequence[int] | None) -> dict[str, Any] | None:
        """What a request that ends now answers to who asked for its prefill; None where nobody did."""
        return self._pd.handover(req_id, token_ids)

    def _end_of(self, req_id: str, key: bytes) -> int | None:
        """The token at which a key's block ends."""
        context = self._alive.get(req_id)
        return context.get_offload_key_position(OffloadKey(key)) if context is not None else None

    def _expected(self, req_id: str, keys: Sequence[OffloadKey]) -> Expected:
        """What another engine has promised of the keys of a query."""
        context = self._alive.get(req_id)
        end = context.get_offload_key_position(keys[0]) if context is not None else None
        if end is None:
            return NOTHING_EXPECTED
        return self._pd.expected(req_id, end - self._tokens_per_block[group_of(keys[0])], len(keys))

    # -- the engine's life ---------------------------------------------------------------------------------------------

    @guarded(lambda *_args: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not self._alive:
            self._link.set_busy(True)
        self._alive[req_context.req_id] = req_context
        # What is in the pool already is served to any request that loads at all.
        allows = req_context.load_tier_filter.allows
        if not any(allows(Medium.STORAGE, locality) for locality in Locality):
            if allows(Medium.CPU, Locality.LOCAL):
                self._lookups.restrict(req_context.req_id)
            else:
                self._load_nothing.add(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.step_end(context.new_req_ids, context.preempted_req_ids)

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.finished(req_context.req_id)
        self._pd.finished(req_context.req_id)
        self._last_offered.pop(req_context.req_id, None)
        self._load_nothing.discard(req_context.req_id)
        self._store_nothing.discard(req_context.req_id)
        self._adapters.finished(req_context.req_id)
        self._alive.pop(req_context.req_id, None)
        if not self._alive:
            self._link.set_busy(False)

    @guarded(nothing)
    def on_report(self, report: WorkerReport) -> None:
        """What the workers have reported with this step."""
        if report.attached:
            self._mapped.update(report.attached)
            self._announced.all_gone()  # with the pool that they were in; what is on disk is found by lookups again
        self._stores.report(report.stores_done, report.stores_failed, report.stores_lost)
        for req_id, seconds in report.loads_done.items():
            self._copies_s[req_id] = max(seconds, self._copies_s.get(req_id, 0.0))
        for req_id, reason in report.loads_failed.items():
            self._counts["load_failures", reason] += 1
            if self._direct is not None and self._lookups.is_direct(req_id):
                self._direct.failed(reason)
        for rank, (mode, state) in report.gds.items():
            if self._direct is not None:
                self._direct.report(rank, mode, state)
        for hook, count in report.hook_errors.items():
            self._counts["hook_errors", hook] += count
        for path, size in report.copied_bytes.items():
            self._counts["copied", path] += size
        for rank, (size, error) in report.registered.items():
            self._registered[rank] = size
            if error:
                self._counts["register_failures", ""] += 1

    @guarded(nothing)
    def on_loads_failed(self, req_ids: Iterable[str]) -> None:
        """Loads that failed on a worker; called before their completion."""
        for req_id in req_ids:
            self._lookups.load_failed(req_id)

    @guarded(nothing)
    def reset_cache(self) -> None:
        self._lookups.reset()
        self._stores.reset()
        self._last_offered.clear()
        self._copies_s.clear()
        self._link.flush()

    @guarded(lambda _self: [])
    def take_events(self) -> Iterable[OffloadingEvent]:
        self._stores.take_outcomes()
        self._rounds.turn()
        return [OffloadingEvent(keys, Medium.CPU, removed, Locality.LOCAL) for removed, keys in self._announced.take()]

    @guarded(nothing)
    def on_unsalted(self, req_id: str) -> None:
        """A request is about to come that has no cache salt."""
        if self._require_salt:
            self._load_nothing.add(req_id)
            self._store_nothing.add(req_id)

    @guarded(nothing)
    def on_adapter(self, req_id: str, adapter: Any) -> None:
        """A request is about to come that uses a LoRA adapter (vLLM's LoRARequest)."""
        self._adapters.arrived(req_id, adapter)

    @guarded(nothing)
    def on_scheduled(self, tokens: Mapping[str, int]) -> None:
        """What a step computes: tokens of each request. More than a few are a prefill's."""
        prefill = sum(count for count in tokens.values() if count >= PREFILL_CHUNK_MIN)
        self._steps.begin(sum(tokens.values()), prefill)

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Asked by vLLM at the end of every step."""
        self._steps.end()
        counts = self._counts + self._lookups.counts + self._stores.counts + self._pd.counts + self._link.take_counts()
        for hook, count in self.hook_errors.items():
            counts["hook_errors", hook] += count
        if self._policy is not None:
            counts += self._policy.counts
            self._policy.counts.clear()
        if self._direct is not None:
            counts += self._direct.counts
            self._direct.counts.clear()
        for taken in (self._counts, self._lookups.counts, self._stores.counts, self._pd.counts, self.hook_errors):
            taken.clear()
        gds = self._direct is not None and self._direct.on
        return metrics.stats_of(counts, self._link.attached, sum(self._registered.values()), gds)

    @guarded(list)
    def late_stores(self) -> list[int]:
        """Tickets of stores that workers are to be asked about in this step."""
        return self._stores.late()

    @guarded(nothing)
    def shutdown(self) -> None:
        if self._acks is not None:
            self._acks.close()
        self._lookups.reset()
        self._link.close()
