"""The router's figures, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.router.instances import Instance

#: From a short prompt on a fast GPU to a long one on a slow machine.
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class _InstancesCollector(Collector):
    """Reads the instances when asked."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._instances = tuple(instances)

    def collect(self) -> Iterator[Metric]:
        labels = ("role", "url")
        up = GaugeMetricFamily("kvstore_router_instance_up", "1 while the instance gets requests.", labels=labels)
        load = GaugeMetricFamily(
            "kvstore_router_instance_load",
            "What it has been given and has not answered: prompt bytes for prefill, requests for decode.",
            labels=labels,
        )
        paused = GaugeMetricFamily(
            "kvstore_router_instance_paused",
            "1 while the instance is left out, because it fails its requests though it says that it is well.",
            labels=labels,
        )
        pauses = CounterMetricFamily("kvstore_router_instance_pauses", "How often it was left out.", labels=labels)
        for instance in self._instances:
            paused.add_metric((instance.role, instance.url), float(instance.breaker.paused))
            pauses.add_metric((instance.role, instance.url), instance.breaker.pauses)
            up.add_metric((instance.role, instance.url), float(instance.up))
            load.add_metric((instance.role, instance.url), instance.load)
        yield up
        yield load
        yield paused
        yield pauses


class RouterMetrics:
    """One set of figures.

    Attributes:
        requests: By path and the status that the client got; "gone" where it did not wait for one.
        prefills: First steps by outcome. ok. skipped: the request gains nothing by it. refused: answered with a 4xx.
            failed: no instance could do it. timeout. none_up. But for ok and skipped, decode computed the prompt.
        retries: Attempts after a first one that failed, by role.
        broken: Answers that ended before their end because the decode instance did.
        running: Requests now.
        prefill_seconds: Time of first steps that went well.
        first_byte_seconds: Time from the request to the first byte of its answer, over both steps.
    """

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvstore_router_requests",
            "Requests, by path and the status that the client got; gone: it did not wait for one.",
            ("path", "status"),
            registry=registry,
        )
        self.prefills = Counter(
            "kvstore_router_prefills",
            "First steps by outcome; after all but ok and skipped the decode instance computed the prompt.",
            ("outcome",),
            registry=registry,
        )
        self.retries = Counter(
            "kvstore_router_retries",
            "Attempts on another instance after one failed, by role.",
            ("role",),
            registry=registry,
        )
        self.broken = Counter(
            "kvstore_router_broken_answers",
            "Answers cut short because the decode instance failed in the middle.",
            registry=registry,
        )
        self.running = Gauge("kvstore_router_running", "Requests now.", registry=registry)
        self.prefill_seconds = Histogram(
            "kvstore_router_prefill_seconds",
            "Time of first steps that went well.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.first_byte_seconds = Histogram(
            "kvstore_router_first_byte_seconds",
            "Time from a request to the first byte of its answer, over both steps.",
            registry=registry,
            buckets=_SECONDS,
        )
        registry.register(_InstancesCollector(instances))

    def page(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._registry)
