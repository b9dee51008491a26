"""What of a daemon needs attention, read from its figures: for `kvstore stats --check` and for `/healthz`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Tier states that need no attention.
HEALTHY: Final = frozenset({"ok", "populating"})


def unhealthy(stats: Mapping[str, Any]) -> list[str]:
    """What needs attention, one phrase each; empty where all is well."""
    findings = [f"tier {tier['name']} is {tier['state']}" for tier in stats["tiers"] if tier["state"] not in HEALTHY]
    if stats["state"] != "ready":
        findings.append(f"the daemon is {stats['state']}")
    return findings
