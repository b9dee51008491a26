"""vLLM's own scheduler and offloading connector, of the installed version, with this plugin in them, and no model.

A step writes to KV memory what stands for the KV of its tokens, and first checks that the KV of all tokens before is
there and theirs: whatever was loaded, recomputed or taken from the engine's own cache. Copies end when they are told
to, the daemon is in memory (tests/plugin/fakes.py), and the clock stands still, so that every order of events can be
made.
"""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from engine_plugin.copy.contract import CopyEngine, CopyStats, Fragments, Then
from engine_plugin.vllm.acks import Acks
from tests.plugin.fakes import SLOT_BYTES, FakeClient, FakeDaemon

BLOCK_TOKENS = 32
TOKEN_BYTES = SLOT_BYTES // BLOCK_TOKENS
VOCABULARY = 1000


class HeldCopies(CopyEngine):
    """Copies that end when `end_one` is called, in the order of their direction."""

    def __init__(self) -> None:
        self.queues: dict[bool, deque[tuple[Any, Fragments, Then]]] = {True: deque(), False: deque()}
        self.fail_next = 0
        self._finished: list[tuple[Then, BaseException | None]] = []

    def use_pool(self, pool: Any) -> None: ...

    def store(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Any:
        return self._begin(False, fragments, then)

    def load(self, fragments: Fragments, then: Then, *, beside_compute: bool = False) -> Any:
        return self._begin(True, fragments, then)

    def _begin(self, is_load: bool, fragments: Fragments, then: Then) -> Any:
        job = object()
        self.queues[is_load].append((job, fragments, then))
        return job

    def end_one(self, is_load: bool) -> bool:
        """Does the oldest copy of a direction; `poll` tells of it."""
        if not self.queues[is_load]:
            return False
        _, fragments, then = self.queues[is_load].popleft()
        if self.fail_next:
            self.fail_next -= 1
            self._finished.append((then, RuntimeError("made to fail")))
            return True
        for kv, pool, size in zip(fragments.kv.tolist(), fragments.pool.tolist(), fragments.size.tolist(), strict=True):
            ctypes.memmove(*((kv, pool) if is_load else (pool, kv)), size)
        self._finished.append((then, None))
        return True

    def poll(self) -> None:
        finished, self._finished = self._finished, []
        for then, error in finished:
            then(0.001, error)

    def wait(self, copies: Collection[Any]) -> None:
        for is_load in (True, False):
            while any(job in copies for job, _, _ in self.queues[is_load]):
                self.end_one(is_load)
        self.poll()

    def stats(self) -> CopyStats:
        return CopyStats()

    def close(self) -> None:
        while self.end_one(True) or self.end_one(False):
            pass


@functools.cache
def configuration(model: Path) -> Any:
    """The parts of the configuration that take long to make."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm.config import ModelConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    config = ModelConfig(model=str(model), dtype="float32", max_model_len=1024, skip_tokenizer_init=True)
    return config, get_request_block_hasher(BLOCK_TOKENS, sha256)


class SchedulerRig:
    """One engine. Use `close`, or the `rigs` fixture, to end it.

    Args:
        monkeypatch: Puts fakes in place of the client, the link's thread and the copy engine.
        blocks: KV blocks of the engine; one of them is vLLM's null block.
        acks: The worker's word is heard between steps, on a thread of its own.
        overlap: The result of a step is read after the next one has been made, as vLLM does with a batch queue.
        draft: The layers include a draft model's (EAGLE, MTP), whose KV at the end of a prefix is not to be relied on.
    """

    def __init__(
        self,
        monkeypatch: Any,
        model: Path,
        daemon: FakeDaemon,
        *,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        blocks: int = 40,
        step_tokens: int = 128,
        events: bool = False,
        acks: bool = False,
        overlap: bool = False,
        draft: bool = False,
    ) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVEventsConfig,
            KVTransferConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager

        from engine_plugin.vllm import spec as spec_module
        from engine_plugin.vllm.connector import KVStoreConnector
        from engine_plugin.vllm.link import DaemonLink

        self.time = 1000.0
        self._overlap = overlap
        self._made: deque[tuple[Any, Any]] = deque()  # steps whose results are not read
        self.daemon = daemon
        self.clients: list[FakeClient] = []
        self.copies = HeldCopies()
        monkeypatch.setattr(kvstore, "connect", self._connect)
        monkeypatch.setattr(
            spec_module, "DaemonLink", functools.partial(DaemonLink, threaded=False, now=lambda: self.time)
        )
        monkeypatch.setattr(spec_module, "Acks", functools.partial(Acks, listen=acks))
        monkeypatch.setattr(spec_module.KVStoreSpec, "_copy_engine", lambda _self, _device: self.copies)
        monkeypatch.setattr("time.monotonic", lambda: self.time)

        model_config, self._hasher = configuration(model)
        config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=step_tokens,
                max_model_len=1024,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="engine_plugin.vllm.connector",
                kv_role=role,
                kv_connector_extra_config={"kvstore.endpoint": "unix:/nowhere/kvstore.sock", **(extra or {})},
            ),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        )
        if draft:  # without a draft model's weights; what the scheduler asks is whether there is one
            monkeypatch.setattr(SpeculativeConfig, "use_eagle", lambda _self: True)
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=1,
                prompt_lookup_max=2,
                target_model_config=model_config,
                target_parallel_config=config.parallel_config,
            )
            assert config.speculative_config.use_eagle_block_drop()
        layer = "layer.0"
        page = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.int8)
        assert page.page_size_bytes == SLOT_BYTES
        kv_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=SLOT_BYTES * blocks, layers=[layer], layer_stride=SLOT_BYTES * blocks, block_stride=SLOT_BYTES
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec([layer], page, is_eagle_group=draft)],
        )
        config.cache_config.num_gpu_blocks = blocks
        self.memory = torch.zeros((blocks, SLOT_BYTES), dtype=torch.int8)
        self._kv = self.memory.numpy().view(np.uint8)
        self.scheduler = Scheduler(
            config, kv_config, StructuredOutputManager(config), block_size=BLOCK_TOKENS, log_stats=True
        )
        self.connector = self.scheduler.connector
        self.worker = KVStoreConnector(config, KVConnectorRole.WORKER, kv_config)
        assert self.worker.connector_worker is not None
        self.worker.connector_worker._init_worker(
            CanonicalKVCaches([CanonicalKVCacheTensor(self.memory, SLOT_BYTES)], [[CanonicalKVCacheRef(0, SLOT_BYTES)]])
        )
        self.manager = self.connector._manager
        self.link = self.manager._link
        self._tables: dict[str, list[int]] = {}
        self._identities: dict[str, bytes] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.counts: dict[str, float] = {}
        self.events: list[Any] = []
        self._events = events
        self.failed_loads = 0
        self.preemptions = 0

    def _connect(self, *_args: Any, **_kwargs: Any) -> FakeClient:
        self.clients.append(FakeClient(self.daemon))
        return self.clients[-1]

    # -- what a user does ----------------------------------------------------------------------------------------------

    def add(
        self,
        id_: str,
        tokens: list[int],
        *,
        max_tokens: int = 4,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        lora: str | None = None,
        lora_path: str = "/nowhere",
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=id_,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            lora_request=LoRARequest(lora, sum(lora.encode()), lora_path) if lora else None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self._identities[id_] = repr((salt, lora, lora_path)).encode()
        self.outputs[id_] = []
        self.scheduler.add_request(request)

    def abort(self, id_: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(id_, RequestStatus.FINISHED_ABORTED)
        self.finished.add(id_)

    def alive(self) -> list[str]:
        return [id_ for id_ in self.outputs if id_ not in self.finished]

    def reset(self, connector: bool) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_connector=connector))

    # -- the engine ----------------------------------------------------------------------------------------------------

    def step(self, turn: bool = True) -> int:
        """One step of the engine, if it would make one. Returns how many tokens it computed."""
        if not self.scheduler.has_requests():
            while self._made:
                self._read(*self._made.popleft())
            return 0
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self._made.append((output, self._execute(output)))
        if self._events:  # vLLM publishes them; here they are taken from under its nose
            self.events += self.connector.take_events()
        if len(self._made) > self._overlap:
            self._read(*self._made.popleft())
        self.time += 0.01
        if turn:
            self.link.turn()
        return int(output.total_num_scheduled_tokens)

    def _read(self, output: Any, executed: Any) -> None:
        """Gives the scheduler what a step has led to."""
        results = self.scheduler.update_from_output(output, executed)
        for client_outputs in results.values():
            for each in client_outputs.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    assert each.finish_reason.name == "LENGTH" or each.request_id in self.finished, each
                    self.finished.add(each.request_id)
            stats = client_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)

    def _execute(self, output: Any) -> Any:
        """What a model runner does with a step."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        ids, sampled = self._forward(output)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        self.failed_loads += len(results.failed_recving)
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id_: index for index, id_ in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _forward(self, output: Any) -> tuple[list[str], list[list[int]]]:
        begins: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            begins[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for id_, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if id_ in cached.resumed_req_ids:
                self._tables[id_] = list(blocks[0])
            elif blocks is not None:
                self._tables[id_] += blocks[0]
            begins[id_] = computed
        ids, sampled = [], []
        for id_, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[id_]
            tokens = request.all_token_ids
            start, end = begins[id_], begins[id_] + count
            kv = kv_of(self._identities[id_], list(tokens[:end]))
            table = np.array(self._tables[id_])
            rows = table[np.arange(end) // BLOCK_TOKENS]
            places = np.arange(end) % BLOCK_TOKENS
            memory = self._kv.reshape(len(self._kv), BLOCK_TOKENS, TOKEN_BYTES)
            assert np.array_equal(memory[rows[:start], places[:start]], kv[:start]), "foreign KV"
            memory[rows[start:], places[start:]] = kv[start:]
            ids.append(id_)
            sampled.append([int.from_bytes(kv[-1].tobytes(), "little") % VOCABULARY] if end == len(tokens) else [])
        return ids, sampled

    def _count(self, stats: dict[str, Any]) -> None:
        for name, by_label in stats["data"].items():
            for labels, value in by_label.items():
                if isinstance(value, int | float):
                    key = f"{name.removeprefix('vllm:kvstore_')}{''.join('/' + label for label in labels)}"
                    self.counts[key] = self.counts.get(key, 0) + value

    # -- what happens --------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Scheduler and worker notice the daemon that is there now."""
        for client in self.clients:
            client.attach()

    def settle(self, most: int = 400) -> None:
        """Steps, with every copy ending in its step, until the engine has nothing to do."""
        for _ in range(most):
            while self.copies.end_one(True) or self.copies.end_one(False):
                pass
            self.step()
            if not self.scheduler.has_requests() and not self._made:
                return
        raise AssertionError(f"the engine does not come to rest: {self.alive()}")

    def answer(self, id_: str, tokens: list[int], **options: Any) -> list[int]:
        """Runs a request to its end."""
        self.add(id_, tokens, **options)
        self.settle()
        return self.outputs[id_]

    def close(self) -> None:
        """Ends the engine, and asserts that no hook has failed."""
        errors = {name: count for name, count in self.counts.items() if "hook_errors" in name}
        errors |= dict(self.manager.hook_errors) | dict(self.worker.hook_errors) | dict(self.connector.hook_errors)
        self.scheduler.shutdown()
        self.worker.shutdown()
        for client in self.clients:
            client.close()
        assert not errors, errors


def kv_of(identity: bytes, tokens: list[int]) -> np.ndarray:
    """What stands for the KV of each token: it depends on all tokens before, and on adapter, image and salt."""
    state = zlib.crc32(identity)
    found = np.empty((len(tokens), 1), np.uint32)
    for place, token in enumerate(tokens):
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        found[place] = state
    return found.view(np.uint8)[:, :TOKEN_BYTES]
