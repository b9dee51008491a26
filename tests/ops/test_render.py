from __future__ import annotations

import io

import pytest

from kvstore import render
from kvstore.admin import ListedBlock
from kvstore.health import unhealthy
from tests.ops.stats_sample import stats_sample


def printed(view: object) -> str:
    stream = io.StringIO()
    render.console_for(stream).print(view)
    return stream.getvalue()


def test_the_page_shows_every_part() -> None:
    page = printed(render.stats_view(stats_sample()))
    for part in (
        "kvstore 0.1.0, pid 42, ready",
        "unix:/run/kvstore/kvstore.sock",
        "populating",
        "thp (800.0 MB huge): no hugetlb pages",
        "1.0 GB",
        "ab" * 16,
        "model=demo dtype=bfloat16 block_size=64 layers=[[a ... e (5)], [f]]",
        "vllm-0",
        "16 pins in 1 leases, 2 reserved slots, 0 waiting calls",
        "cpu 128",
        "absent 7",
        "stored 62, exists 4",
        "pinned 1",
        "INVALID_ARGUMENT 1",
        "read 25.2 MB in 2 batches of 125.0 ms, write 520.1 MB in 9 batches of 166.7 ms",
    ):
        assert part in page
    assert "rates" not in page
    assert "\x1b" not in page, "a pipe gets no colours"
    assert page.isascii()


def test_no_cell_is_cut_in_a_pipe() -> None:
    stats = stats_sample()
    stats["sessions"][0]["name"] = "n" * 60
    assert "n" * 60 in printed(render.stats_view(stats))


def test_rates_between_two_readings() -> None:
    before, now = stats_sample(), stats_sample()
    now["uptime_s"] += 2
    now["bytes"]["read"] += 4_000_000
    now["hits"]["cpu"] += 10
    page = printed(render.stats_view(now, before))
    assert "read 2.0 MB/s" in page and "hits 5/s" in page and "misses 0/s" in page


def test_no_rates_across_a_restart_or_without_time_between() -> None:
    before, now = stats_sample(), stats_sample()
    assert "rates" not in printed(render.stats_view(now, before))
    now["uptime_s"] += 2
    now["generation"] = "11" * 16
    assert "rates" not in printed(render.stats_view(now, before))


def test_names_from_clients_cannot_move_the_cursor_or_set_colours() -> None:
    stats = stats_sample()
    stats["sessions"][0]["name"] = "a\x1b[2Jb\r[red]c"
    stats["namespaces"][0]["identity"]["model"] = "m\x07[/]"
    page = printed(render.stats_view(stats))
    assert "a\\x1b[2Jb\\r[red]c" in page and "m\\x07[/]" in page
    assert not {"\x1b", "\x07", "\r"} & set(page)


def test_an_empty_daemon() -> None:
    stats = stats_sample()
    stats["namespaces"], stats["sessions"], stats["tiers"][0]["classes"] = [], [], []
    for key in ("hits", "misses", "stores", "refused", "removed", "transfers", "calls", "errors"):
        stats[key] = {}
    page = printed(render.stats_view(stats))
    assert "none" in page and "namespaces" not in page


@pytest.mark.parametrize(
    ("tier", "daemon", "findings"),
    [
        ("ok", "ready", []),
        ("populating", "ready", []),
        ("degraded", "ready", ["tier cpu is degraded"]),
        ("ok", "draining", ["the daemon is draining"]),
    ],
)
def test_what_needs_attention(tier: str, daemon: str, findings: list[str]) -> None:
    stats = stats_sample()
    stats["tiers"][0]["state"], stats["state"] = tier, daemon
    assert unhealthy(stats) == findings


def test_blocks() -> None:
    page = printed(render.blocks_view([ListedBlock(b"\xab" * 16, 1, b"\xcd" * 32, 2_000_000, 3, ("cpu", "disk"))], 9))
    assert "ab" * 16 in page and "cd" * 32 in page and "2.0 MB" in page and "cpu disk" in page
    assert "1 of 9 blocks" in page
