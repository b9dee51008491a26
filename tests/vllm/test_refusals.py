"""Start-up checks that look into vLLM's callers, and into the machine. No engine is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_plugin.vllm.callers import locals_of_caller
from kvstore.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def of_multi_connector(*names: str) -> Any:
    connectors = [{"kv_connector": name} for name in names]
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"connectors": connectors}))


def test_locals_of_a_caller() -> None:
    def inner() -> Any:
        return locals_of_caller(outer)

    def outer(value: int) -> Any:
        return inner()

    assert outer(7)["value"] == 7
    assert inner() is None


def test_vllms_own_connector_beside_ours_is_refused_with_the_alternative() -> None:
    from engine_plugin.vllm.beside import enclosing_config, neighbours, refuse_neighbours

    config = of_multi_connector("NixlConnector", "KVStoreConnector")
    assert neighbours(config) == ("NixlConnector", "KVStoreConnector")
    refuse_neighbours(config)
    with pytest.raises(ConfigError, match="KVStoreTier"):
        refuse_neighbours(of_multi_connector("KVStoreConnector", "OffloadingConnector"))
    assert enclosing_config() is None


def test_blocks_of_different_sizes_are_refused_with_the_alternative() -> None:
    from engine_plugin.vllm.connector import _refuse_unequal_blocks

    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in (16, 32)]
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    _refuse_unequal_blocks(config, {"blocks_per_chunk": 1})
    with pytest.raises(ConfigError, match=r"16 and 32 tokens.*blocks_per_chunk"):
        _refuse_unequal_blocks(config, {"block_size": 64})


def test_weights_in_the_hubs_cache_are_told_apart_whatever_the_revision_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves on the hub, and a later download brings other weights under the same name."""
    from huggingface_hub import constants

    from engine_plugin.vllm.naming import revision_of

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert revision_of("org/model", None) == "" and revision_of("org/model", "v1") == "v1"
    assert revision_of("/no/such folder", None) == ""
    repo = tmp_path / "models--org--model"

    def download(commit: str, weights: bytes | None) -> None:
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text("{}")
        if weights is not None:
            (snapshot / "model.safetensors").write_bytes(weights)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(commit)

    download("a" * 40, None)
    assert revision_of("org/model", None) == revision_of("org/model", "main") == "a" * 40
    download("a" * 40, bytes(100_000))
    first = revision_of("org/model", None)
    download("b" * 40, bytes(100_000))
    assert revision_of("org/model", "main") == first, "a commit that leaves the weights alone changes no KV"
    download("c" * 40, bytes(99_999) + b"\1")
    assert revision_of("org/model", None) not in (first, "c" * 40)
    assert revision_of("org/model", "a" * 40) == first


def test_keys_packed_for_other_instructions_are_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU attention packs keys for AMX where a core has it; hosts without share a Redis or a peer with it."""
    import torch

    from engine_plugin.vllm.naming import _platform_settings

    here = _platform_settings()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" not in here["cpu"])
    assert _platform_settings() != here
