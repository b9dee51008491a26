"""`KVStoreTier`: kvstore below vLLM's own CPU tier, for users of `TieringOffloadingSpec` who want to keep it.

    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
    "secondary_tiers": [{"type": "KVStoreTier", "module_path": "engine_plugin.vllm.tier", "kvstore.endpoint": ...}]

What vLLM's CPU tier takes is copied on to the daemon, which keeps it for other engines, for restarts and in its own
tiers; what that tier lacks is promoted from there. A row of the CPU tier is stored as it is, as one opaque block, so
that all kinds of models work, and only engines of one vLLM release, parallel shape and layout understand each other.

It costs more than KVStoreConnector: every block lies in two pools and is copied once more each way, and each engine has
a CPU tier of its own. In turn a promotion that fails is a miss to vLLM, and no load can fail.

The scheduler thread only hands over and collects. Jobs run on two threads, so that no load waits behind stores.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_jobs
from typing import Any, ClassVar

import numpy as np

from engine_plugin.vllm import compat

compat.require_supported()

import vllm  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402

import kvstore  # noqa: E402
from engine_plugin.copy.cpu import copy_fragments  # noqa: E402
from engine_plugin.vllm import metrics  # noqa: E402
from engine_plugin.vllm.autostart import ensure_daemon  # noqa: E402
from engine_plugin.vllm.callers import locals_of_caller  # noqa: E402
from engine_plugin.vllm.guard import guarded, limited_log, nothing  # noqa: E402
from engine_plugin.vllm.naming import facts_of, namespace_of  # noqa: E402
from engine_plugin.vllm.settings import parse_settings  # noqa: E402
from kvstore.endpoint import default_endpoint, parse_endpoint  # noqa: E402
from kvstore.errors import ConfigError, KVStoreError  # noqa: E402
from kvstore.threads import started_pool  # noqa: E402

#: Pause before blocks that are on their way up from the daemon's tiers are asked for again.
COMING_PAUSE_S = 0.005


class KVStoreTier(SecondaryTierManager):
    """See the module.

    Args:
        offloading_spec: vLLM's spec that creates this tier.
        primary_kv_view: Rows of vLLM's CPU tier. Its memory stays until `shutdown` has returned.
        tier_type: As vLLM names this tier in its metrics.
        settings: The other keys of the tier's configuration: `kvstore.*`, and `cpu_bytes_to_use` as this engine's share
            of the daemon's pool.

    Raises:
        ConfigError: a setting is wrong; the message says what to write.
    """

    medium: ClassVar[Medium] = Medium.CPU

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else Locality.LOCAL
        parsed = parse_settings(settings)
        if parsed.require_salt:
            raise ConfigError("KVStoreTier is told of no salts: 'kvstore.require_salt' works with KVStoreConnector")
        where = parse_endpoint(parsed.endpoint) if parsed.endpoint is not None else default_endpoint()
        if not where.is_unix:
            raise ConfigError(
                f"KVStoreTier needs a daemon on this host, and {where} is on the network: run one here, with a Redis "
                "tier if other hosts should find its blocks"
            )
        namespace = _namespace_of_rows(offloading_spec, self.block_size_bytes, parsed.tenant)
        if parsed.autostart:
            assert namespace.block_size is not None
            ensure_daemon(str(where), cpu_bytes=parsed.share_bytes, block_size=namespace.block_size, token=parsed.token)
        self._rows = _Rows(primary_kv_view)
        self._coming_s = parsed.pending_deadline_s
        self._client = kvstore.connect(
            str(where),
            namespace,
            client_name="vllm tier",
            group=offloading_spec.config.engine_id,
            share_bytes=parsed.share_bytes,
            token=parsed.token,
            timeout_s=parsed.timeout_s,
            wait=False,
        )
        self._lookups = _Lookups(self._client, tier_type)
        self._loads = started_pool(1, "kvstore-tier-load")
        self._stores = started_pool(1, "kvstore-tier-store")
        self._under_way: set[Future[None]] = set()
        self._finished: deque[tuple[TransferJob, JobResult]] = deque()
        self._lock = threading.Lock()  # guards _counts, which the jobs' threads add to
        self._counts: Counter[tuple[str, str]] = Counter()
        self.hook_errors: Counter[str] = Counter()

    # -- vLLM's interface, on the scheduler thread ---------------------------------------------------------------------

    @guarded(lambda *_args: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._client.attached:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            job, result = self._finished.popleft()
            if job.is_promotion and not result.success:
                # Asked for again they would be found again, and fail again.
                self._lookups.mark_miss([key for key in job.keys if key not in (result.successful_keys or ())])
            results.append(result)
        return results

    @guarded(lambda *_args: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait_for_jobs(list(self._under_way))

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for hook, count in self.hook_errors.items():
            counts["hook_errors", hook] += count
        self.hook_errors.clear()
        return metrics.stats_of(counts, bool(self._client.attached))

    def shutdown(self) -> None:
        """Nothing touches the rows afterwards. Bounded by the deadlines of the calls under way."""
        self._loads.shutdown(wait=True, cancel_futures=True)
        self._stores.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        self._lookups.shutdown()

    # -- jobs, on their own threads ------------------------------------------------------------------------------------

    def _submit(self, pool: ThreadPoolExecutor, run: Any, job: TransferJob) -> None:
        future = pool.submit(self._run, run, job)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _run(self, run: Any, job: TransferJob) -> None:
        """Whatever happens, a job ends with a result: vLLM would hold its rows for ever."""
        began = time.monotonic()
        done: Sequence[OffloadKey] = ()
        try:
            done = run(job)
        except KVStoreError as error:
            limited_log("tier", logging.WARNING, "kvstore: a job of the tier failed: %s", error)
        except Exception:
            self._count("hook_errors", run.__name__, 1)
            limited_log("tier", logging.ERROR, "kvstore: a job of the tier failed", exc_info=True)
        finally:
            success = len(done) == len(job.keys)
            size, seconds = len(done) * self.block_size_bytes, time.monotonic() - began
            partly = list(done) if done and not success else None
            self._finished.append((job, JobResult(job.job_id, success, partly, seconds, size)))

    def _store(self, job: TransferJob) -> Sequence[OffloadKey]:
        """Copies rows on to the daemon. Returns the keys that are there now."""
        chains: dict[int, list[tuple[int, OffloadKey, int]]] = defaultdict(list)
        for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            end = job.req_context.get_offload_key_position(key) or 0
            chains[get_offload_group_idx(key)].append((end, key, row))
        done: list[OffloadKey] = []
        for chain in chains.values():
            chain.sort()  # vLLM gives a set; in the daemon a block follows the one before it in its prefix
            done += self._store_chain([key for _, key, _ in chain], [row for _, _, row in chain])
        return done

    def _store_chain(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> Sequence[OffloadKey]:
        client = self._client
        reservation = client.reserve(0, keys=keys)
        missing = [index for index in range(len(keys)) if not reservation.exists[index]]
        given = missing[: len(reservation.offsets)]
        self._count("shortfall", str(reservation.shortfall), len(missing) - len(given))
        if not given:
            return [key for index, key in enumerate(keys) if reservation.exists[index]]
        arena = client.arena
        if arena is None or arena.generation != reservation.generation:
            client.give_up(reservation)
            return []
        try:
            slots = reservation.offsets + np.uint64(arena.address)
            copy_fragments(slots, self._rows.addresses([rows[index] for index in given]), self._rows.sizes(len(given)))
            outcomes = client.commit(
                reservation.generation, reservation.offsets, [keys[i] for i in given], epochs=reservation.epochs
            )
        except BaseException:
            client.give_up(reservation)
            raise
        there = {index for index, outcome in zip(given, outcomes.tolist(), strict=True) if outcome in (1, 2)}
        return [key for index, key in enumerate(keys) if reservation.exists[index] or index in there]

    def _load(self, job: TransferJob) -> Sequence[OffloadKey]:
        """Copies blocks into rows. Returns the keys whose rows are good."""
        row_of = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        wanted, done = list(row_of), []
        until = time.monotonic() + self._coming_s
        while wanted:
            leases = self._client.acquire([(0, [key]) for key in wanted])
            try:
                here = [(key, lease) for key, lease in zip(wanted, leases, strict=True) if len(lease.offsets)]
                done += self._read(here, row_of)
            finally:
                self._client.release(leases)
            wanted = [
                key for key, lease in zip(wanted, leases, strict=True) if lease.pending and not len(lease.offsets)
            ]
            if wanted and time.monotonic() >= until:
                break
            if wanted:
                time.sleep(COMING_PAUSE_S)
        return done

    def _read(self, here: list[tuple[OffloadKey, kvstore.Lease]], row_of: dict[OffloadKey, int]) -> list[OffloadKey]:
        arena = self._client.arena
        here = [(key, lease) for key, lease in here if arena is not None and arena.generation == lease.generation]
        if not here or arena is None:
            return []
        offsets = np.concatenate([lease.offsets for _, lease in here])
        epochs = np.concatenate([lease.epochs for _, lease in here])
        rows = self._rows.addresses([row_of[key] for key, _ in here])
        copy_fragments(rows, offsets + np.uint64(arena.address), self._rows.sizes(len(here)))
        good = arena.epochs_of(offsets) == epochs
        return [key for (key, _), is_good in zip(here, good.tolist(), strict=True) if is_good]

    def _count(self, kind: str, label: str, amount: int) -> None:
        if amount:
            with self._lock:
                self._counts[kind, label] += amount


class _Rows:
    """Addresses in vLLM's CPU tier. Holds no view of it: vLLM releases its own before it unmaps the memory."""

    def __init__(self, view: memoryview) -> None:
        whole = np.frombuffer(view, np.uint8)
        self._base = whole.ctypes.data
        self._count = len(view)
        self._stride = whole.nbytes // self._count

    def addresses(self, rows: Sequence[int]) -> np.ndarray:
        """Where rows begin.

        Raises:
            ValueError: there is no such row.
        """
        numbers = np.array(rows, np.int64)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self._count:
            raise ValueError("a row lies outside of vLLM's CPU tier")
        return np.uint64(self._base) + numbers.astype(np.uint64) * np.uint64(self._stride)

    def sizes(self, count: int) -> np.ndarray:
        """Bytes of so many rows."""
        return np.full(count, self._stride, np.uint64)


class _Lookups(AsyncLookupManager):
    """What is there, asked for on a thread of its own with one call for each request and step."""

    def __init__(self, client: kvstore.Client, tier_type: str) -> None:
        self._client = client
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Also has what lies below the pool brought up. Pins nothing: a promotion that comes too late is a miss."""
        leases = self._client.acquire([(0, [key]) for key in keys])
        self._client.release(leases)
        return [bool(len(lease.offsets) or lease.pending) for lease in leases]


def _namespace_of_rows(spec: OffloadingSpec, row_bytes: int, tenant: str) -> kvstore.Namespace:
    """The namespace of an engine's rows."""
    caller = locals_of_caller(OffloadingConnector.__init__)
    if caller is None:
        raise ConfigError("KVStoreTier works in vLLM's OffloadingConnector with 'spec_name': 'TieringOffloadingSpec'")
    config = spec.config
    namespace = namespace_of(config, facts_of(caller["vllm_config"], caller["kv_cache_config"]), tenant)
    order = "canonical" if config.canonical_layout else "direct"
    release = ".".join(map(str, compat.parse_version(vllm.__version__) or ()))
    return dataclasses.replace(
        namespace,
        block_bytes=row_bytes,
        layout=f"{config.kv_cache_layout};vllm-{release}-tier-{order}",
        extra=(*namespace.extra, ("row_bytes", str(row_bytes))),
    )


compat.require_overrides((KVStoreTier, SecondaryTierManager))
