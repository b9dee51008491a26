"""From what an engine computes with to a `kvstore.Namespace`: all that must be equal for KV to be interchangeable.

vLLM's block hashes name tokens (with LoRA name, multimodal hashes and cache salt), not the model that turned them into
KV, nor how that is laid out; all of this is named here. Scheduler and workers compute the same digest: only things
that are settled before the processes part are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.blocks import Namespace
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

#: How the bytes of one block are ordered: rank by rank, in a rank block by block, in a block layer by layer, each page
#: as the engine holds it. Another order is another id.
FORMAT_ID: Final = "direct-1"

_HASHES_WITH_SECRET_SEED: Final = ("xxhash", "xxhash_cbor")
_DEFAULT_SEED: Final = "vllm-none-hash"
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the plugin needs from vLLM's configuration beyond `OffloadingConfig`.

    Attributes:
        hash_algo: Name of the block hash.
        hash_seed: Root of the hash chain.
        revision: Revision of the model, or a fingerprint of its weights where they lie in a folder.
        extra: Other settings that change KV bytes, as pairs.
        stores: The role lets this engine store.
        loads: The role lets this engine load.
        tokens_per_step: Most tokens that one engine step computes.
        hosts: Number of hosts that the ranks are spread over.
    """

    hash_algo: str = "sha256"
    hash_seed: str = _DEFAULT_SEED
    revision: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    stores: bool = True
    loads: bool = True
    tokens_per_step: int = 8192
    hosts: int = 1


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """Reads vLLM's configuration. Looks at the model's files, so once per process."""
    transfer = vllm_config.kv_transfer_config
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    assert transfer is not None and transfer.engine_id is not None
    algo = str(cache.prefix_caching_hash_algo)
    return EngineFacts(
        hash_algo=algo,
        hash_seed=hash_seed(algo, transfer.engine_id),
        revision=weights_fingerprint(model.model) or str(model.revision or ""),
        extra=_other_settings(vllm_config),
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        tokens_per_step=int(vllm_config.scheduler_config.max_num_batched_tokens),
        hosts=int(vllm_config.parallel_config.nnodes_within_dp),
    )


def hash_seed(algo: str, engine_id: str) -> str:
    """Root seed of the engine's hash chain, without waiting for the process that computes hashes.

    A hash that is not cryptographic gets a random seed in each process unless PYTHONHASHSEED is set: then no other
    engine can have equal keys, which is said by naming the engine.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    return f"random of engine {engine_id}" if algo in _HASHES_WITH_SECRET_SEED else _DEFAULT_SEED


def weights_fingerprint(model: str) -> str:
    """Fingerprint of a model that lies in a folder: its config and samples of its weights; empty for any other.

    A folder keeps its name when its weights are trained further or replaced; then old KV must not be found again.
    Samples (32 pages of each file, spread evenly) keep this at some milliseconds for any size.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for i in range(_SAMPLES):
                    file.seek(size * i // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    return "weights-" + digest.hexdigest()[:32]


def namespace_of(config: OffloadingConfig, facts: EngineFacts, tenant: str = "") -> Namespace:
    """The namespace of an engine's blocks."""
    parallel = config.parallel
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    return Namespace(
        model=config.model.name,
        dtype=config.model.dtype,
        block_size=tokens,
        block_bytes=rank_bytes_of(config) * parallel.world_size,
        revision=facts.revision,
        tokens_per_hash=config.cache.tokens_per_hash,
        layers=tuple(tuple(group.layer_names) for group in config.groups),
        layout=f"{config.kv_cache_layout};{FORMAT_ID}",
        parallel=(
            f"tp={parallel.tp_size},pp={parallel.pp_size},pcp={parallel.pcp_size},"
            f"dcp={parallel.dcp_size},world={parallel.world_size}"
        ),
        hash_algo=facts.hash_algo,
        hash_seed=facts.hash_seed,
        tenant=tenant,
        extra=(*facts.extra, ("engine", "vllm"), ("tokens_per_kv_block", str(config.groups[0].tokens_per_block))),
    )


def rank_bytes_of(config: OffloadingConfig) -> int:
    """Bytes of one block that each rank holds."""
    return int(config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk)


def refuse_unsupported(config: OffloadingConfig, facts: EngineFacts) -> None:
    """Stops an engine whose KV this version cannot keep, at its start and with the alternative.

    Raises:
        ConfigError: says what does not work and what to change.
    """
    parallel = config.parallel
    reasons = []
    if len(config.groups) != 1:
        reasons.append(
            f"the model has {len(config.groups)} KV cache groups (hybrid models): only models with full attention in "
            "one group work so far"
        )
    if parallel.pp_size != 1 or parallel.pcp_size != 1 or parallel.dcp_size != 1:
        reasons.append(
            f"pipeline or context parallelism (pp={parallel.pp_size}, pcp={parallel.pcp_size}, "
            f"dcp={parallel.dcp_size}) does not work so far: use tensor parallelism alone"
        )
    if facts.hosts != 1:
        reasons.append(f"the ranks are spread over {facts.hosts} hosts: run one engine on each host")
    if config.canonical_layout:
        reasons.append("'canonical_layout' does not work so far: remove it from kv_connector_extra_config")
    if config.worker_kv_bytes_per_block <= 0:
        reasons.append("vLLM does not say how large a KV block is")
    if reasons:
        raise ConfigError("kvstore cannot serve this engine: " + "; ".join(reasons))


def _other_settings(vllm_config: VllmConfig) -> tuple[tuple[str, str], ...]:
    """Settings that change the KV of given tokens and are in none of the named fields."""
    model = vllm_config.model_config
    found: dict[str, Any] = {
        "quantization": model.quantization,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "hf_overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else repr(model.hf_overrides),
        "kv_skip_layers": vllm_config.cache_config.kv_cache_dtype_skip_layers,
    }
    speculative = vllm_config.speculative_config
    if speculative is not None:
        found["speculative"] = [speculative.method, speculative.model]
    return tuple(
        (name, json.dumps(value, sort_keys=True, default=str))
        for name, value in sorted(found.items())
        if value not in (None, {}, [], "")
    )
