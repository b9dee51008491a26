"""The figures of `kvstore stats`, as one tree. docs/stats.md says what each one means."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvstore.arena import Arena
from kvstore.hierarchy import Hierarchy

Stats = dict[str, Any]


def hierarchy_stats(hierarchy: Hierarchy) -> Stats:
    """What the hierarchy knows. On its thread; cheap but for `namespaces`, which grows with their number."""
    hierarchy.namespaces.adopt()
    sessions = [
        {
            "id": session.id.hex()[:12],
            "name": session.name,
            "pid": session.pid,
            "group": session.group.name,
            "state": "lingering" if session.ended else "attached",
            "mapped": session.mapped,
            "leases": len(session.leases),
            "pins": sum(len(lease.blocks) for lease in session.leases.values()) + len(session.kept),
            "reserved_slots": len(session.reserved),
            "age_s": round(hierarchy.sessions.age_s(session), 3),
            "share_bytes": session.group.share_bytes,
            "share_used_bytes": session.group.used_bytes,
        }
        for session in hierarchy.sessions
    ]
    counts = hierarchy.counts
    return {
        "tiers": [_cpu_tier(hierarchy), *(dict(tier.stats()) for tier in hierarchy.transfers.tiers)],
        "transfers": {**hierarchy.transfers.counts, "queued_bytes": hierarchy.transfers.queued_bytes},
        "moved": {
            name: {direction: dataclasses.asdict(figures) for direction, figures in directions.items()}
            for name, directions in hierarchy.transfers.moved.items()
        },
        "speeds": {
            tier.name: round(1 / s_per_byte)
            for tier in hierarchy.transfers.tiers
            if (s_per_byte := hierarchy.transfers.gauge.s_per_byte(tier.name))
        },
        "namespaces": [
            {
                "digest": entry.digest.hex(),
                "identity": entry.fields,
                "groups": [
                    {
                        "group": keyspace.kv_group,
                        "block_bytes": keyspace.block_bytes,
                        "blocks": len(keyspace.blocks),
                        "bytes": len(keyspace.blocks) * keyspace.block_bytes,
                    }
                    for keyspace in entry.keyspaces
                ],
            }
            for entry in hierarchy.namespaces.entries.values()
        ],
        "sessions": sessions,
        "leases": sum(session["leases"] for session in sessions),
        "pins": sum(session["pins"] for session in sessions),
        "reserved_slots": sum(session["reserved_slots"] for session in sessions),
        "waiters": hierarchy.waiting,
        "hits": {"cpu": 0, **counts.hits},
        "misses": {"absent": 0, **counts.misses},
        "stores": {"stored": 0, "exists": 0, **counts.stores},
        "refused": dict(counts.refused),
        "removed": dict(hierarchy.pool.removed),
        "bytes": {"stored": 0, "read": 0, **counts.bytes},
    }


def _cpu_tier(hierarchy: Hierarchy) -> Stats:
    arena = hierarchy.arena
    classes = [
        {
            "slot_bytes": slot_bytes,
            "segments": len(class_.segments),
            "slots": sum(segment.slots for segment in class_.segments.values()),
            "used_slots": sum(
                segment.slots - len(segment.free) - segment.reserved for segment in class_.segments.values()
            ),
            "reserved_slots": sum(segment.reserved for segment in class_.segments.values()),
        }
        for slot_bytes, class_ in sorted(arena.classes.items())
    ]
    return {
        "name": "cpu",
        "state": _cpu_state(hierarchy),
        "capacity_bytes": arena.budget_bytes,
        "pool_bytes": arena.size_bytes,
        "used_bytes": hierarchy.pool.used_bytes,
        "blocks": hierarchy.pool.block_count,
        "populated_bytes": arena.populated_bytes,
        "overhead_bytes": arena.overhead_bytes,
        # What is not populated was promised and not given so far.
        "committed_bytes": arena.committed_bytes - (arena.size_bytes - arena.populated_bytes),
        "free_bytes": hierarchy.pool.free_bytes,
        "waste_bytes": _waste_bytes(hierarchy),
        "backing": {
            "kind": arena.memory.backing.kind,
            "page_bytes": arena.memory.backing.page_bytes,
            "huge_bytes": arena.huge_bytes,
            "note": arena.memory.backing.note,
        },
        "segments": sum(int(class_["segments"]) for class_ in classes),
        "classes": classes,
        "evictions": hierarchy.pool.removed["evicted"],
        "segment_moves": hierarchy.pool.segment_moves,
    }


def _cpu_state(hierarchy: Hierarchy) -> str:
    if hierarchy.pool.population_failed:
        return "degraded"
    return "ok" if hierarchy.arena.populated else "populating"


def _waste_bytes(hierarchy: Hierarchy) -> int:
    """What segments hold beyond their slots, and slots beyond their blocks."""
    return _ends_of_segments(hierarchy.arena) + sum(
        len(keyspace.blocks) * (keyspace.slot_bytes - keyspace.block_bytes)
        for entry in hierarchy.namespaces.entries.values()
        for keyspace in entry.keyspaces
    )


def _ends_of_segments(arena: Arena) -> int:
    return sum(
        segment.granules * (2 << 20) - segment.slots * segment.slot_bytes
        for class_ in arena.classes.values()
        for segment in class_.segments.values()
    )
