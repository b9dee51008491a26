"""`KVStoreConnector`: vLLM's OffloadingConnector over the kvstore daemon.

The stock connector keeps block tables, chunk keys, fencing, preemption and the counting of ranks. Added here are the
start-up checks, failed loads, and the workers' reports to the scheduler.

A failed load is always computed again, whatever `kv_load_failure_policy` says: its default is to fail the request, and
a fault of the cache must never cost an answer. Inside MultiConnector this holds for the other connectors' loads too,
since vLLM has one policy for an engine.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from engine_plugin.vllm import SPEC, compat, nearby, pauses

compat.require_supported()

from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig  # noqa: E402
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from engine_plugin.vllm.beside import enclosing_config, refuse_neighbours  # noqa: E402
from engine_plugin.vllm.guard import guarded, nothing  # noqa: E402
from engine_plugin.vllm.manager import KVStoreManager  # noqa: E402
from engine_plugin.vllm.messages import KVStoreWorkerMetadata, WorkerReport  # noqa: E402
from engine_plugin.vllm.naming import EngineFacts, facts_of  # noqa: E402
from engine_plugin.vllm.spec import KVStoreSpec  # noqa: E402
from engine_plugin.vllm.worker import KVStoreWorker  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVStoreConnector(OffloadingConnector):
    """See the module. vLLM creates one in the scheduler process and one in each worker process.

    Raises:
        UnsupportedEngine: another vLLM than this plugin works with.
        ConfigError: a setting is wrong or this engine cannot be served; the message says what to change.
    """

    facts: EngineFacts
    hook_errors: Counter[str]

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._prepare(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def adopt(
        cls, connector: OffloadingConnector, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> KVStoreConnector:
        """Makes vLLM's stock connector one of ours, while it is being built and creates its spec.

        The stock one takes every load for good: it would compute with whatever a failed load has left, or end the
        engine. So `spec_name` alone gives all of this class.

        Raises:
            ConfigError: it is neither the stock connector nor one of ours.
        """
        if type(connector) is not OffloadingConnector:
            raise ConfigError(
                f"KVStoreSpec cannot be used in {type(connector).__name__}, which does not recover from failed loads: "
                "set kv_connector to KVStoreConnector or OffloadingConnector"
            )
        connector.__class__ = cls
        assert isinstance(connector, cls)
        connector._prepare(vllm_config, kv_cache_config)
        return connector

    def _prepare(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        if vllm_config.model_config.enable_sleep_mode and not compat.tells_of_sleep(OffloadingConnector):
            raise ConfigError(
                "sleep mode takes KV memory away without a word to this version's connectors, while blocks may be "
                "copied from and to it: use vLLM 0.33, or leave out --enable-sleep-mode"
            )
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        enclosing = enclosing_config()
        if enclosing is not None:
            refuse_neighbours(enclosing)
        for config in (vllm_config, enclosing):
            if config is not None and config.kv_transfer_config is not None:
                # The outermost one's is read by the scheduler right after this constructor.
                config.kv_transfer_config.kv_load_failure_policy = "recompute"
        _use_own_spec(transfer.kv_connector_extra_config)
        _refuse_unequal_blocks(kv_cache_config, transfer.kv_connector_extra_config)
        self.hook_errors = Counter()
        self.facts = facts_of(vllm_config, kv_cache_config, nested=enclosing is not None)
        self._engine_id = transfer.engine_id or ""
        # Inside MultiConnector the others have their say about a step's results.
        self._alone = vllm_config.parallel_config.world_size == 1 and enclosing is None
        self._computes = True

    @property
    def _manager(self) -> KVStoreManager:
        assert self.connector_scheduler is not None and isinstance(self.connector_scheduler.manager, KVStoreManager)
        return self.connector_scheduler.manager

    @property
    def _worker(self) -> KVStoreWorker:
        assert self.connector_worker is not None and isinstance(self.connector_worker.worker, KVStoreWorker)
        return self.connector_worker.worker

    # -- worker process ------------------------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # The first that a worker hears of a step, before any copy of it is asked for.
        self._worker.beside_compute = getattr(kv_connector_metadata, "kvstore_computes", True)
        if self._alone:
            nearby.here(self._engine_id, self)
        super().handle_preemptions(kv_connector_metadata)
        # By now it has begun every store of the steps before.
        self._worker.asked_about(getattr(kv_connector_metadata, "kvstore_late", ()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_failed_loads() & results.finished_recving
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        stock = super().build_connector_worker_meta()
        report = self._take_report() if self.connector_worker is not None else None
        if not report:
            return stock
        stock = stock or OffloadingWorkerMetadata()
        return KVStoreWorkerMetadata(stock.completed_jobs, stock.transfer_stats, report)

    @guarded(nothing)
    def _take_report(self) -> WorkerReport:
        report = self._worker.take_report()
        report.hook_errors.update(self.hook_errors)
        self.hook_errors.clear()
        # The scheduler's connector is called for a step's result only where that says something.
        report.loading = self._alone and self._worker.loading
        report.idle = report.loading and not self._worker.beside_compute
        return report

    def take_ended_loads(self) -> tuple[set[str], KVStoreWorkerMetadata | None]:
        """Loads that have ended well since they were last asked for, and what the next step would report of them. What
        has failed is left to that report: vLLM has to hear of it before anything else.
        """
        assert self.connector_worker is not None
        self._worker.holds_good_loads = True  # for who asks so
        if not self._worker.good_load_ended():
            return set(), None
        self._worker.only_good_loads = True
        try:
            _, ended = self.connector_worker.get_finished(set())
        finally:
            self._worker.only_good_loads = False
        stock = self.connector_worker.build_connector_worker_meta()
        if stock is None:
            return ended, None
        report = self._worker.take_loads_done()
        return ended, KVStoreWorkerMetadata(stock.completed_jobs, stock.transfer_stats, report)

    def unregister_kv_caches(self) -> None:
        """Sleep mode takes KV memory away right after this call (vLLM 0.33); it comes back at the same addresses."""
        if self.connector_worker is not None:
            self._worker.finish()

    # -- scheduler process ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            request.kv_transfer_params = None  # vLLM reads it without a look at its type, here and in its scheduler
        if request.lora_request is not None and not request.abort_immediately:
            self._manager.on_adapter(request.request_id, request.lora_request)
        if not request.cache_salt and not request.abort_immediately:
            self._manager.on_unsalted(request.request_id)
        super().on_new_request(request)
        if not request.abort_immediately:
            self._manager.arrived(request.request_id, params, request.num_prompt_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished(request, block_ids)
        return delayed, self._handover(request) or params

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        delayed, params = super().request_finished_all_groups(request, block_ids)
        return delayed, self._handover(request) or params

    def _handover(self, request: Request) -> dict[str, Any] | None:
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            return None
        return self._manager.handover(request.request_id, request.prompt_token_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        self._manager.on_scheduled(scheduler_output.num_scheduled_tokens)
        self._computes = scheduler_output.total_num_scheduled_tokens > 0
        meta.kvstore_computes = self._computes  # type: ignore[attr-defined]
        late = self._manager.late_stores()
        if late:
            meta.kvstore_late = late  # type: ignore[attr-defined]
        if not self._computes:
            # Nothing to compute, and while a request waits for its lookup the engine would ask again at once. Where
            # scheduler and program share a process, that loop keeps the interpreter from the very thread that fetches
            # the answer (vLLM's own loop sleeps 1 ms here, but only in a process of its own). This gives way for a
            # moment or until an answer is in; it does not wait for the daemon, and nothing could run meanwhile.
            self._manager.give_way()
        return meta

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is None and self._manager.answered_at_once():
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            worker = self._near_worker()
            if worker is not None:
                self._announce_load(worker, request.request_id)
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            self._manager.on_no_load(request.request_id)  # inside MultiConnector, another one may load instead
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _near_worker(self) -> KVStoreConnector | None:
        return nearby.only_worker(self._engine_id) if self._alone else None

    @guarded(nothing)
    def _announce_load(self, worker: KVStoreConnector, req_id: str) -> None:
        """Tells a worker that is near of a load before vLLM finds memory for it and makes the step that brings it."""
        slots = self._manager.only_load(req_id)
        if slots is not None:
            worker._worker.expect_load(slots)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        worker = self._near_worker()
        if worker is not None:
            self._add_ended_loads(connector_output, worker)
        if connector_output.invalid_block_ids:
            self._manager.on_foreign_load_failed()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KVStoreWorkerMetadata):
            self._manager.on_report(meta.report)
        if connector_output.failed_recving:
            self._manager.on_loads_failed(connector_output.failed_recving)
        super().update_connector_output(connector_output)

    @guarded(nothing)
    def _add_ended_loads(self, connector_output: KVConnectorOutput, worker: KVStoreConnector) -> None:
        """Adds to the results of a step what has ended since, before vLLM reads them."""
        meta = connector_output.kv_connector_worker_meta
        if not self._computes and isinstance(meta, KVStoreWorkerMetadata) and meta.report.idle:
            self._manager.await_load(worker._worker.good_load_ended)
        ended, more = worker.take_ended_loads()
        if ended:
            connector_output.finished_recving = ended | (connector_output.finished_recving or set())
        if more is not None:
            connector_output.kv_connector_worker_meta = more if meta is None else meta.aggregate(more)
        # After what must not be lost if this fails.
        if ended and not self._computes and (loop := sys.modules.get(pauses.LOOP)) is not None:
            pauses.skip_next(loop)

    # -- front end -----------------------------------------------------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        _use_own_spec(transfer.kv_connector_extra_config)
        enclosing = enclosing_config()
        if enclosing is not None:
            refuse_neighbours(enclosing)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _use_own_spec(extra: dict[str, Any]) -> None:
    """Has vLLM's factory build our spec, so that the user does not have to name it."""
    named = extra.setdefault("spec_name", SPEC)
    if named != SPEC:
        raise ConfigError(
            f"KVStoreConnector brings its own spec: remove 'spec_name': {named!r}, or use OffloadingConnector"
        )
    # Where the connector was named by kv_connector_module_path, nothing has registered the spec's name.
    extra.setdefault("spec_module_path", "engine_plugin.vllm.spec")


def _refuse_unequal_blocks(kv_cache_config: KVCacheConfig, extra: dict[str, Any]) -> None:
    """Before vLLM does, which does not say what to do."""
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if extra.get("block_size") is not None and len(sizes) > 1:
        raise ConfigError(
            f"'block_size' is {extra['block_size']}, and this model has KV cache groups with blocks of "
            f"{' and '.join(map(str, sorted(sizes)))} tokens: remove it, or say how many blocks make one with "
            "'blocks_per_chunk'"
        )


compat.require_overrides(
    (KVStoreConnector, OffloadingConnector),
    (KVStoreManager, OffloadingManager),
    (KVStoreWorker, OffloadingWorker),
    (KVStoreSpec, OffloadingSpec),
)
