"""vLLM's OffloadingSpec: builds the manager in the scheduler process and the worker in each worker process."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

import kvstore
from engine_plugin.copy.contract import CopyEngine
from engine_plugin.copy.reads import DirectReads
from engine_plugin.vllm import metrics
from engine_plugin.vllm.acks import Acks
from engine_plugin.vllm.announced import Announced
from engine_plugin.vllm.autostart import ensure_daemon
from engine_plugin.vllm.callers import locals_of_caller
from engine_plugin.vllm.direct import DirectLoads, Opening
from engine_plugin.vllm.layout import layout_of
from engine_plugin.vllm.link import DaemonLink
from engine_plugin.vllm.manager import KVStoreManager
from engine_plugin.vllm.naming import format_of, namespace_of, refuse_unsupported
from engine_plugin.vllm.offers import Offers
from engine_plugin.vllm.pd import PrefillDecode, Side
from engine_plugin.vllm.rates import LoadPolicy
from engine_plugin.vllm.settings import parse_settings
from engine_plugin.vllm.worker import KVStoreWorker
from engine_plugin.vllm.worth import Block
from kvstore.endpoint import default_endpoint, parse_endpoint
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine_plugin.vllm.connector import KVStoreConnector

#: Reserved slots are the engine's own bytes: at most one part in so many of its share waits empty.
_STOCK_PART_OF_SHARE: Final = 2
#: Unused part of a slot from which on it is said at start.
_WASTE_SAID: Final = 0.02

log = logging.getLogger("vllm.kvstore")


def _connector() -> KVStoreConnector:
    """The connector that is creating a spec. vLLM's stock one becomes one of ours: see `KVStoreConnector.adopt`."""
    from engine_plugin.vllm.connector import KVStoreConnector  # which looks at this module's class

    caller = locals_of_caller(OffloadingConnector.__init__)
    if caller is None:
        raise ConfigError(
            "KVStoreSpec is not created by vLLM's OffloadingConnector: set kv_connector to KVStoreConnector (or to "
            "OffloadingConnector, with 'spec_name': 'KVStoreSpec')"
        )
    connector: OffloadingConnector = caller["self"]
    if isinstance(connector, KVStoreConnector):
        return connector
    return KVStoreConnector.adopt(connector, caller["vllm_config"], caller["kv_cache_config"])


class KVStoreSpec(OffloadingSpec):
    """See the module. Constructing it is cheap and opens nothing: vLLM does so in every process of an engine.

    Raises:
        ConfigError: a setting is wrong, or this engine's KV cannot be kept; the message says what to change.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._facts = _connector().facts
        self._settings = parse_settings(config.extra_config)
        refuse_unsupported(config, self._facts)
        self._endpoint = str(
            parse_endpoint(self._settings.endpoint) if self._settings.endpoint is not None else default_endpoint()
        )
        if self._settings.drop_on_load and (self._facts.stores or not self._facts.loads):
            raise ConfigError("'kvstore.drop_on_load' takes blocks away: it needs kv_role kv_consumer")
        if self._settings.drop_on_load and (self._facts.windowed or len(config.groups) > 1):
            raise ConfigError(
                "'kvstore.drop_on_load' works for models with one KV cache group with full attention: remove it"
            )
        if self._settings.autostart and not parse_endpoint(self._endpoint).is_loopback:
            raise ConfigError(f"'kvstore.autostart' cannot start a daemon on another machine ({self._endpoint})")
        self.namespace = namespace_of(config, self._facts, self._settings.tenant)
        self._format = format_of(config, self._facts)
        # vLLM would have the first rank store alone what all of them hold alike.
        self.replicated_layout = False
        self._manager: KVStoreManager | None = None
        self._worker: KVStoreWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._ensure_daemon()
            assert self.namespace.block_size is not None
            policy = LoadPolicy(
                self.namespace.block_bytes,
                time.monotonic,
                auto=self._settings.load_policy == "auto",
                computes=self._facts.stores,
            )
            # With several groups nothing is leased on the disk: see Lookups.
            direct = DirectLoads(self.config.parallel.world_size, self.namespace.block_bytes, policy, time.monotonic)
            link = DaemonLink(
                self._connect("scheduler", self.namespace),
                stock_max=self._stock_max(),
                coming_s=self._settings.pending_deadline_s,
                policy=policy,
                extents_min=direct.extents_min,
            )
            self._manager = KVStoreManager(
                link,
                slot_format=self._format,
                workers=self.config.parallel.world_size,
                blocks=self._blocks(),
                windowed=self._facts.windowed,
                deadline_s=self._settings.verdict_deadline_s,
                pd=PrefillDecode(self._side(), now=time.monotonic, nested=self._facts.nested),
                loads=self._facts.loads,
                stores=self._facts.stores,
                announced=Announced(on=self.kv_events_config.enable_kv_cache_events),
                drop=self._settings.drop_on_load,
                require_salt=self._settings.require_salt,
                policy=policy,
                direct=direct,
                offers=Offers(self._settings.store_threshold, self._settings.max_tracker_size),
                # Beside other connectors a step may find that what was copied came from a load that failed.
                acks=Acks(link.commit) if self._facts.stores and not self._facts.nested else None,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            rank = self.config.parallel.rank
            layout = layout_of(kv_caches, self._format, rank, self.config.parallel.world_size)
            if rank == 0:
                self._ensure_daemon()
            self._worker = KVStoreWorker(
                layout,
                client=self._connect(f"worker {rank}", None),
                engine=self._copy_engine(layout.device),
                rank=rank,
                direct=Opening(
                    self._settings.gds, lambda compat: self._open_reads(layout.device, layout.format.slot_bytes, compat)
                ),
            )
        return self._worker

    def _open_reads(self, device: str, block_bytes: int, compat: bool) -> DirectReads:
        """Reads from the disk into KV memory on this device. On a thread of its own."""
        from engine_plugin.copy.gds import open_reads  # which takes a second to import

        return open_reads(device, block_bytes, compat=compat)

    def _copy_engine(self, device: str) -> CopyEngine:
        """For KV memory on this device. Imported here: each needs what the other's machines may not have."""
        if device == "cpu":
            from engine_plugin.copy.cpu import CpuCopyEngine

            return CpuCopyEngine(self._settings.settled_copy_threads())
        import torch

        from engine_plugin.copy.cuda import CudaCopyEngine
        from engine_plugin.copy.cudart import CudaError
        from engine_plugin.copy.watched import WatchedCopies

        try:
            engine = CudaCopyEngine(device, self._settings.copy_engine)
            return WatchedCopies(engine, lambda: torch.cuda.set_device(engine.device))
        except CudaError as error:
            raise ConfigError(f"kvstore cannot copy from and to {device}: {error}") from None

    def _blocks(self) -> dict[int, Block]:
        """What a block of each group is. vLLM's layers have pages of one size; the largest group fills its slot."""
        most = max(len(group.layer_names) for group in self.config.groups)
        blocks = {
            group.group_id: Block(
                group.tokens_per_block * self.blocks_per_chunk,
                self.namespace.block_bytes * len(group.layer_names) // most,
            )
            for group in self.config.groups
        }
        wasted = {group: 1 - block.size_bytes / self.namespace.block_bytes for group, block in blocks.items()}
        if max(wasted.values()) > _WASTE_SAID:
            log.warning(
                "kvstore: the KV cache groups of this model have unequal numbers of layers, and slots are as large as "
                "the largest one's blocks (%d bytes); blocks of %s leave room unused",
                self.namespace.block_bytes,
                ", ".join(f"group {group} {part:.0%}" for group, part in wasted.items() if part > _WASTE_SAID),
            )
        return blocks

    def _side(self) -> Side:
        assert self.namespace.block_size is not None
        return Side(
            digest=self.namespace.digest().hex(),
            model=self.namespace.model,
            block_tokens=self.namespace.block_size,
            wait_s=self._settings.pd_wait_s,
            loads=self._facts.loads,
            stores=self._facts.stores,
        )

    def _ensure_daemon(self) -> None:
        if self._settings.autostart:
            assert self.namespace.block_size is not None
            ensure_daemon(
                self._endpoint,
                cpu_bytes=self._settings.share_bytes,
                block_size=self.namespace.block_size,
                token=self._settings.token,
            )

    def _connect(self, part: str, namespace: kvstore.Namespace | None) -> Any:
        """A session that attaches, and attaches again, in the background: an engine starts without a daemon too."""
        return kvstore.connect(
            self._endpoint,
            namespace,
            client_name=f"vllm {part}",
            group=self.config.engine_id,
            share_bytes=self._settings.share_bytes,
            token=self._settings.token,
            timeout_s=self._settings.timeout_s,
            wait=False,
            prefault=namespace is None,  # only workers touch the pool
            tls=self._settings.tls,
            staging_bytes=self._settings.staging_bytes if namespace is None else 0,
            data_congestion=self._settings.data_congestion,
        )

    def _stock_max(self) -> int:
        """Most empty slots held in reserve: what two steps can fill, but never much of the engine's share."""
        if not self._facts.stores:
            return 0
        settings, namespace = self._settings, self.namespace
        assert namespace.block_size is not None
        step_blocks = -(-self._facts.tokens_per_step // namespace.block_size) * len(self.config.groups)
        wanted = settings.stock_blocks or max(16, 2 * step_blocks)
        if settings.share_bytes:
            wanted = min(wanted, max(1, settings.share_bytes // namespace.block_bytes // _STOCK_PART_OF_SHARE))
        return wanted
