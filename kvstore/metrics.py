"""Prometheus text from the stats tree. One table says what there is; docs/stats.md prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import start_http_server

from kvstore.endpoint import Endpoint
from kvstore.errors import ConfigError
from kvstore.health import unhealthy

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

Stats = Mapping[str, Any]
Sample = tuple[tuple[str, ...], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: With the unit; a counter's name on the page ends in ``_total`` besides.
        kind: gauge or counter. Counters start at zero with the daemon.
        help: What it counts and what to do with it.
        labels: Names of its labels.
        samples: Reads label values and a figure from the stats tree.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Stats], Iterable[Sample]]

    @property
    def shown_name(self) -> str:
        """The name on the page."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _figure(key: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        if key in stats:
            yield (), float(stats[key])

    return samples


def _counts(key: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        for name, value in stats.get(key, {}).items():
            yield (str(name),), float(value)

    return samples


def _of_tiers(key: str) -> Callable[[Stats], Iterator[Sample]]:
    """A tier has the figures that mean something to it; a disk has no pages."""

    def samples(stats: Stats) -> Iterator[Sample]:
        for tier in stats["tiers"]:
            if key in tier:
                yield (tier["name"],), float(tier[key])

    return samples


def _of_classes(key: str) -> Callable[[Stats], Iterator[Sample]]:
    """The classes of the pool; those of a disk are of extents."""

    def samples(stats: Stats) -> Iterator[Sample]:
        for tier in stats["tiers"]:
            for size_class in tier.get("classes", ()):
                if key not in size_class:
                    continue
                yield (tier["name"], str(size_class["slot_bytes"])), float(size_class[key])

    return samples


def _of_groups(key: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        for namespace in stats["namespaces"]:
            model = str(namespace.get("identity", {}).get("model", ""))
            for group in namespace["groups"]:
                yield (namespace["digest"], model, str(group["group"])), float(group[key])

    return samples


def _transfers(stats: Stats) -> Iterator[Sample]:
    for event, value in stats.get("transfers", {}).items():
        if event != "queued_bytes":
            yield (event,), float(value)


def _transfers_queued(stats: Stats) -> Iterator[Sample]:
    if "transfers" in stats:
        yield (), float(stats["transfers"]["queued_bytes"])


def _moved(key: str) -> Callable[[Stats], Iterator[Sample]]:
    def samples(stats: Stats) -> Iterator[Sample]:
        for tier, directions in stats.get("moved", {}).items():
            for direction, figures in directions.items():
                yield (tier, direction), float(figures[key])

    return samples


def _speeds(stats: Stats) -> Iterator[Sample]:
    for tier, speed in stats.get("speeds", {}).items():
        yield (tier,), float(speed)


def _data_bytes(stats: Stats) -> Iterator[Sample]:
    if port := stats.get("data_port"):
        yield ("sent",), float(port["sent_bytes"])
        yield ("received",), float(port["received_bytes"])


def _data_events(stats: Stats) -> Iterator[Sample]:
    for event, value in stats.get("data_port", {}).get("events", {}).items():
        yield (event,), float(value)


def _data_connections(stats: Stats) -> Iterator[Sample]:
    if port := stats.get("data_port"):
        yield (), float(port["connections"])


def _info(stats: Stats) -> Iterator[Sample]:
    yield (stats["version"], stats["generation"]), 1.0


def _draining(stats: Stats) -> Iterator[Sample]:
    yield (), float(stats["state"] == "draining")


def _tier_states(stats: Stats) -> Iterator[Sample]:
    for tier in stats["tiers"]:
        yield (tier["name"], tier["state"]), 1.0


def _huge_bytes(stats: Stats) -> Iterator[Sample]:
    for tier in stats["tiers"]:
        if "backing" in tier:
            yield (tier["name"], tier["backing"]["kind"]), float(tier["backing"]["huge_bytes"])


def _sessions(stats: Stats) -> Iterator[Sample]:
    states = {"attached": 0, "lingering": 0}
    for session in stats["sessions"]:
        states[session["state"]] = states.get(session["state"], 0) + 1
    for state, count in states.items():
        yield (state,), float(count)


_TIER: Final = ("tier",)
_CLASS: Final = ("tier", "slot_bytes")
_MOVED: Final = ("tier", "direction")
_GROUP: Final = ("namespace", "model", "group")

#: Every metric, in the order of the page.
FAMILIES: Final[tuple[Family, ...]] = (
    Family("kvstore_info", "gauge", "Always 1; a new generation is a restart.", ("version", "generation"), _info),
    Family("kvstore_uptime_seconds", "gauge", "Seconds since the daemon started.", (), _figure("uptime_s")),
    Family("kvstore_draining", "gauge", "1 while the daemon is stopping and takes no new work.", (), _draining),
    Family(
        "kvstore_tier_state",
        "gauge",
        "1 for the state a tier is in. Alert on any state but ok and populating.",
        ("tier", "state"),
        _tier_states,
    ),
    Family("kvstore_tier_capacity_bytes", "gauge", "The tier's budget.", _TIER, _of_tiers("capacity_bytes")),
    Family(
        "kvstore_tier_pool_bytes",
        "gauge",
        "What the budget leaves for segments; the rest is bookkeeping.",
        _TIER,
        _of_tiers("pool_bytes"),
    ),
    Family("kvstore_tier_used_bytes", "gauge", "Bytes of the blocks at rest.", _TIER, _of_tiers("used_bytes")),
    Family("kvstore_tier_free_bytes", "gauge", "Bytes free without evicting.", _TIER, _of_tiers("free_bytes")),
    Family(
        "kvstore_tier_waste_bytes",
        "gauge",
        "Bytes lost because a slot is larger than its block.",
        _TIER,
        _of_tiers("waste_bytes"),
    ),
    Family(
        "kvstore_tier_overhead_bytes",
        "gauge",
        "Part of the budget that bookkeeping takes.",
        _TIER,
        _of_tiers("overhead_bytes"),
    ),
    Family(
        "kvstore_tier_committed_bytes",
        "gauge",
        "Memory that the kernel has given so far. Never above the capacity.",
        _TIER,
        _of_tiers("committed_bytes"),
    ),
    Family(
        "kvstore_tier_populated_bytes",
        "gauge",
        "Bytes whose pages are in place; slots are handed out only from them. Reaches the capacity soon after a start.",
        _TIER,
        _of_tiers("populated_bytes"),
    ),
    Family(
        "kvstore_tier_huge_bytes",
        "gauge",
        "Bytes that were found on huge pages. Far below the populated bytes: populating and disk I/O are slower.",
        ("tier", "backing"),
        _huge_bytes,
    ),
    Family("kvstore_tier_blocks", "gauge", "Blocks at rest.", _TIER, _of_tiers("blocks")),
    Family("kvstore_tier_segments", "gauge", "Segments the pool is cut into.", _TIER, _of_tiers("segments")),
    Family(
        "kvstore_tier_evictions",
        "counter",
        "Blocks evicted to make room. Rising together with misses for the reason absent: the pool is too small.",
        _TIER,
        _of_tiers("evictions"),
    ),
    Family(
        "kvstore_tier_segment_moves",
        "counter",
        "Segments that went from one slot size to another. Rising without pause: the mix of block sizes changes.",
        _TIER,
        _of_tiers("segment_moves"),
    ),
    Family("kvstore_class_slots", "gauge", "Slots of one size.", _CLASS, _of_classes("slots")),
    Family(
        "kvstore_class_used_slots", "gauge", "Slots of one size with a block in.", _CLASS, _of_classes("used_slots")
    ),
    Family(
        "kvstore_class_reserved_slots",
        "gauge",
        "Empty slots of one size that sessions hold.",
        _CLASS,
        _of_classes("reserved_slots"),
    ),
    Family("kvstore_class_segments", "gauge", "Segments cut into one size.", _CLASS, _of_classes("segments")),
    Family(
        "kvstore_namespace_blocks", "gauge", "Blocks of a namespace and KV-cache group.", _GROUP, _of_groups("blocks")
    ),
    Family("kvstore_namespace_bytes", "gauge", "Bytes of a namespace and KV-cache group.", _GROUP, _of_groups("bytes")),
    Family(
        "kvstore_sessions",
        "gauge",
        "Engine processes. lingering: ended, but what it held is kept until its group has ended.",
        ("state",),
        _sessions,
    ),
    Family("kvstore_pins", "gauge", "Pins on blocks; zero when no engine reads.", (), _figure("pins")),
    Family("kvstore_leases", "gauge", "Leases held.", (), _figure("leases")),
    Family("kvstore_reserved_slots", "gauge", "Empty slots held for stores to come.", (), _figure("reserved_slots")),
    Family("kvstore_waiters", "gauge", "Calls that wait for blocks to appear.", (), _figure("waiters")),
    Family(
        "kvstore_hits",
        "counter",
        "Blocks handed out, by the tier that had them; extents: read on disk by the engine.",
        ("tier",),
        _counts("hits"),
    ),
    Family("kvstore_misses", "counter", "Blocks asked for and not handed out.", ("reason",), _counts("misses")),
    Family(
        "kvstore_stores",
        "counter",
        "Blocks committed. exists: another engine had stored the same one.",
        ("outcome",),
        _counts("stores"),
    ),
    Family(
        "kvstore_refused",
        "counter",
        "Slots asked for and not given; the engine skipped those stores.",
        ("reason",),
        _counts("refused"),
    ),
    Family(
        "kvstore_removed",
        "counter",
        "Blocks that left the pool. Those that were evicted may rest in a tier below; all others are gone.",
        ("reason",),
        _counts("removed"),
    ),
    Family(
        "kvstore_transfers",
        "counter",
        "Blocks copied between tiers, or not, by what happened. left_without_copy: a lower tier is too slow for "
        "what is stored.",
        ("event",),
        _transfers,
    ),
    Family(
        "kvstore_transfers_queued_bytes",
        "gauge",
        "Bytes that wait to be copied to a lower tier.",
        (),
        _transfers_queued,
    ),
    Family(
        "kvstore_tier_moved_bytes",
        "counter",
        "Bytes of blocks that were read from a tier below the pool and written to it.",
        _MOVED,
        _moved("bytes"),
    ),
    Family("kvstore_tier_batches", "counter", "Batches of such blocks.", _MOVED, _moved("batches")),
    Family(
        "kvstore_tier_seconds",
        "counter",
        "Time that they took, one after the other: divided by their number, the mean latency of a batch.",
        _MOVED,
        _moved("seconds"),
    ),
    Family(
        "kvstore_tier_read_bytes_per_second",
        "gauge",
        "How fast blocks come up from a tier, as measured last; missing where it was not. Engines decide by it.",
        ("tier",),
        _speeds,
    ),
    Family("kvstore_bytes", "counter", "Bytes stored and read.", ("direction",), _counts("bytes")),
    Family(
        "kvstore_data_bytes",
        "counter",
        "Bytes of blocks to and from other hosts over the data port.",
        ("direction",),
        _data_bytes,
    ),
    Family(
        "kvstore_data_events",
        "counter",
        "Transfers over the data port, and what went wrong there. garbage rises: something that is no client calls.",
        ("event",),
        _data_events,
    ),
    Family("kvstore_data_connections", "gauge", "Open connections of the data port.", (), _data_connections),
    Family("kvstore_calls", "counter", "Calls, over gRPC or framed.", ("method",), _counts("calls")),
    Family(
        "kvstore_call_seconds",
        "counter",
        "Time from a call to its answer in the daemon: divided by the calls, the mean latency. Select, Watch and "
        "Reserve wait for as long as they were told.",
        ("method",),
        _counts("call_seconds"),
    ),
    Family("kvstore_errors", "counter", "Calls that failed.", ("status",), _counts("errors")),
)


class _StatsCollector:
    """Reads the stats tree anew for every scrape."""

    def __init__(self, read_stats: Callable[[], Stats]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for family in FAMILIES:
            metric: CounterMetricFamily | GaugeMetricFamily
            if family.kind == "counter":
                metric = CounterMetricFamily(family.name, family.help, labels=family.labels)
            else:
                metric = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in family.samples(stats):
                metric.add_metric(labels, value)
            yield metric

    def describe(self) -> list[Metric]:
        """Nothing in advance: registering must not read stats of a daemon that is still starting."""
        return []


def _registry(read_stats: Callable[[], Stats]) -> CollectorRegistry:
    # A registry of its own: the process's default one would add Python's own metrics, and refuse a second daemon in
    # one process (tests have several).
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(read_stats))
    return registry


def exposition(stats: Stats) -> str:
    """One page of Prometheus text."""
    return generate_latest(_registry(lambda: stats)).decode()


class MetricsServer:
    """An HTTP listener on threads of its own. ``/healthz`` says whether anything needs attention (200, or 503 and
    what), ``/livez`` whether the daemon answers at all; every other path is the page with the metrics.

    Args:
        endpoint: HOST:PORT.
        read_stats: Called on a thread of this server for every request; what it raises becomes HTTP 500, for the two
            above 503.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, endpoint: Endpoint, read_stats: Callable[[], Stats]) -> None:
        self._read_stats = read_stats
        registry = _registry(read_stats)
        self._page: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        try:
            self._server, self._thread = start_http_server(endpoint.port, endpoint.host, registry)
        except OSError as error:
            raise ConfigError(f"--metrics-listen {endpoint}: {error.strerror}") from error
        self._server.set_app(self._answer)
        #: The port that was taken, where 0 was asked for.
        self.port: int = self._server.server_port

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path not in ("/healthz", "/livez"):
            return self._page(environ, start_response)
        try:
            stats = self._read_stats()
            findings = unhealthy(stats) if path == "/healthz" else []
        except Exception as error:  # no answer in time, most likely
            findings = [f"the daemon does not answer: {type(error).__name__}"]
        start_response("503 Service Unavailable" if findings else "200 OK", [("Content-Type", "text/plain")])
        return [("; ".join(findings) or "ok").encode() + b"\n"]

    def close(self) -> None:
        """Stops listening and waits until the listener has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
