from __future__ import annotations

import os
from pathlib import Path

from kvstore.machine import Machine, cpus, read_machine

MEMINFO = """\
MemTotal:       24000000 kB
MemAvailable:   20000000 kB
HugePages_Total:    1024
HugePages_Free:       10
Hugepagesize:       2048 kB
"""
KIB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_limit(tmp_path: Path) -> None:
    machine = read_machine(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert machine == Machine(20_000_000 * KIB, None, 10 * 2048 * KIB)


def test_the_narrowest_limit_on_the_way_up_counts_and_page_cache_is_room(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/engine/memory.max": "max\n",
            "sys/fs/cgroup/pod/engine/memory.current": "1000\n",
            "sys/fs/cgroup/pod/engine/memory.stat": "inactive_file 0\n",
            "sys/fs/cgroup/pod/memory.max": "10000\n",
            "sys/fs/cgroup/pod/memory.current": "4000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1000\ninactive_file 3000\n",
        },
    )
    assert read_machine(root).cgroup_room_bytes == 9000


def test_in_a_container_the_path_is_the_hosts_and_the_mount_is_our_own_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": "5000\n",
            "sys/fs/cgroup/memory.current": "6000\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
    )
    assert read_machine(root).cgroup_room_bytes == 0


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "8000\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 1000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    assert read_machine(write(tmp_path, files)).cgroup_room_bytes == 4000


def test_this_machine_has_room() -> None:
    machine = read_machine()
    assert machine.pool_bytes_max(hugetlb=False) > 16 << 20
    assert str(machine.available_bytes) in machine.describe()


def test_cpus_are_those_of_this_process_or_fewer_where_a_limit_says_so(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    assert cpus(tmp_path) == own
    files = {
        "proc/self/cgroup": "0::/pod/engine\n",
        "sys/fs/cgroup/pod/engine/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
    }
    assert cpus(write(tmp_path / "v2", files)) == 0.5
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "25000\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert cpus(write(tmp_path / "v1", files)) == 0.25
    assert 0 < cpus() <= own
