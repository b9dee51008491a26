"""`KVStoreConnector` as one of several connectors inside vLLM's MultiConnector.

MultiConnector asks every connector, loads from the first one that has something, and saves to all. It gives each a
configuration of its own; what counts for the engine as a whole stands in MultiConnector's, which no connector is shown.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Where MultiConnector calls the connectors' classes, with its own configuration at hand.
_CALLERS: Final = (MultiConnector.__init__.__code__, MultiConnector.build_prom_metrics.__func__.__code__)


def enclosing_config() -> VllmConfig | None:
    """Configuration of the MultiConnector that is calling, directly or not; None where none is.

    Read from its frame: a connector gets a copy in which its own part stands in place of the whole, and vLLM passes the
    whole nowhere else.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLERS:
            config: VllmConfig | None = frame.f_locals.get("vllm_config")
            return config
        frame = frame.f_back  # type: ignore[assignment]
    return None


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
