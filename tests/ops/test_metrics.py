from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.endpoint import parse_endpoint
from kvstore.errors import ConfigError
from kvstore.metrics import FAMILIES, MetricsServer, exposition
from tests.ops.stats_sample import stats_sample


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(text: str, name: str, **labels: str) -> float:
    return samples_of(text)[name, frozenset(labels.items())]


def test_figures_keep_their_values() -> None:
    page = exposition(stats_sample())
    assert sample(page, "kvstore_uptime_seconds") == 12.5
    assert sample(page, "kvstore_hits_total", tier="cpu") == 128
    assert sample(page, "kvstore_misses_total", reason="absent") == 7
    assert sample(page, "kvstore_stores_total", outcome="exists") == 4
    assert sample(page, "kvstore_bytes_total", direction="read") == 128 * (8 << 20)
    assert sample(page, "kvstore_tier_state", tier="cpu", state="populating") == 1
    assert sample(page, "kvstore_tier_evictions_total", tier="cpu") == 3
    assert sample(page, "kvstore_tier_huge_bytes", tier="cpu", backing="thp") == 800_000_000
    assert sample(page, "kvstore_class_used_slots", tier="cpu", slot_bytes=str(8 << 20)) == 59
    assert sample(page, "kvstore_namespace_blocks", namespace="ab" * 16, model="demo", group="0") == 59
    assert sample(page, "kvstore_sessions", state="attached") == 1
    assert sample(page, "kvstore_sessions", state="lingering") == 0
    assert sample(page, "kvstore_draining") == 0
    assert sample(page, "kvstore_data_bytes_total", direction="sent") == 18 * (8 << 20)
    assert sample(page, "kvstore_data_events_total", event="garbage") == 1
    assert sample(page, "kvstore_data_connections") == 3
    assert sample(page, "kvstore_tier_moved_bytes_total", tier="disk", direction="read") == 3 * (8 << 20)
    assert sample(page, "kvstore_tier_seconds_total", tier="disk", direction="write") == 1.5
    assert sample(page, "kvstore_call_seconds_total", method="Acquire") == 0.004


def test_every_family_has_a_sample_in_a_busy_daemon() -> None:
    names = {name for name, _ in samples_of(exposition(stats_sample()))}
    assert {family.shown_name for family in FAMILIES} == names


#: What a disk tier says of its extents.
EXTENTS = {"extent_bytes": 1 << 20, "slabs": 1, "extents": 64, "used_extents": 3, "retired_extents": 0}


def test_a_tier_without_some_figures_is_shown_with_the_others() -> None:
    stats = stats_sample()
    stats["tiers"].append(
        {"name": "disk", "state": "ok", "capacity_bytes": 5, "used_bytes": 1, "blocks": 1, "classes": [EXTENTS]}
    )
    page = exposition(stats)
    assert sample(page, "kvstore_tier_capacity_bytes", tier="disk") == 5
    assert ("kvstore_tier_huge_bytes", frozenset({("tier", "disk"), ("backing", "thp")})) not in samples_of(page)


def test_names_from_clients_cannot_forge_samples() -> None:
    stats = stats_sample()
    stats["namespaces"][0]["identity"]["model"] = 'x"} 1\nkvstore_pins 999\n'
    assert sample(exposition(stats), "kvstore_pins") == 16


def test_every_help_text_is_a_sentence() -> None:
    for family in FAMILIES:
        assert family.help.endswith("."), family.name


def test_the_page_is_served_anew_for_each_scrape_and_the_port_is_free_afterwards() -> None:
    stats = stats_sample()
    server = MetricsServer(parse_endpoint("127.0.0.1:0"), lambda: stats)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        for pins in (1, 2):
            stats["pins"] = pins
            with urllib.request.urlopen(url, timeout=10) as reply:
                assert sample(reply.read().decode(), "kvstore_pins") == pins
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_health_is_that_of_every_tier_and_life_that_of_the_daemon() -> None:
    stats = stats_sample()
    broken: list[BaseException] = []

    def read() -> dict[str, Any]:
        if broken:
            raise broken[0]
        return stats

    server = MetricsServer(parse_endpoint("127.0.0.1:0"), read)

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    try:
        assert get("/healthz") == get("/livez") == (200, "ok\n")
        stats["tiers"].append({"name": "disk", "state": "failed"})
        assert get("/healthz") == (503, "tier disk is failed\n")
        assert get("/livez") == (200, "ok\n")
        broken.append(TimeoutError())
        assert get("/healthz") == get("/livez") == (503, "the daemon does not answer: TimeoutError\n")
        assert get("/metrics")[0] == 500
    finally:
        server.close()


def test_a_taken_port_is_refused_with_the_flag_named() -> None:
    server = MetricsServer(parse_endpoint("127.0.0.1:0"), stats_sample)
    try:
        with pytest.raises(ConfigError, match=f"--metrics-listen 127.0.0.1:{server.port}"):
            MetricsServer(parse_endpoint(f"127.0.0.1:{server.port}"), stats_sample)
    finally:
        server.close()
