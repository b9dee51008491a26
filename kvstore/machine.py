"""How much memory this machine can give to the pool, how many CPUs it has, and who says so."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
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
        # A pool on hugetlb takes all its pages from there, a pool on ordinary memory none: never the sum of both.
        return max(self.room_bytes - OWN_BYTES, self.hugetlb_free_bytes if hugetlb else 0)

    @property
    def room_bytes(self) -> int:
        """What this process can still take of ordinary memory."""
        rooms = (self.available_bytes, self.cgroup_room_bytes)
        return min(room for room in rooms if room is not None)

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


def cpus(root: Path = Path("/")) -> float:
    """How many CPUs this process may keep busy: those it may run on, or less where a limit above it says so."""
    count = float(len(os.sched_getaffinity(0)))
    for folder, version in _cgroup_folders(root, "cpu"):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                count = min(count, int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such file, or the word "max": there is no limit at this level
    return count


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of the groups that this process is in, from its own up to the root, each with its cgroup version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, which is not visible here; the mount's root is then our own group.
        for group in [folder, *folder.parents] if folder.is_dir() else [base]:
            yield group, version
            if group == base:
                break


def _cgroup_room(root: Path) -> int | None:
    """Room under the narrowest limit on the way from this process's cgroup to the root."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    rooms = [_room_in(folder, *names[version]) for folder, version in _cgroup_folders(root, "memory")]
    return min((room for room in rooms if room is not None), default=None)


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
