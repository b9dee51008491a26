"""`KVStoreConnector` as one of several connectors inside vLLM's MultiConnector.

MultiConnector asks every connector, loads from the first one that has something, and saves to all. It gives each a
configuration of its own; what counts for the engine as a whole stands in MultiConnector's, which no connector is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from engine_plugin.vllm.callers import locals_of_caller
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def enclosing_config() -> VllmConfig | None:
    """Configuration of the MultiConnector that is calling; None where none is."""
    caller = locals_of_caller(MultiConnector.__init__, MultiConnector.build_prom_metrics)
    return caller["vllm_config"] if caller is not None else None


def neighbours(config: VllmConfig) -> tuple[str, ...]:
    """Names of all connectors inside a MultiConnector, in their order."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    connectors = transfer.kv_connector_extra_config.get("connectors") or ()
    return tuple(str(connector.get("kv_connector")) for connector in connectors)


def refuse_neighbours(config: VllmConfig) -> None:
    """Stops an engine whose connectors cannot live together, with the alternative.

    Raises:
        ConfigError: says which one, and what to use instead.
    """
    if "OffloadingConnector" in neighbours(config):
        raise ConfigError(
            "KVStoreConnector is vLLM's OffloadingConnector with its blocks in kvstore, and MultiConnector cannot hold "
            "both (they register the same metrics): take OffloadingConnector out, or keep vLLM's own CPU tier and put "
            "kvstore below it as a secondary tier (docs/vllm.md, KVStoreTier)"
        )
