from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_plugin.vllm.naming import (
    EngineFacts,
    format_of,
    hash_seed,
    namespace_of,
    refuse_unsupported,
    weights_fingerprint,
)
from kvstore.errors import ConfigError


def config(rank: int = 0) -> Any:
    """Stands for vLLM's OffloadingConfig, which is plain data."""
    return SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=64, layer_names=("layer.0", "layer.1"), group_id=0),),
        worker_kv_bytes_per_block=4096,
        extra_config={},
        engine_id="engine",
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=64, blocks_per_chunk=2),
        parallel=SimpleNamespace(
            rank=rank, world_size=2, tp_size=2, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
        ),
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout="LBHNC",
    )


FACTS = EngineFacts(revision="main")


def test_sizes_are_those_of_all_ranks_side_by_side() -> None:
    namespace = namespace_of(config(), FACTS)
    assert namespace.block_size == 128
    assert format_of(config(), FACTS).part_bytes == 8192
    assert namespace.block_bytes == 16384


def test_scheduler_and_every_worker_name_the_same() -> None:
    assert len({namespace_of(config(rank), FACTS).digest() for rank in range(2)}) == 1


def _with(*changes: Any, **more: Any) -> Any:
    """A configuration with some values changed: `_with(path, value, path, value, ...)`."""
    changed = config(**more)
    for path, value in zip(changes[::2], changes[1::2], strict=True):
        *parents, last = path.split(".")
        target = changed
        for name in parents:
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        setattr(target, last, value)
    return changed


def _tensor_parallel(degree: int, rank: int = 0, **values: Any) -> Any:
    """The same model at another degree: each rank holds its part of 8192 bytes of a block."""
    changes: list[Any] = ["parallel.tp_size", degree, "parallel.world_size", degree]
    changes += ["worker_kv_bytes_per_block", values.pop("bytes", 8192 // degree)]
    for name, value in values.items():
        changes += [name, value]
    return _with(*changes, rank=rank)


def test_canonical_blocks_are_shared_by_all_degrees() -> None:
    facts = EngineFacts(revision="main", kv_heads=4)
    engines = [_tensor_parallel(degree, canonical_layout=True) for degree in (1, 2, 4)]
    # Beyond the number of heads ranks hold the same ones.
    engines.append(_tensor_parallel(8, canonical_layout=True, bytes=2048))
    namespaces = [namespace_of(engine, facts) for engine in engines]
    assert {namespace.digest() for namespace in namespaces} == {namespaces[0].digest()}
    assert {namespace.block_bytes for namespace in namespaces} == {16384}
    assert namespaces[0].parallel == "agnostic"
    assert namespaces[0].digest() != namespace_of(_tensor_parallel(1), facts).digest()


def test_what_every_rank_holds_is_stored_once() -> None:
    facts = EngineFacts(revision="main", mla=True)
    many = _tensor_parallel(4, bytes=8192, replicated_layout=True)
    alone = _tensor_parallel(1)
    assert namespace_of(many, facts).block_bytes == namespace_of(alone, facts).block_bytes == 16384
    assert namespace_of(many, facts).digest() == namespace_of(alone, facts).digest()
    assert format_of(many, facts).part_of(3) == 0


def test_replicas_of_data_parallelism_share_a_namespace() -> None:
    replicas = []
    for index in range(2):
        replica = config()
        replica.engine_id = f"engine_dp{index}"
        replica.parallel.data_parallel_index, replica.parallel.data_parallel_size = index, 2
        replicas.append(namespace_of(replica, FACTS).digest())
    assert replicas[0] == replicas[1]


def test_stages_of_different_sizes_have_parts_of_one_size() -> None:
    """Seven layers on two stages: four of 1,000 bytes on the first, three on the second."""
    facts = EngineFacts(stages=(4, 3))
    stages = [
        _with("parallel.pp_size", 2, "parallel.tp_size", 1, "worker_kv_bytes_per_block", size, rank=rank)
        for rank, size in enumerate((4000, 3000))
    ]
    first, second = (format_of(stage, facts) for stage in stages)
    assert first == second
    assert (first.part_of(1), first.slot_bytes) == (8000, 16000)
    assert namespace_of(stages[0], facts).parallel.endswith("stages=4+3")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.name", "other"),
        ("model.dtype", "fp8"),
        ("cache.tokens_per_hash", 32),
        ("cache.blocks_per_chunk", 1),
        ("groups.0.tokens_per_block", 32),
        ("groups.0.layer_names", ("layer.0", "layer.2")),
        ("kv_cache_layout", "LBNHC"),
        ("parallel.tp_size", 4),
        ("parallel.pp_size", 2),
        ("parallel.pcp_size", 2),
        ("parallel.dcp_size", 2),
        ("parallel.world_size", 4),
    ],
)
def test_what_changes_the_bytes_changes_the_namespace(path: str, value: Any) -> None:
    assert namespace_of(_with(path, value), FACTS).digest() != namespace_of(config(), FACTS).digest()


def test_tokens_per_block_is_told_apart_where_chunks_are_equal() -> None:
    one, other = _with("cache.blocks_per_chunk", 1), config()
    one.groups[0].tokens_per_block = 128
    assert namespace_of(one, FACTS).block_size == namespace_of(other, FACTS).block_size
    assert namespace_of(one, FACTS).digest() != namespace_of(other, FACTS).digest()


@pytest.mark.parametrize(
    "facts",
    [
        EngineFacts(revision="other"),
        EngineFacts(revision="main", hash_algo="sha256_cbor"),
        EngineFacts(revision="main", hash_seed="7"),
        EngineFacts(revision="main", extra=(("quantization", '"awq"'),)),
    ],
)
def test_what_changes_keys_or_weights_changes_the_namespace(facts: EngineFacts) -> None:
    assert namespace_of(config(), facts).digest() != namespace_of(config(), FACTS).digest()


def test_tenants_are_apart() -> None:
    assert namespace_of(config(), FACTS, "a").digest() != namespace_of(config(), FACTS, "b").digest()


def test_seed_of_the_hash_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hash_seed("sha256", "a") == hash_seed("sha256", "b")
    assert hash_seed("xxhash", "a") != hash_seed("xxhash", "b")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert hash_seed("xxhash", "a") == hash_seed("sha256", "b") == "5"


def test_weights_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    assert weights_fingerprint("org/model") == ""
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(bytes(1_000_000))
    first = weights_fingerprint(str(tmp_path))
    assert first == weights_fingerprint(str(tmp_path))
    weights.write_bytes(bytes(500_000) + b"\1" * 5000 + bytes(495_000))
    trained = weights_fingerprint(str(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert len({first, trained, weights_fingerprint(str(tmp_path))}) == 3
    file = tmp_path / "model.gguf"  # a model that is one file
    file.write_bytes(b"1")
    first = weights_fingerprint(str(file))
    file.write_bytes(b"2")
    assert "" != first != weights_fingerprint(str(file))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("parallel.dcp_size", 2, "use tensor or pipeline parallelism"),
        ("worker_kv_bytes_per_block", 0, "how large"),
    ],
)
def test_what_does_not_work_is_refused_with_the_alternative(path: str, value: Any, says: str) -> None:
    refuse_unsupported(config(), FACTS)
    with pytest.raises(ConfigError, match=says):
        refuse_unsupported(_with(path, value), FACTS)


def test_blocks_of_windows_are_stored_one_by_one() -> None:
    facts = EngineFacts(windowed={0: 3})
    refuse_unsupported(_with("cache.blocks_per_chunk", 1), facts)
    with pytest.raises(ConfigError, match="remove 'block_size'"):
        refuse_unsupported(config(), facts)


def test_stages_of_different_sizes_with_several_groups_are_refused() -> None:
    stages = _with("parallel.pp_size", 2, "parallel.tp_size", 1)
    refuse_unsupported(stages, EngineFacts(stages=(4, 3)))
    stages.groups *= 2
    refuse_unsupported(stages, EngineFacts(stages=(4, 4)))
    with pytest.raises(ConfigError, match="stages of equal size"):
        refuse_unsupported(stages, EngineFacts(stages=(4, 3)))


def test_canonical_blocks_that_would_not_be_portable_are_refused() -> None:
    refuse_unsupported(_with("canonical_layout", True), FACTS)
    with pytest.raises(ConfigError, match="remove it"):
        refuse_unsupported(_with("canonical_layout", True, "parallel.is_parallelism_agnostic", False), FACTS)


def test_ranks_on_several_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="one engine on each host"):
        refuse_unsupported(config(), EngineFacts(hosts=2))
