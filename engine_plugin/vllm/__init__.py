"""kvstore for vLLM: `KVStoreConnector`, found through the entry point group `vllm.general_plugins`.

What runs where
    scheduler process   connector (role scheduler) -> manager -> lookups, stores -> link -> daemon
    worker process(es)  connector (role worker) -> worker -> copy engine, with its own mapping of the pool

Modules
    compat      which vLLM this works with; nothing else knows
    settings    the keys of `kv_connector_extra_config`
    naming      what an engine computes with, as a `kvstore.Namespace`
    messages    what travels between scheduler and worker
    link        the one thread that talks to the daemon on the scheduler's behalf
    calls       a call's problem as a word                    (no vLLM)
    rates       load or recompute, by what was measured       (no vLLM, no I/O)
    coming      queries whose blocks are on their way             (no vLLM, no I/O)
    pd          disaggregated prefill: what P says, what D takes  (no vLLM, no I/O)
    adapters    LoRA adapters by content                      (no vLLM)
    announced   what KV events tell                           (no vLLM, no I/O)
    stock       empty slots for the stores of the next steps      (no vLLM, no I/O)
    offers      store_threshold                               (no vLLM, no I/O)
    lookups     per request: asked, answered, pinned              (no vLLM, no I/O)
    stores      per store: slots, acknowledgements, commit        (no vLLM, no I/O)
    manager     vLLM's OffloadingManager on top of those
    worker      vLLM's OffloadingWorker: plans copies
    spec        vLLM's OffloadingSpec: builds manager and worker
    connector   vLLM's OffloadingConnector with failures, reports and start-up checks
    callers     what vLLM knows and passes on to nobody
    beside      other connectors next to ours, inside MultiConnector
    tier        kvstore below vLLM's own CPU tier
    autostart   starts a daemon where there is none
"""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"
SPEC = "KVStoreSpec"


def register() -> None:
    """Makes the connector and its spec known to vLLM by name. Called in every vLLM process, possibly more than once.

    Imports nothing heavy: most processes never use the connector. What does not fit is said when one is created.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "engine_plugin.vllm.connector", CONNECTOR)
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC, "engine_plugin.vllm.spec", SPEC)
