"""How much memory this machine can give to the pool, and who says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

#: What the daemon needs beside the pool: its code and its connections. Under a memory limit it was killed with 16 MiB
#: left to it and lived with 32. (Its books are part of cpu_bytes; those of a large disk tier come on top.)
OWN_BYTES: Final = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the pool may be carved from. All figures in bytes.

    Attributes:
        available_bytes: What the kernel says can be taken without swapping (MemAvailable).
        cgroup_room_bytes: What the narrowest memory limit above this process leaves; None where there is no limit.
        hugetlb_free_bytes: Free reserved huge pages. They count in neither of the two above.
    """

    available_bytes: int
    cgroup_room_bytes: int | None = None
    hugetlb_free_bytes: int = 0

    def pool_bytes_max(self, hugetlb: bool) -> int:
        """The largest pool that fits, with or without the reserved huge pages."""
        rooms = [self.available_bytes]
        if self.cgroup_room_bytes is not None:
            rooms.append(self.cgroup_room_bytes)
        # A pool on hugetlb takes all its pages from there, a pool on ordinary memory none: never the sum of both.
        return max(min(rooms) - OWN_BYTES, self.hugetlb_free_bytes if hugetlb else 0)

    def describe(self) -> str:
        """The figures in one phrase, for an error or a log line."""
        parts = [f"MemAvailable is {self.available_bytes}"]
        if self.cgroup_room_bytes is not None:
            parts.append(f"the cgroup limit leaves {self.cgroup_room_bytes}")
        if self.hugetlb_free_bytes:
            parts.append(f"free reserved huge pages are {self.hugetlb_free_bytes}")
        return ", ".join([*parts, f"and {OWN_BYTES} are for the daemon itself"])


def read_machine(root: Path = Path("/")) -> Machine:
    """Reads the figures of this machine.

    Args:
        root: Where ``proc`` and ``sys`` are found.

    Raises:
        OSError: there is no readable ``proc/meminfo``.
    """
    meminfo: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            # Sizes are in kB; counts, such as HugePages_Free, have no unit.
            meminfo[name] = int(number[0]) * (1024 if number[-1] == "kB" else 1)
    return Machine(
        available_bytes=meminfo.get("MemAvailable", 0),
        cgroup_room_bytes=_cgroup_room(root),
        hugetlb_free_bytes=meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0),
    )


def _cgroup_room(root: Path) -> int | None:
    """Room under the narrowest limit on the way from this process's cgroup to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, which is not visible here; the mount's root is then our own group.
        folders = [folder, *folder.parents] if folder.is_dir() else [base]
        for group in folders:
            room = _room_in(group, limit, usage)
            if room is not None:
                rooms.append(room)
            if group == base:
                break
    return min(rooms) if rooms else None


def _room_in(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = int((group / limit_name).read_text())
        usage = int((group / usage_name).read_text())
        statistics = dict(_pair(line) for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No such file (no limit at this level) or the word "max".
        return None
    if limit >= 1 << 60:
        # Version 1 writes "no limit" as a number near 2**63.
        return None
    # Page cache that is charged to the group is given up on demand, so it is room.
    cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return max(0, limit - max(0, usage - cache))


def _pair(line: str) -> tuple[str, int]:
    name, value = line.split()
    return name, int(value)
