"""What an operator of a disk tier can see; docs/disk.md explains each figure."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from kvstore.tiers.disk_load import FIXED_BYTES
from kvstore.tiers.io_threads import Lane

if TYPE_CHECKING:
    from kvstore.tiers.disk import DiskTier

_COUNTERS = (
    "reads",
    "read_bytes",
    "read_errors",
    "reads_refused",
    "writes",
    "write_bytes",
    "write_errors",
    "exists",
    "throttled",
    "no_room",
    "damaged",
    "evicted_bytes",
    "index_dropped",
)


def tier_stats(tier: DiskTier) -> dict[str, Any]:
    """The figures of a tier as it is now."""
    books, room, committer = tier.books, tier.room, tier.committer
    fault = tier.health.fault
    depth = tier.io_threads.depth if tier.io_threads is not None else dict.fromkeys(Lane, 0)
    medium = tier.folder.medium
    index_bytes = tier.index.known_bytes if tier.index is not None else 0
    charged_bytes = FIXED_BYTES + tier.folder.stray_bytes + books.charged_bytes + books.index_excess_bytes
    slab_bytes = sum(slab.size_bytes for slab in books.slabs.values())
    return {
        "name": tier.name,
        "state": tier.state.value,
        "directory": str(tier.directory),
        "filesystem": tier.folder.filesystem,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": books.payload_bytes,
        "blocks": len(books.index),
        "allocated_bytes": slab_bytes + index_bytes,
        "charged_bytes": charged_bytes if room else 0,
        "waste_bytes": sum(slab.count * slab.extent_bytes for slab in books.slabs.values()) - books.payload_bytes,
        "index_bytes": index_bytes,
        "books_bytes": books.memory_bytes,
        "books_bytes_max": books.memory_bytes_max,
        "raw_bytes": room.raw_bytes if room else 0,
        "prewritten_bytes": room.prewritten_bytes if room else 0,
        "direct_io": medium.direct,
        "direct_io_note": medium.direct_note,
        "memory_align": medium.memory_align,
        "fallocate": medium.allocate,
        "fallocate_note": medium.allocate_note,
        "index_rebuilt": tier.rebuilt,
        "load_s": tier.load_s,
        "fault": fault.describe() if fault else None,
        "faults": dict(tier.health.faults),
        "growth_blocked": errno.errorcode.get(room.grow_fault, "") if room else "",
        "evictions": tier.counts["evicted"],
        "slab_moves": room.stolen if room else 0,
        "commits": committer.rounds if committer else 0,
        "uncommitted": committer.pending if committer else 0,
        "unmarked": committer.unmarked if committer else 0,
        "bounced": tier.mover.bounced,
        "rereads": tier.mover.reread,
        "lost_calls": tier.health.lost_calls,
        "read_queue": depth[Lane.READ],
        "reading_blocks": tier.reader.waiting if tier.reader else 0,
        "held_blocks": tier.holder.held_blocks if tier.holder else 0,
        "write_queue": depth[Lane.WRITE],
        "writing_blocks": len(tier.writer.writing) if tier.writer else 0,
        "slabs": len(books.slabs),
        "classes": [
            {
                "extent_bytes": kind.extent_bytes,
                "slabs": len(kind.slabs),
                "extents": sum(slab.extents for slab in kind.slabs.values()),
                "used_extents": sum(slab.count for slab in kind.slabs.values()),
                "retired_extents": sum(slab.retired for slab in kind.slabs.values()),
            }
            for kind in books.classes.values()
            if kind.slabs
        ],
        **{name: tier.counts[name] for name in _COUNTERS},
    }
