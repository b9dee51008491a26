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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_plugin.vllm.layout import CANONICAL, DIRECT, SINGLE, SlotFormat
from kvstore.blocks import Namespace
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

#: How the bytes of one block are ordered (see layout), by kind. Another order is another id.
FORMAT_IDS: Final = {DIRECT: "direct-1", SINGLE: "single-1", CANONICAL: "canonical-1"}

_HASHES_WITH_SECRET_SEED: Final = ("xxhash", "xxhash_cbor")
_DEFAULT_SEED: Final = "vllm-none-hash"
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".gguf")
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
        mla: Attention keeps one latent per token, not keys and values by head.
        kv_heads: KV heads of the model, over all ranks.
        stages: Layers of each pipeline stage.
        windowed: KV-cache groups that need the end of a prefix only (sliding windows, recurrent states), and how many
            of its blocks.
        nested: The connector is one of several in a MultiConnector.
    """

    hash_algo: str = "sha256"
    hash_seed: str = _DEFAULT_SEED
    revision: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    stores: bool = True
    loads: bool = True
    tokens_per_step: int = 8192
    hosts: int = 1
    mla: bool = False
    kv_heads: int = 1
    stages: tuple[int, ...] = (1,)
    windowed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    nested: bool = False


def facts_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, nested: bool = False) -> EngineFacts:
    """Reads vLLM's configuration. Looks at the model's files, so once per process.

    Args:
        nested: The connector is one of several in a MultiConnector, of which its own configuration shows nothing.
    """
    from vllm.distributed.utils import get_pp_indices

    transfer = vllm_config.kv_transfer_config
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    assert transfer is not None and transfer.engine_id is not None
    layers, stages = model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size
    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    algo = str(cache.prefix_caching_hash_algo)
    return EngineFacts(
        hash_algo=algo,
        hash_seed=hash_seed(algo, transfer.engine_id),
        revision=revision_of(model.model, model.revision),
        extra=_other_settings(vllm_config),
        stores=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        tokens_per_step=int(vllm_config.scheduler_config.max_num_batched_tokens),
        hosts=int(parallel.nnodes_within_dp),
        mla=bool(model.use_mla),
        kv_heads=int(model.get_total_num_kv_heads()),
        stages=tuple(end - begin for begin, end in bounds),
        windowed={
            index: blocks
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if (blocks := _window_blocks(group.kv_cache_spec)) is not None
        },
        nested=nested,
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
    """Fingerprint of a model that lies in a folder or file: its config and samples of its weights; empty for any other.

    A folder keeps its name when its weights are trained further or replaced; then old KV must not be found again.
    Samples (32 pages of each file, spread evenly) keep this at some milliseconds for any size.
    """
    place = Path(model)
    if not place.exists():
        return ""
    digest = hashlib.sha256()
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.name in ("config.json", "adapter_config.json"):
            digest.update(path.read_bytes())
        elif path.suffix in _WEIGHT_FILES:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for i in range(_SAMPLES):
                    file.seek(size * i // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    return "weights-" + digest.hexdigest()[:32]


def revision_of(model: str, revision: str | None, config_name: str = "config.json") -> str:
    """What tells weights of one name apart: a fingerprint of their files, here or in the cache of the model hub.

    A revision that is not named, or is a branch, moves with the hub while blocks on a disk stay: the files decide.
    Where they lie elsewhere, the commit does that the hub's cache has; where there is none, the name of the revision.

    Args:
        config_name: A file that each revision has.
    """
    if found := weights_fingerprint(model):
        return found
    snapshot = _snapshot(model, revision, config_name)
    if snapshot is None:
        return str(revision or "")
    if not any(path.suffix in _WEIGHT_FILES for path in snapshot.iterdir()):
        return snapshot.name
    return weights_fingerprint(str(snapshot))


def _snapshot(model: str, revision: str | None, config_name: str) -> Path | None:
    """Folder of a model in the cache of the model hub; it is named after the commit."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, config_name, revision=revision)
    except (ImportError, ValueError):  # not a name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def format_of(config: OffloadingConfig, facts: EngineFacts) -> SlotFormat:
    """How a slot is divided. The same in the scheduler and in every rank."""
    parallel, chunk = config.parallel, int(config.cache.blocks_per_chunk)
    rank_bytes = int(config.worker_kv_bytes_per_block)
    if config.canonical_layout:
        parts = 1 if facts.mla else min(parallel.tp_size, facts.kv_heads)
        return SlotFormat(CANONICAL, 1, rank_bytes * parts, chunk)
    if config.replicated_layout or (facts.mla and parallel.world_size == 1):
        return SlotFormat(SINGLE, 1, rank_bytes, chunk)
    if parallel.pp_size > 1:
        # Stages may hold different numbers of layers; all parts are as large as the largest.
        own = facts.stages[parallel.rank // (parallel.world_size // parallel.pp_size)]
        rank_bytes = -(-rank_bytes // own) * max(facts.stages)
    return SlotFormat(DIRECT, parallel.world_size, rank_bytes, chunk)


def namespace_of(config: OffloadingConfig, facts: EngineFacts, tenant: str = "") -> Namespace:
    """The namespace of an engine's blocks. The daemon is told the scheduler's, with the layers of the first rank."""
    slot = format_of(config, facts)
    parallel = config.parallel
    shape = (
        f"tp={parallel.tp_size},pp={parallel.pp_size},pcp={parallel.pcp_size},"
        f"dcp={parallel.dcp_size},world={parallel.world_size}"
    )
    if parallel.pp_size > 1:
        shape += f",stages={'+'.join(map(str, facts.stages))}"
    tokens = [group.tokens_per_block for group in config.groups]
    return Namespace(
        model=config.model.name,
        dtype=config.model.dtype,
        block_size=tokens[0] * config.cache.blocks_per_chunk,
        block_bytes=slot.slot_bytes,
        revision=facts.revision,
        tokens_per_hash=config.cache.tokens_per_hash,
        layers=tuple(tuple(group.layer_names) for group in config.groups),
        layout=f"{config.kv_cache_layout};{FORMAT_IDS[slot.kind]}",
        parallel=shape if slot.kind == DIRECT else "agnostic",
        hash_algo=facts.hash_algo,
        hash_seed=facts.hash_seed,
        tenant=tenant,
        extra=(*facts.extra, ("engine", "vllm"), ("tokens_per_kv_block", ",".join(map(str, tokens)))),
    )


def refuse_unsupported(config: OffloadingConfig, facts: EngineFacts) -> None:
    """Stops an engine whose KV this version cannot keep, at its start and with the alternative.

    Raises:
        ConfigError: says what does not work and what to change.
    """
    parallel = config.parallel
    reasons = []
    if facts.windowed and config.cache.blocks_per_chunk != 1:
        reasons.append(
            "the model has sliding windows or recurrent states, of which the engine drops single KV blocks, so that a "
            f"stored block cannot be {config.cache.blocks_per_chunk} of them: remove 'block_size' and "
            "'blocks_per_chunk' from kv_connector_extra_config"
        )
    if parallel.pp_size > 1 and len(config.groups) > 1 and len(set(facts.stages)) > 1:
        reasons.append(
            f"pipeline stages of different sizes ({'+'.join(map(str, facts.stages))} layers) do not work with "
            f"{len(config.groups)} KV cache groups: choose stages of equal size"
        )
    if parallel.pcp_size != 1 or parallel.dcp_size != 1:
        reasons.append(
            f"context parallelism (pcp={parallel.pcp_size}, dcp={parallel.dcp_size}) does not work: use tensor or "
            "pipeline parallelism"
        )
    if facts.hosts != 1:
        reasons.append(
            f"the ranks are spread over {facts.hosts} hosts, and a pool is one host's memory: run one engine on each "
            "host (data parallelism), with daemons that share a Redis tier"
        )
    if config.canonical_layout and not parallel.is_parallelism_agnostic:
        reasons.append(
            "'canonical_layout' needs tensor parallelism alone, of a degree that divides the KV heads or is a multiple "
            "of them, and attention in every layer: remove it from kv_connector_extra_config; blocks are then shared "
            "by engines of the same parallel shape"
        )
    if config.worker_kv_bytes_per_block <= 0:
        reasons.append("vLLM does not say how large a KV block is")
    if reasons:
        raise ConfigError("kvstore cannot serve this engine: " + "; ".join(reasons))


def _window_blocks(spec: KVCacheSpec) -> int | None:
    """How many KV blocks at the end of a prefix a group's layers need at most; None: they need the whole prefix."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

    parts = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    if all(isinstance(part, FullAttentionSpec) for part in parts):
        return None
    blocks = 1
    for part in parts:
        if not isinstance(part, MambaSpec):
            tokens = getattr(part, "sliding_window", None) or getattr(part, "attention_chunk_size", None) or 0
            tokens += getattr(part, "extra_retained_tokens", 0)
            blocks = max(blocks, -(-tokens // part.block_size))
    return blocks + 2  # one where a window begins inside of a block, one for a draft model's last, which is left out


def _other_settings(vllm_config: VllmConfig) -> tuple[tuple[str, str], ...]:
    """Settings that change the KV of given tokens and are in none of the named fields."""
    model = vllm_config.model_config
    found: dict[str, Any] = {
        "quantization": model.quantization,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "hf_overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else repr(model.hf_overrides),
        "kv_skip_layers": vllm_config.cache_config.kv_cache_dtype_skip_layers,
    }
    found |= _platform_settings()
    speculative = vllm_config.speculative_config
    if speculative is not None:
        found["speculative"] = [speculative.method, speculative.model]
    return tuple(
        (name, json.dumps(value, sort_keys=True, default=str))
        for name, value in sorted(found.items())
        if value not in (None, {}, [], "")
    )


def _platform_settings() -> dict[str, Any]:
    """What of the machine decides how KV lies in a page of one and the same layout."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Keys are packed for the instructions that attention uses: AMX where a core has it.
        instructions = "amx" if torch.cpu._is_amx_tile_supported() else "plain"
        return {"cpu": f"{current_platform.get_cpu_architecture().name.lower()}-{instructions}"}
    if current_platform.is_rocm():
        return {"rocm": "shuffled" if getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False) else "plain"}
    return {}
