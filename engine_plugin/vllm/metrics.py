"""The plugin's figures in vLLM's own metrics endpoint.

Labels say why: a low hit ratio is read from the reasons of the misses, not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

ATTACHED: Final = "vllm:kvstore_attached"
HITS: Final = "vllm:kvstore_hit_blocks"
MISSES: Final = "vllm:kvstore_miss_blocks"
PUBLISHED: Final = "vllm:kvstore_stored_blocks"
SKIPPED: Final = "vllm:kvstore_store_skipped_blocks"
LOAD_FAILURES: Final = "vllm:kvstore_load_failures"
CALL_FAILURES: Final = "vllm:kvstore_call_failures"
PREFILL_DECODE: Final = "vllm:kvstore_pd_requests"
DECISIONS: Final = "vllm:kvstore_load_decisions"
HOOK_ERRORS: Final = "vllm:kvstore_hook_errors"
COPIED: Final = "vllm:kvstore_copied_bytes"
REGISTERED: Final = "vllm:kvstore_registered_bytes"
REGISTER_FAILURES: Final = "vllm:kvstore_register_failures"
GDS: Final = "vllm:kvstore_gds"
GDS_FALLBACKS: Final = "vllm:kvstore_gds_fallbacks"

#: Kind of a count in the plugin -> metric. Kinds without a metric are for debugging.
_METRIC_OF: Final[Mapping[str, str]] = {
    "hits": HITS,
    "misses": MISSES,
    "published": PUBLISHED,
    "skipped": SKIPPED,
    "not_published": SKIPPED,
    "shortfall": SKIPPED,
    "load_failures": LOAD_FAILURES,
    "calls_failed": CALL_FAILURES,
    "pd": PREFILL_DECODE,
    "decisions": DECISIONS,
    "hook_errors": HOOK_ERRORS,
    "copied": COPIED,
    "register_failures": REGISTER_FAILURES,
    "gds_fallbacks": GDS_FALLBACKS,
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """For `OffloadingSpec.build_metric_definitions`."""
    return {
        ATTACHED: OffloadingGaugeMetadata("1 while the engine is attached to the kvstore daemon, 0 while it is not."),
        HITS: OffloadingCounterMetadata("Blocks that a lookup found in kvstore and pinned."),
        MISSES: OffloadingCounterMetadata(
            "Blocks that a lookup did not get, by reason. absent: not stored. late: not brought up from disk in time. "
            "unavailable: no daemon. silent: no answer in time. worker_detached: the workers have not mapped the "
            "pool. distrusted: an earlier load of that copy failed. flushing: the engine's caches are being reset. "
            "slow: faster to compute. not_allowed: excluded by the request's kv_load_tiers. claimed: another engine "
            "takes them away (kvstore.drop_on_load).",
            ("reason",),
        ),
        PUBLISHED: OffloadingCounterMetadata(
            "Blocks copied to kvstore, by outcome. exists: another engine was faster.", ("outcome",)
        ),
        SKIPPED: OffloadingCounterMetadata(
            "Blocks not stored, by reason. threshold: offered fewer times than store_threshold. no_slots: more at once "
            "than the stock held. no_salt: a request without cache_salt (kvstore.require_salt). "
            "pinned, share, populating, too_large, draining: what the daemon answered to a "
            "request for slots. unavailable: no daemon. copy_failed: a worker could not copy its part, "
            "or another connector's load failed meanwhile.",
            ("reason",),
        ),
        LOAD_FAILURES: OffloadingCounterMetadata(
            "Requests whose load failed and that were computed instead, by reason.", ("reason",)
        ),
        CALL_FAILURES: OffloadingCounterMetadata("Calls to the daemon without a result, by problem.", ("problem",)),
        PREFILL_DECODE: OffloadingCounterMetadata(
            "Requests of disaggregated prefill, by outcome. handed_over: prefilled here for another engine. complete, "
            "incomplete: of a decode request all promised blocks were there, or not in time. foreign_namespace: "
            "prefilled by an engine that computes otherwise. bad_params, too_many_tokens, wrong_role: its "
            "kv_transfer_params cannot be right and were ignored.",
            ("outcome",),
        ),
        DECISIONS: OffloadingCounterMetadata(
            "Requests that found blocks, by what was faster (kvstore.load_policy). load, compute: blocks in the pool. "
            "wait, compute_below: blocks in a tier below it.",
            ("decision",),
        ),
        HOOK_ERRORS: OffloadingCounterMetadata(
            "Exceptions swallowed in a hook, by hook. Any is a defect: please report it with the log.", ("hook",)
        ),
        COPIED: OffloadingCounterMetadata(
            "Bytes copied between KV memory and the pool, by way. cpu: KV memory on the host. staged, batch, kernel: "
            "on a GPU. pageable: memory of the pool that is not registered with the GPU, several times slower. gds, "
            "gds_compat: blocks on disk, read past the pool (the latter through host memory of the engine).",
            ("path",),
        ),
        REGISTERED: OffloadingGaugeMetadata("Bytes of the pool that are registered with the GPU, over all ranks."),
        REGISTER_FAILURES: OffloadingCounterMetadata(
            "Pools that could not be registered with the GPU as a whole; the engine's log says why."
        ),
        GDS: OffloadingGaugeMetadata("1 while blocks on disk may be read past the pool (kvstore.gds), 0 while not."),
        GDS_FALLBACKS: OffloadingCounterMetadata(
            "Why blocks on disk come up through the pool, though kvstore.gds is not off. Once at the start: no_kvikio, "
            "no_gpu, no_nvidia_fs (auto only), several_ranks (auto only), block_size (no multiple of 4096), no_memory "
            "(on the GPU), error. Then for each load that failed, after which the others go through the pool for 30 s: "
            "as load failures.",
            ("reason",),
        ),
    }


def stats_of(
    counts: Counter[tuple[str, str]], attached: bool, registered_bytes: int = 0, gds: bool = False
) -> OffloadingConnectorStats:
    """Counts since the last call as vLLM's stats."""
    stats = OffloadingConnectorStats()
    stats.set_gauge(ATTACHED, int(attached))
    stats.set_gauge(REGISTERED, registered_bytes)
    stats.set_gauge(GDS, int(gds))
    for (kind, label), amount in counts.items():
        metric = _METRIC_OF.get(kind)
        if metric is not None and amount:
            stats.increase_counter(metric, amount, (label,) if label else ())
    return stats
