"""What machine this is: cores, memory, caches and names, as this process may use them.

A container sees the whole host in /proc/meminfo and in the processor count. What counts is what it is allowed: the processors
this process is bound to, the processor quota and the memory limit of its control group, or of any group above it. Version 1 of
control groups keeps these in one tree a controller, version 2 in one tree for all; both may be there at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = "sys/fs/cgroup"


def usable_cores(root: Path = Path("/")) -> int:
    """Processors this process may keep busy: those it is bound to, but no more than its groups' quotas; at least 1.

    A quota of one and a half counts as 1. `root` is where /proc and /sys are looked for.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups(root, "cpu"):
        if (line := _read(folder / "cpu.max")) is not None:  # version 2: "max 100000" or "150000 100000"
            quota, _, period = line.partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # "max" and -1 are no limits
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory this process may use: what there is, or its groups' smallest limit. OSError without /proc/meminfo."""
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal:"):
            nbytes = int(line.split()[1]) << 10
            break
    else:
        raise OSError("/proc/meminfo: has no MemTotal")
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name)
            if limit is not None and limit.isdecimal() and int(limit) > 0:
                nbytes = min(nbytes, int(limit))
    return nbytes


def cache_nbytes(root: Path = Path("/")) -> int:
    """Bytes of last-level cache, all of them together; 32 MiB where the system does not say."""
    found: dict[str, int] = {}
    for cpu in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        levels = {_read(index / "level"): index for index in (cpu / "cache").glob("index*")}
        last = levels.get("3", levels.get("2"))
        if last is not None:
            size, shared = _read(last / "size") or "", _read(last / "shared_cpu_list") or cpu.name
            if size[:-1].isdecimal() and size[-1] in "KM":
                found[shared] = int(size[:-1]) << (10 if size[-1] == "K" else 20)
    return sum(found.values()) or 32 << 20


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name as the system has it, "CPU" if it has none."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of all above it, of both versions, where they are there.

    Inside a container the group's path may be the host's, and its own folder what is mounted; so every folder on the path is
    looked at, the mount itself included.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [root / _GROUPS, root / _GROUPS / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / _GROUPS / controllers, root / _GROUPS / controller]
        else:
            continue
        for mount in mounts:
            folder = Path(path.lstrip("/"))
            yield from (mount / part for part in (folder, *folder.parents))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
