"""A stats tree such as the daemon's, for tests of what is made from one. test_admin compares it with a real one."""

from __future__ import annotations

import copy
from typing import Any

_BLOCK_BYTES = 8 << 20

_STATS: dict[str, Any] = {
    "version": "0.1.0",
    "generation": "00ff" * 8,
    "pid": 42,
    "uptime_s": 12.5,
    "state": "ready",
    "block_size": 64,
    "listen": ["unix:/run/kvstore/kvstore.sock", "0.0.0.0:7070"],
    "tiers": [
        {
            "name": "cpu",
            "state": "populating",
            "capacity_bytes": 1_000_000_000,
            "pool_bytes": 998_000_000,
            "used_bytes": 59 * _BLOCK_BYTES,
            "blocks": 59,
            "populated_bytes": 900_000_000,
            "overhead_bytes": 1_000_000,
            "committed_bytes": 901_000_000,
            "backing": {"kind": "thp", "page_bytes": 2 << 20, "huge_bytes": 800_000_000, "note": "no hugetlb pages"},
            "segments": 15,
            "free_bytes": 400_000_000,
            "waste_bytes": 0,
            "evictions": 3,
            "segment_moves": 1,
            "classes": [
                {"slot_bytes": _BLOCK_BYTES, "segments": 9, "slots": 72, "used_slots": 59, "reserved_slots": 2}
            ],
        }
    ],
    "namespaces": [
        {
            "digest": "ab" * 16,
            "identity": {"model": "demo", "dtype": "bfloat16", "block_size": 64, "layers": [list("abcde"), ["f"]]},
            "groups": [{"group": 0, "block_bytes": _BLOCK_BYTES, "blocks": 59, "bytes": 59 * _BLOCK_BYTES}],
        }
    ],
    "sessions": [
        {
            "id": "cd" * 16,
            "name": "vllm-0",
            "pid": 77,
            "group": "engine-0",
            "state": "attached",
            "mapped": True,
            "leases": 1,
            "pins": 16,
            "reserved_slots": 2,
            "age_s": 3.25,
            "share_bytes": 500_000_000,
            "share_used_bytes": 100_000_000,
        }
    ],
    "pins": 16,
    "leases": 1,
    "reserved_slots": 2,
    "waiters": 0,
    "hits": {"cpu": 128},
    "misses": {"absent": 7},
    "stores": {"stored": 62, "exists": 4},
    "refused": {"pinned": 1},
    "removed": {"evicted": 3, "flushed": 2},
    "transfers": {"disk_write_written": 62, "queued_bytes": 4096},
    "moved": {
        "disk": {
            "read": {"bytes": 3 * _BLOCK_BYTES, "batches": 2, "seconds": 0.25},
            "write": {"bytes": 62 * _BLOCK_BYTES, "batches": 9, "seconds": 1.5},
        }
    },
    "speeds": {"disk": 1_750_000_000},
    "bytes": {"stored": 62 * _BLOCK_BYTES, "read": 128 * _BLOCK_BYTES},
    "data_port": {
        "listen": "0.0.0.0:7071",
        "tls": False,
        "connections": 3,
        "congestion": {"cubic": 3},
        "events": {"read": 9, "select": 5, "write": 4, "garbage": 1},
        "sent_bytes": 18 * _BLOCK_BYTES,
        "received_bytes": 8 * _BLOCK_BYTES,
    },
    "calls": {"Acquire": 20},
    "call_seconds": {"Acquire": 0.004},
    "errors": {"INVALID_ARGUMENT": 1},
}


def stats_sample() -> dict[str, Any]:
    """A fresh copy."""
    return copy.deepcopy(_STATS)
