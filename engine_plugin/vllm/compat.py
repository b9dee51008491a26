"""Which vLLM this plugin works with. The only module that knows versions.

Checked when a connector is created, so that an engine that does not fit stops at its start with the reason, and not
in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, Final

SUPPORTED: Final = ((0, 32), (0, 33))
SUPPORTED_TEXT: Final = "vLLM 0.32.x and 0.33.x"

_BASE: Final = "vllm.v1.kv_offload.base"
_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_CONNECTOR_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"

#: Module, class, method (empty: the making of one) -> parameters that are passed or received here.
_SIGNATURES: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    (_BASE, "OffloadingSpec", "__init__", ("config",)),
    (_BASE, "OffloadingSpec", "get_manager", ()),
    (_BASE, "OffloadingSpec", "get_worker", ("kv_caches",)),
    (_BASE, "OffloadingSpec", "build_metric_definitions", ("extra_config",)),
    (_BASE, "OffloadingManager", "lookup", ("key", "req_context")),
    (_BASE, "OffloadingManager", "get_load_source", ("key", "req_context")),
    (_BASE, "OffloadingManager", "prepare_load", ("keys", "req_context")),
    (_BASE, "OffloadingManager", "complete_load", ("keys", "req_context")),
    (_BASE, "OffloadingManager", "prepare_store", ("keys", "req_context")),
    (_BASE, "OffloadingManager", "complete_store", ("keys", "req_context", "success")),
    (_BASE, "OffloadingManager", "on_new_request", ("req_context",)),
    (_BASE, "OffloadingManager", "on_request_finished", ("req_context",)),
    (_BASE, "OffloadingManager", "on_schedule_end", ("context",)),
    (_BASE, "OffloadingManager", "take_events", ()),
    (_BASE, "OffloadingManager", "has_pending_work", ()),
    (_BASE, "OffloadingManager", "reset_cache", ()),
    (_BASE, "OffloadingManager", "get_stats", ()),
    (_BASE, "OffloadingManager", "shutdown", ()),
    (_BASE, "OffloadingWorker", "submit_store", ("job_id", "src_spec", "dst_spec")),
    (_BASE, "OffloadingWorker", "submit_load", ("job_id", "src_spec", "dst_spec")),
    (_BASE, "OffloadingWorker", "get_finished", ()),
    (_BASE, "OffloadingWorker", "wait", ("job_ids",)),
    (_BASE, "OffloadingWorker", "shutdown", ()),
    (_BASE, "ReqContext", "", ("req_id", "kv_transfer_params", "load_tier_filter")),
    (_BASE, "ReqContext", "get_offload_key_position", ("key",)),
    (_BASE, "ScheduleEndContext", "", ("new_req_ids", "preempted_req_ids")),
    (_BASE, "PrepareStoreOutput", "", ("keys_to_store", "store_spec", "evicted_keys")),
    (_BASE, "GPULoadStoreSpec", "", ("block_ids", "group_sizes", "block_indices")),
    (_BASE, "TransferResult", "", ("job_id", "success", "transfer_size", "transfer_time")),
    (_BASE, "OffloadingEvent", "", ("keys", "medium", "removed")),
    (_CONNECTOR, "OffloadingConnector", "__init__", ("vllm_config", "role", "kv_cache_config")),
    (_CONNECTOR, "OffloadingConnector", "get_transfer_results", ("finished_req_ids",)),
    (_CONNECTOR, "OffloadingConnector", "update_connector_output", ("connector_output",)),
    (_CONNECTOR, "OffloadingConnector", "build_connector_meta", ("scheduler_output",)),
    (_CONNECTOR, "OffloadingConnector", "build_connector_worker_meta", ()),
    (_CONNECTOR, "OffloadingConnector", "build_prom_metrics", ("vllm_config",)),
    (_CONNECTOR, "OffloadingConnector", "reset_cache", ()),
    (_CONNECTOR, "OffloadingConnector", "on_new_request", ("request",)),
    (_CONNECTOR, "OffloadingConnector", "request_finished", ("request", "block_ids")),
    (_CONNECTOR, "OffloadingConnector", "request_finished_all_groups", ("request", "block_ids")),
    (
        _CONNECTOR_BASE,
        "KVConnectorTransferResults",
        "",
        ("finished_sending", "finished_recving", "failed_recving"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common",
        "OffloadingWorkerMetadata",
        "",
        ("completed_jobs", "transfer_stats"),
    ),
    (
        "vllm.v1.outputs",
        "KVConnectorOutput",
        "",
        ("finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    ("vllm.v1.engine.core", "EngineCoreProc", "_process_engine_step", ("self",)),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "",
        ("num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
)


class UnsupportedEngine(RuntimeError):
    """The installed vLLM is not one that this plugin works with; the message says which ones it works with."""


def parse_version(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as `0.32.0+cpu`."""
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def require_supported_version(text: str) -> None:
    """Raises UnsupportedEngine for a version outside the supported range."""
    version = parse_version(text)
    if version is None or not SUPPORTED[0] <= version <= SUPPORTED[1]:
        raise UnsupportedEngine(
            f"vLLM {text} is installed and this kvstore plugin supports {SUPPORTED_TEXT}: "
            f"install one of those (pip install 'vllm>=0.32,<0.34'), or a kvstore release for vLLM {text}"
        )


def require_signatures(find: Any = importlib.import_module) -> None:
    """Raises UnsupportedEngine where a base class has lost a method or a parameter that is used here."""
    problems = []
    for module_name, class_name, method_name, parameters in _SIGNATURES:
        where = f"{class_name}.{method_name}" if method_name else class_name
        try:
            method = getattr(find(module_name), class_name)
            method = getattr(method, method_name) if method_name else method
        except (ImportError, AttributeError):
            problems.append(f"{where} is gone")
            continue
        missing = set(parameters) - set(inspect.signature(method).parameters)
        if missing:
            problems.append(f"{where} has no parameter {', '.join(sorted(missing))}")
    _refuse(problems)


def require_overrides(*pairs: tuple[type, type]) -> None:
    """Checks our classes against vLLM's, as pairs of ours and the base.

    Raises:
        UnsupportedEngine: a hook of ours does not take what the installed vLLM may pass to it, or one is missing.
    """
    problems = []
    for ours, base in pairs:
        missing = getattr(base, "__abstractmethods__", frozenset()) - set(dir(ours))
        missing |= {name for name in getattr(ours, "__abstractmethods__", ()) if name in dir(base)}
        problems += [f"{base.__name__}.{name} is new and is not served" for name in sorted(missing)]
        for name, method in vars(ours).items():
            theirs = getattr(base, name, None)
            if name.startswith("_") or not callable(theirs) or not callable(getattr(ours, name)):
                continue
            taken = inspect.signature(method.__func__ if isinstance(method, classmethod) else method).parameters
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
                continue
            new = set(inspect.signature(theirs).parameters) - set(taken) - {"args", "kwargs"}
            if new:
                problems.append(f"{base.__name__}.{name} has a new parameter {', '.join(sorted(new))}")
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedEngine(
            f"the installed vLLM does not look like one this kvstore plugin supports ({SUPPORTED_TEXT}): "
            + "; ".join(problems)
        )


def tells_of_sleep(connector: type) -> bool:
    """Whether vLLM tells a connector that KV memory is about to be taken away (0.33 does, 0.32 does not)."""
    return hasattr(connector, "unregister_kv_caches")


def require_supported() -> None:
    """Both checks, against the vLLM that is installed."""
    import vllm

    require_supported_version(vllm.__version__)
    require_signatures()
