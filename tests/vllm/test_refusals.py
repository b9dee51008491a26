"""Start-up checks that look into vLLM's callers. No engine is needed."""

from __future__ import annotations

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
