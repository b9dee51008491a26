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

#: Module, class, method -> parameters that are passed or received here.
_SIGNATURES: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    ("vllm.v1.kv_offload.base", "OffloadingSpec", "__init__", ("config",)),
    ("vllm.v1.kv_offload.base", "OffloadingSpec", "get_manager", ()),
    ("vllm.v1.kv_offload.base", "OffloadingSpec", "get_worker", ("kv_caches",)),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "lookup", ("key", "req_context")),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "prepare_load", ("keys", "req_context")),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "complete_load", ("keys", "req_context")),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "prepare_store", ("keys", "req_context")),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "complete_store", ("keys", "req_context", "success")),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "on_new_request", ("req_context",)),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "on_request_finished", ("req_context",)),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "on_schedule_end", ("context",)),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "reset_cache", ()),
    ("vllm.v1.kv_offload.base", "OffloadingManager", "get_stats", ()),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", "submit_store", ("job_id", "src_spec", "dst_spec")),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", "submit_load", ("job_id", "src_spec", "dst_spec")),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", "get_finished", ()),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", "wait", ("job_ids",)),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector",
        "__init__",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector",
        "get_transfer_results",
        ("finished_req_ids",),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector",
        "update_connector_output",
        ("connector_output",),
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
        where = f"{class_name}.{method_name}"
        try:
            method = getattr(getattr(find(module_name), class_name), method_name)
        except (ImportError, AttributeError):
            problems.append(f"{where} is gone")
            continue
        missing = set(parameters) - set(inspect.signature(method).parameters)
        if missing:
            problems.append(f"{where} has no parameter {', '.join(sorted(missing))}")
    if problems:
        raise UnsupportedEngine(
            f"the installed vLLM does not look like one this kvstore plugin supports ({SUPPORTED_TEXT}): "
            + "; ".join(problems)
        )


def require_supported() -> None:
    """Both checks, against the vLLM that is installed."""
    import vllm

    require_supported_version(vllm.__version__)
    require_signatures()
